"""Hedgehog's map, and its gradients (Zhang et al. 2024, eq. 3 and appendix A).

::

    y = x W + b                                    of each head
    p = exp(y), n = exp(-y)                        exponents within ±HIGHEST
                                                   or, if SOFTMAX, softmax(y) and softmax(-y); no less than LEAST
    φ = [p, n]                                     or, without NEGATION, p alone

    dy = dp ∘ p - dn ∘ n                           0 past ±HIGHEST
                                                   or p ∘ (dp - Σ dp ∘ p) - n ∘ (dn - Σ dn ∘ n); dp, dn 0 at LEAST
    dx = dy Wᵀ        dW = Σ xᵀ dy        db = Σ dy

A program has one head's ``W [BK, BD]``, and rows ``[R, BK]`` of ``x [M, H, K]``, which is read where it lies. Backward it walks
over blocks of rows, makes the features again, and adds up its part of ``dW`` and ``db``.
"""

import triton
import triton.language as tl
from linattn.feature_maps import base

from ..lib.tiles import dot, dot_add

__all__ = ["features_bwd", "features_fwd"]

HIGHEST = tl.constexpr(base.HIGHEST)
LEAST = tl.constexpr(base.LEAST)


@triton.jit
def load_rows(p, rows, m_stride, columns, M, W: tl.constexpr):
    """Rows ``[R]`` of a head's array ``[M, W]``."""
    at = p + rows.to(tl.int64)[:, None] * m_stride + columns[None, :]
    return tl.load(at, mask=(rows < M)[:, None] & (columns < W)[None, :], other=0.0)


@triton.jit
def load_weights(weight, h, rows, columns, K: tl.constexpr, D: tl.constexpr):
    """A head's ``W`` of an array ``[H, K, D]`` without gaps."""
    at = weight + (h.to(tl.int64) * K + rows)[:, None] * D + columns[None, :]
    return tl.load(at, mask=(rows < K)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def projected(x, w, bias, h, columns, D: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """``x W + b``, float32."""
    y = dot(x.to(DT), w.to(DT), PREC)
    if bias is not None:
        y += tl.load(bias + h.to(tl.int64) * D + columns, mask=columns < D, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def activated(y, columns, D: tl.constexpr, SOFTMAX: tl.constexpr):
    """``exp(y)`` or ``softmax(y)``, within their bounds; zeros past ``D``."""
    inside = (columns < D)[None, :]
    if SOFTMAX:
        y = tl.where(inside, y, float("-inf"))
        e = tl.exp(y - tl.max(y, 1)[:, None])
        made = e / tl.sum(e, 1)[:, None]
        return tl.where(inside, tl.where(made < LEAST, LEAST, made), 0.0)
    held = tl.where(y > HIGHEST, HIGHEST, tl.where(y < -HIGHEST, -HIGHEST, y))
    return tl.where(inside, tl.exp(held), 0.0)


@triton.jit
def through(d, y, made, SOFTMAX: tl.constexpr):
    """The gradient of ``y``, which was :func:`activated`, from ``d``, that of what was ``made`` of it."""
    met = d * made
    if SOFTMAX:
        met = tl.where(made == LEAST, 0.0, met)
        return met - made * tl.sum(met, 1)[:, None]
    return tl.where(tl.abs(y) > HIGHEST, 0.0, met)


@triton.jit(do_not_specialize=["M", "H"])
def features_fwd(
    x, weight, bias, out, M, H, xm, xh,
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, SOFTMAX: tl.constexpr,
    NEGATION: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``φ`` of ``R`` rows of a head, to ``out [M, H, W]``, ``W`` being ``2 D`` or ``D``."""
    W: tl.constexpr = 2 * D if NEGATION else D
    pid = tl.program_id(0)
    h = pid % H
    rows = pid // H * R + tl.arange(0, R)
    channels = tl.arange(0, BK)
    columns = tl.arange(0, BD)
    bx = load_rows(x + h.to(tl.int64) * xh, rows, xm, channels, M, K)
    y = projected(bx, load_weights(weight, h, channels, columns, K, D), bias, h, columns, D, DT, PREC)
    at = out + (rows.to(tl.int64) * H + h)[:, None] * W + columns[None, :]
    inside = (rows < M)[:, None] & (columns < D)[None, :]
    tl.store(at, activated(y, columns, D, SOFTMAX).to(out.dtype.element_ty), mask=inside)
    if NEGATION:
        tl.store(at + D, activated(-y, columns, D, SOFTMAX).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "H"])
def features_bwd(
    x, weight, bias, dout, dx, weights, biases, M, H, xm, xh, om, oh,
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, SOFTMAX: tl.constexpr,
    NEGATION: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dx`` of every so many rows of a head, and their part of ``dW`` and of ``db``, to ``weights`` and ``biases``."""
    pid = tl.program_id(0)
    h = pid % H
    walk = pid // H
    channels = tl.arange(0, BK)
    columns = tl.arange(0, BD)
    w = load_weights(weight, h, channels, columns, K, D)
    dw = tl.zeros((BK, BD), tl.float32)
    db = tl.zeros((BD,), tl.float32)
    x += h.to(tl.int64) * xh
    dout += h.to(tl.int64) * oh
    for block in range(walk, tl.cdiv(M, R), tl.num_programs(0) // H):
        rows = block * R + tl.arange(0, R)
        bx = load_rows(x, rows, xm, channels, M, K)
        y = projected(bx, w, bias, h, columns, D, DT, PREC)
        dp = load_rows(dout, rows, om, columns, M, D).to(tl.float32)
        dy = through(dp, y, activated(y, columns, D, SOFTMAX), SOFTMAX)
        if NEGATION:
            dn = load_rows(dout + D, rows, om, columns, M, D).to(tl.float32)
            dy -= through(dn, -y, activated(-y, columns, D, SOFTMAX), SOFTMAX)
        dy = tl.where((rows < M)[:, None], dy, 0.0)  # of no row the features are not zero
        db += tl.sum(dy, 0)
        dw = dot_add(tl.trans(bx.to(DT)), dy.to(DT), dw, PREC)
        back = dot(dy.to(DT), tl.trans(w.to(DT)), PREC)
        at = dx + (rows.to(tl.int64) * H + h)[:, None] * K + channels[None, :]
        tl.store(at, back.to(dx.dtype.element_ty), mask=(rows < M)[:, None] & (channels < K)[None, :])
    part = walk.to(tl.int64) * H + h
    at = weights + part * (K * D) + channels[:, None] * D + columns[None, :]
    tl.store(at, dw, mask=(channels < K)[:, None] & (columns < D)[None, :])
    if biases is not None:
        tl.store(biases + part * D + columns, db, mask=columns < D)
