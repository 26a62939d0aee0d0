"""RMS norm with a gate, and its gradients.

::

    a = act(z)                     silu or sigmoid
    u = x, or x ∘ a                the gate after the norm, or before it: BEFORE is the norm's place
    r = (mean u² + ε)^(-1/2)       over each group of G columns
    y = r u ∘ w ∘ a, or r u ∘ w

    du = r (e − r u · mean(e ∘ r u))       e = dy ∘ w ∘ a, or dy ∘ w
    dx = du, or du ∘ a                     dw = Σ dy ∘ r u ∘ a, or Σ dy ∘ r u
    dz = act'(z) ∘ (dy ∘ r u ∘ w, or du ∘ x)

A program holds ``R`` rows of one group in registers, so that memory is read once. Rows are ``[M, H]``, tokens and heads, whose
strides need not agree: ``x``, ``z`` and ``dy`` are read where they lie. Backward, a program walks over rows, and adds up its
part of ``dw``.
"""

import triton
import triton.language as tl

from ..lib.activations import sigmoid, silu_slope

__all__ = ["norm_gradients_bwd", "norm_outputs_fwd"]


@triton.jit
def gate_of(z, SILU: tl.constexpr):
    """``act(z)``."""
    if SILU:
        return z * sigmoid(z)
    return sigmoid(z)


@triton.jit
def slope_of(z, SILU: tl.constexpr):
    """``act'(z)``."""
    s = sigmoid(z)
    if SILU:
        return silu_slope(z, s)
    return s * (1.0 - s)


@triton.jit
def inverse_rms(u, rows, M, G, eps):
    """``r`` of each row ``[R, 1]``; whatever ``ε``, finite where there is no row."""
    mean = tl.where(rows < M, tl.sum(u * u, 1) / G + eps, 1.0)
    return tl.rsqrt(mean)[:, None]


@triton.jit
def tile_at(p, rows, m_stride, h, h_stride, columns, mask):
    """Rows ``[R]`` of head ``h`` and columns ``[BG]`` as a tile, float32."""
    at = p + h.to(tl.int64) * h_stride + rows.to(tl.int64)[:, None] * m_stride + columns[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def keep_tile(p, tile, rows, H, D, h, columns, mask):
    """Store a tile of an array ``[M, H, D]`` without gaps."""
    at = p + (rows.to(tl.int64)[:, None] * H + h) * D + columns[None, :]
    tl.store(at, tile.to(p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "H"])
def norm_outputs_fwd(
    x, z, weight, y, M, H, D, G, eps, xm, xh, zm, zh, ws,
    BG: tl.constexpr, R: tl.constexpr, SILU: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """``y`` of ``R`` rows of one head and group."""
    pid = tl.program_id(0)
    groups = D // G
    g = pid % groups
    h = pid // groups % H
    rows = pid // (groups * H) * R + tl.arange(0, R)
    within = tl.arange(0, BG)
    columns = g * G + within
    mask = (rows < M)[:, None] & (within < G)[None, :]
    u = tile_at(x, rows, xm, h, xh, columns, mask)
    a = gate_of(tile_at(z, rows, zm, h, zh, columns, mask), SILU)
    w = tl.load(weight + columns.to(tl.int64) * ws, mask=within < G, other=0.0).to(tl.float32)[None, :]
    if not BEFORE:
        u *= a
    out = u * inverse_rms(u, rows, M, G, eps) * w
    if BEFORE:
        out *= a
    keep_tile(y, out, rows, H, D, h, columns, mask)


@triton.jit(do_not_specialize=["M", "H"])
def norm_gradients_bwd(
    x, z, weight, dy, dx, dz, parts, M, H, D, G, eps, xm, xh, zm, zh, ym, yh, ws,
    BG: tl.constexpr, R: tl.constexpr, SILU: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """``dx`` and ``dz`` of every so many rows of one group, and their part of ``dw``: ``[BG]`` of ``parts [walks, D]``."""
    pid = tl.program_id(0)
    groups = D // G
    g = pid % groups
    walk = pid // groups
    within = tl.arange(0, BG)
    columns = g * G + within
    w = tl.load(weight + columns.to(tl.int64) * ws, mask=within < G, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((R, BG), tl.float32)
    for block in range(walk, tl.cdiv(M, R) * H, tl.num_programs(0) // groups):
        h = tl.cast(block % H, tl.int32)
        rows = block // H * R + tl.arange(0, R)
        mask = (rows < M)[:, None] & (within < G)[None, :]
        bx = tile_at(x, rows, xm, h, xh, columns, mask)
        bz = tile_at(z, rows, zm, h, zh, columns, mask)
        e = tile_at(dy, rows, ym, h, yh, columns, mask)
        a = gate_of(bz, SILU)
        if BEFORE:
            r = inverse_rms(bx, rows, M, G, eps)
            n = bx * r
            s = e * n
            dw += s * a
            keep_tile(dz, s * w * slope_of(bz, SILU), rows, H, D, h, columns, mask)
            e *= w * a
            du = r * (e - n * (tl.sum(e * n, 1) / G)[:, None])
            keep_tile(dx, du, rows, H, D, h, columns, mask)
        else:
            u = bx * a
            r = inverse_rms(u, rows, M, G, eps)
            n = u * r
            dw += e * n
            e *= w
            du = r * (e - n * (tl.sum(e * n, 1) / G)[:, None])
            keep_tile(dx, du * a, rows, H, D, h, columns, mask)
            keep_tile(dz, du * bx * slope_of(bz, SILU), rows, H, D, h, columns, mask)
    tl.store(parts + tl.cast(walk, tl.int64) * D + columns, tl.sum(dw, 0), mask=within < G)
