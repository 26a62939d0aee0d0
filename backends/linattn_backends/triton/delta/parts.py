"""A tile of the state, transposed, ``S [BV, K]``, in parts of ``BK`` key channels each: tuples, as are the rows it meets.

A product has its left operand, and what its precision splits off it, in registers beside the state: of wide heads the assembler
finds too few for all of one at once, and spills nearly everything.
"""

import triton
import triton.language as tl

from ..lib.indexing import load_state
from ..lib.tiles import dot, dot_add, load_tile


@triton.jit
def begin_parts(columns_v, K: tl.constexpr, BK: tl.constexpr, IDENTITY: tl.constexpr):
    """A state ``[BV, K]`` of zeros, or of the identity's columns."""
    S = ()
    for n in tl.static_range((K + BK - 1) // BK):
        part = tl.zeros((columns_v.shape[0], BK), tl.float32)
        if IDENTITY:
            part += tl.where((n * BK + tl.arange(0, BK))[None, :] == columns_v[:, None], 1.0, 0.0)
        S += (part,)
    return S


@triton.jit
def add_state(S, x, i, hv, columns_v, sn, sh, sk, sv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """``S`` and head ``hv`` of state ``i`` of ``x [states, heads, K, V]``."""
    parts = ()
    for n in tl.static_range(len(S)):
        columns = (n * BK + tl.arange(0, BK))[None, :]
        inside = (columns_v < V)[:, None] & (columns < K)
        parts += (S[n] + load_state(x, i, hv, columns, columns_v[:, None], inside, sn, sh, sk, sv),)
    return parts


@triton.jit
def load_part(p, rows, stride, n: tl.constexpr, L, K: tl.constexpr, BK: tl.constexpr):
    """Part ``n`` of rows ``[C, K]`` of ``x [T, K]`` at ``p``; zero past ``L`` and past ``K``."""
    return load_tile(p, rows, stride, n * BK + tl.arange(0, BK), L, K, BK)


@triton.jit
def load_rows(p, rows, stride, L, K: tl.constexpr, BK: tl.constexpr):
    """All parts of rows ``[C, K]`` of ``x [T, K]`` at ``p``."""
    x = ()
    for n in tl.static_range((K + BK - 1) // BK):
        x += (load_part(p, rows, stride, n, L, K, BK),)
    return x


@triton.jit
def load_decay(p, K: tl.constexpr, BK: tl.constexpr):
    """What each key channel decays by, of ``K`` numbers at ``p``."""
    decay = ()
    for n in tl.static_range((K + BK - 1) // BK):
        columns = n * BK + tl.arange(0, BK)
        decay += (tl.load(p + columns, mask=columns < K, other=0.0)[None, :],)
    return decay


@triton.jit
def decayed(S, decay, GATE: tl.constexpr):
    """``S`` times ``decay``: a number if ``GATE`` is 1, one a key channel if it is 2."""
    parts = ()
    for n in tl.static_range(len(S)):
        if GATE == 2:
            parts += (S[n] * decay[n],)
        else:
            parts += (S[n] * decay,)
    return parts


@triton.jit
def times_rows(S, x, DT: tl.constexpr, PREC: tl.constexpr):
    """``S xᵀ [BV, C]`` of rows ``x``, in parts as :func:`load_rows` has them, and factors in ``DT``."""
    made = dot(S[0].to(DT), tl.trans(x[0].to(DT)), PREC)
    for n in tl.static_range(1, len(S)):
        made = dot_add(S[n].to(DT), tl.trans(x[n].to(DT)), made, PREC)
    return made


@triton.jit
def times_both(S, x, p, rows, stride, L, K: tl.constexpr, BK: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr):
    """``S xᵀ`` and ``S yᵀ`` of rows ``x``, and ``y`` at ``p``: a part of the left operand is there for both, and then gone."""
    old = S[0].to(DT)
    made = dot(old, tl.trans(x[0].to(DT)), PREC)
    other = dot(old, tl.trans(load_part(p, rows, stride, 0, L, K, BK).to(DT)), PREC)
    for n in tl.static_range(1, len(S)):
        old = S[n].to(DT)
        made = dot_add(old, tl.trans(x[n].to(DT)), made, PREC)
        other = dot_add(old, tl.trans(load_part(p, rows, stride, n, L, K, BK).to(DT)), other, PREC)
    return made, other


@triton.jit
def add_rows(S, weights, x, DT: tl.constexpr, PREC: tl.constexpr):
    """``S`` and ``weights x`` of factors in ``DT``, ``weights [BV, C]``."""
    parts = ()
    for n in tl.static_range(len(S)):
        parts += (dot_add(weights.to(DT), x[n].to(DT), S[n], PREC),)
    return parts


@triton.jit
def store_parts(p, S, columns_v, sk, sv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    """Store ``S`` in a matrix at ``p`` whose key channels are ``sk`` elements apart, and value channels ``sv``."""
    for n in tl.static_range(len(S)):
        columns = (n * BK + tl.arange(0, BK))[None, :]
        inside = (columns_v < V)[:, None] & (columns < K)
        tl.store(p + (columns * sk + columns_v[:, None] * sv), S[n].to(p.dtype.element_ty), mask=inside)
