"""Tiles of arrays: how they are loaded and stored, and multiplied, in float32 or as the interpreter can."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter of Triton 3.6 multiplies the bits of bfloat16 numbers: there, products are done in float32."""


@triton.jit
def load_tile(p, rows, stride, columns, L, W: tl.constexpr, BW: tl.constexpr):
    """Rows ``[C]`` and columns ``[BW]`` of ``x [T, W]`` at ``p`` as a tile; zero past ``L`` and past ``W``."""
    keep = (rows < L)[:, None]
    if W % BW != 0:
        keep = keep & (columns < W)[None, :]
    return tl.load(p + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=keep, other=0.0)


@triton.jit
def accumulate(p, x, keep, TURN, TURNS: tl.constexpr):
    """Store of ``x``; where ``TURNS`` heads take turns, of its sum with those before."""
    if TURNS > 1:
        x += tl.load(p, mask=keep & (TURN > 0), other=0.0)
    tl.store(p, x.to(p.dtype.element_ty), mask=keep)


@triton.jit
def nearest(x):
    """The number of tf32 that is nearest to ``x``: hardware cuts off what a product in tf32 does not take, toward zero."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # no NaN, to which nothing may be added


@triton.jit
def factor(x, PREC: tl.constexpr):
    """``x`` as a product in ``PREC`` is to have it."""
    if PREC == "nearest" and x.dtype == tl.float32:
        return nearest(x)
    return x


@triton.jit
def dot_add(a, b, acc, PREC: tl.constexpr):
    """``acc + a b`` in float32; of the ``"nearest"`` factors, in tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    WAY: tl.constexpr = "tf32" if PREC == "nearest" else PREC
    return tl.dot(factor(a, PREC), factor(b, PREC), acc, input_precision=WAY)


@triton.jit
def dot(a, b, PREC: tl.constexpr):
    """``a b`` in float32; of the ``"nearest"`` factors, in tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    WAY: tl.constexpr = "tf32" if PREC == "nearest" else PREC
    return tl.dot(factor(a, PREC), factor(b, PREC), input_precision=WAY)


@triton.jit
def total(x):
    """``Σ_i x_i`` of ``[C]`` that come of a product: Triton 3.6 compiles no sum of one dimension of them for B200."""
    return tl.sum(x[:, None], 0).item()


@triton.jit
def smallest(x):
    """``min_i x_i`` of ``[C]`` that come of a product, made as :func:`total` is."""
    return tl.min(x[:, None], 0).item()


@triton.jit
def largest(x):
    """``max_ij |x_ij|`` of ``[C, D]``, made as :func:`total` is."""
    return tl.max(tl.max(tl.abs(x.to(tl.float32)), 1)[:, None], 0).item()


@triton.jit
def to_operand(x, DT: tl.constexpr, PREC: tl.constexpr):
    """``x`` as a product takes it: where two products must cancel to more than that, both take the same numbers."""
    if DT == tl.float32 and (PREC == "tf32" or PREC == "nearest"):  # noqa: SIM300 - an argument, for all its capitals
        return nearest(x)
    return x.to(DT)
