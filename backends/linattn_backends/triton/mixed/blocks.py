"""Blocks of a chunk's tokens, some of them held in the state that a sequence goes on from, and their quadratic scores.

A sequence that goes on from a state has ``p`` tokens of its current chunk held there (``HELD``): they are its first ``p``
tokens, as keys and values, and have no queries. A chunk is worked on in blocks of ``BT`` tokens; ``C`` may be anything.
"""

import triton
import triton.language as tl

from ..lib.tiles import dot


@triton.jit
def locate_chunk(i, owner, first, cu, length, T, PER, N, C, PACKED: tl.constexpr, HELD: tl.constexpr):
    """The place of chunk ``i``: sequence, batch row, first new token, tokens held, tokens in all (0 past the end), number."""
    p = 0
    if PACKED:
        n = tl.load(owner + i).to(tl.int64)
        there = n < N
        n = tl.where(there, n, 0)
        chunk = i - tl.load(first + n)
        bos = tl.load(cu + n).to(tl.int64)
        L = (tl.load(cu + n + 1).to(tl.int64) - bos).to(tl.int32)
        row = n * 0
    else:
        n = (i // PER).to(tl.int64)
        chunk = i % PER
        bos = n * 0
        L = T
        row = n
    if HELD:
        p = tl.load(length + n).to(tl.int32)
        L += p
    if PACKED:
        L = tl.where(there, L, 0)
    return n, row, bos, p, L, chunk


@triton.jit
def load_rows(new, held, j, stride, held_stride, columns, p, stop, W: tl.constexpr, BW: tl.constexpr, HELD: tl.constexpr):
    """Tokens ``j`` below ``stop`` as a tile ``[BT, BW]``: the first ``p`` are held. ``new`` points at the first new token."""
    in_w = (columns < W)[None, :]
    rows = (j - p).to(tl.int64)[:, None]
    x = tl.load(new + rows * stride + columns[None, :], mask=((j >= p) & (j < stop))[:, None] & in_w, other=0.0)
    if HELD:
        old = held + j.to(tl.int64)[:, None] * held_stride + columns[None, :]
        x += tl.load(old, mask=((j < p) & (j < stop))[:, None] & in_w, other=0.0).to(x.dtype)
    return x


@triton.jit
def store_rows(new, held, x, j, stride, held_stride, columns, p, stop, W: tl.constexpr, HELD: tl.constexpr):
    """Store a tile ``x [BT, BW]`` where ``load_rows`` would load it."""
    in_w = (columns < W)[None, :]
    rows = (j - p).to(tl.int64)[:, None]
    keep = ((j >= p) & (j < stop))[:, None] & in_w
    tl.store(new + rows * stride + columns[None, :], x.to(new.dtype.element_ty), mask=keep)
    if HELD:
        old = held + j.to(tl.int64)[:, None] * held_stride + columns[None, :]
        tl.store(old, x.to(held.dtype.element_ty), mask=((j < p) & (j < stop))[:, None] & in_w)


@triton.jit
def relu_scores(
    bq, bk, bias, t, s, tokens, C, scale, CAUSAL: tl.constexpr, BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, PREC: tl.constexpr
):
    """``relu(x)`` for rows ``t`` and columns ``s`` of a chunk of ``tokens``, masked; transposed if ``TRANSPOSED``."""
    if TRANSPOSED:
        x = dot(bk, tl.trans(bq), PREC) * scale
        rt, rs = t[None, :], s[:, None]
    else:
        x = dot(bq, tl.trans(bk), PREC) * scale
        rt, rs = t[:, None], s[None, :]
    keep = (rt < tokens) & (rs < tokens)
    if CAUSAL:
        keep = keep & (rs <= rt)
    if BIAS:
        x += tl.load(bias + rt.to(tl.int64) * C + rs, mask=keep, other=0.0).to(tl.float32)
    return tl.where(keep, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
