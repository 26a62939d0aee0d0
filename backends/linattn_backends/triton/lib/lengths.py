"""Rows of unit length, without a copy of them: a row's reciprocal length, and the gradient of the row itself.

::

    u = (Σ_k x_k² + ε)^{-1/2}          what the kernels that read ``x`` multiply its row by
    y = u x
    dx = u (dy − y Σ_k y_k dy_k)        of the sum ``dy`` of what value heads that share the row left
"""

import triton
import triton.language as tl

from .input_maps import EPSILON

__all__ = ["reciprocal_lengths", "unit_row_gradients"]


@triton.jit
def rows_at(x, rows, columns, T, H, stride_b, stride_t, stride_h, inside):
    """Rows of an array ``[B, T, H, K]`` as it lies, numbered as if it were dense, as a tile, float32."""
    token = rows // H
    at = (token // T).to(tl.int64) * stride_b + (token % T).to(tl.int64) * stride_t + (rows % H).to(tl.int64) * stride_h
    return tl.load(x + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M", "T", "H"])
def reciprocal_lengths(q, k, uq, uk, M, T, H, qb, qt, qh, kb, kt, kh, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr):
    """``u`` of ``R`` of the ``M`` rows of ``q``, in every second program of ``k``."""
    pid = tl.program_id(0)
    rows = (pid // 2).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BK)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    if pid % 2 == 0:
        x = rows_at(q, rows, columns, T, H, qb, qt, qh, inside)
        tl.store(uq + rows, tl.rsqrt(tl.sum(x * x, 1) + EPSILON), mask=rows < M)
    else:
        x = rows_at(k, rows, columns, T, H, kb, kt, kh, inside)
        tl.store(uk + rows, tl.rsqrt(tl.sum(x * x, 1) + EPSILON), mask=rows < M)


@triton.jit
def store_unit_gradient(dy, x, u, dx, rows, columns, M, K: tl.constexpr, SUMS: tl.constexpr):
    """Store of ``dx`` of rows ``x``, from ``SUMS`` parts ``dy`` a row."""
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    at = rows[:, None] * (SUMS * K) + columns[None, :]
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SUMS):
        d += tl.load(dy + at + part * K, mask=inside, other=0.0).to(tl.float32)
    length = tl.load(u + rows, mask=rows < M, other=0.0)[:, None]
    y = x * length
    d = (d - y * tl.sum(y * d, 1)[:, None]) * length
    tl.store(dx + rows[:, None] * K + columns[None, :], d.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "T", "H"])
def unit_row_gradients(
    q, k, uq, uk, dyq, dyk, dq, dk, M, T, H, qb, qt, qh, kb, kt, kh,
    K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """``dq`` of ``R`` of ``M`` rows, in every second program ``dk``; each may lie where its one part does."""
    pid = tl.program_id(0)
    rows = (pid // 2).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BK)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    if pid % 2 == 0:
        store_unit_gradient(
            dyq, rows_at(q, rows, columns, T, H, qb, qt, qh, inside), uq, dq, rows, columns, M, K, SUMS
        )  # fmt: skip
    else:
        store_unit_gradient(
            dyk, rows_at(k, rows, columns, T, H, kb, kt, kh, inside), uk, dk, rows, columns, M, K, SUMS
        )  # fmt: skip
