"""Loads and stores that several stages of the delta core share.

``beta [B, T, HV]`` has one number a token (``BETA`` is 1), ``beta [B, T, HV, V]`` one a value channel (2), ``dplr`` none (0).
"""

import triton
import triton.language as tl

from ..lib.gates import FLOOR, load_gate
from ..lib.input_maps import NONE, decay_of, decay_slopes, load_rate
from ..lib.tiles import load_tile


@triton.jit
def load_tile_transposed(p, rows, stride, columns, L, W: tl.constexpr, BW: tl.constexpr):
    """A tile of ``x [T, W]``, transposed on its way: ``[BW, C]``, zero past ``L`` and past ``W``."""
    keep = (rows < L)[None, :]
    if W % BW != 0:
        keep = keep & (columns < W)[:, None]
    return tl.load(p + rows.to(tl.int64)[None, :] * stride + columns[:, None], mask=keep, other=0.0)


@triton.jit
def load_beta_tile(p, rows, stride, columns_v, L, V: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr):
    """``beta`` of a chunk's tokens for values ``[BV, C]``, float32: ``[1, C]`` if ``BETA`` is 1, ``[BV, C]`` if it is 2."""
    if BETA == 2:
        beta = tl.trans(load_tile(p, rows, stride, columns_v, L, V, BV)).to(tl.float32)
    else:
        beta = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)[None, :]
    return beta


@triton.jit
def load_lengths(u, rows, L, HEADS, UNIT: tl.constexpr):
    """Reciprocal lengths of a head's rows, ``[B, T, HEADS]`` without gaps; ones unless ``UNIT``."""
    if UNIT:
        return tl.load(u + rows.to(tl.int64) * HEADS, mask=rows < L, other=0.0)
    return tl.full(rows.shape, 1.0, tl.float32)


@triton.jit
def load_two_lengths(uq, uk, head, rows, L, HEADS, UNIT: tl.constexpr):
    """Reciprocal lengths of a head's queries and keys; ``head`` is the place of its first."""
    if UNIT:
        uq += head
        uk += head
    return load_lengths(uq, rows, L, HEADS, UNIT), load_lengths(uk, rows, L, HEADS, UNIT)


@triton.jit
def load_keys(p, rows, stride, columns, L, K: tl.constexpr, BK: tl.constexpr, u, UNIT: tl.constexpr):
    """A tile of queries or keys ``[C, BK]``; if ``UNIT``, of rows times ``u [C]``, rounded to their dtype."""
    x = load_tile(p, rows, stride, columns, L, K, BK)
    if UNIT:
        x = (x.to(tl.float32) * u[:, None]).to(x.dtype)
    return x


@triton.jit
def load_raw_gate(g, rows, stride, columns, L, K: tl.constexpr, BK: tl.constexpr, bias, hv, bs, bias_k):
    """A tile of raw gates of head ``hv`` with their bias, float32, and which of them are there."""
    x = load_tile(g, rows, stride, columns, L, K, BK).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + hv.to(tl.int64) * bs + columns * bias_k, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    return x, (rows < L)[:, None] & (columns < K)[None, :]


@triton.jit
def load_decays(
    g, rows, stride, columns, L, K: tl.constexpr, BK: tl.constexpr, A_log, bias, hv, As, bs, bias_k, number,
    MAP: tl.constexpr,
):  # fmt: skip
    """A tile of log decays of head ``hv``, at least ``FLOOR``: in the dtype that they have, or of raw gates in float32."""
    if MAP == NONE:
        decays = load_gate(g, rows, stride, columns, L, K, BK)
    else:
        x, there = load_raw_gate(g, rows, stride, columns, L, K, BK, bias, hv, bs, bias_k)
        decays = tl.where(there, decay_of(x, load_rate(A_log, hv.to(tl.int64) * As), number, MAP), 0.0)
        decays = tl.maximum(decays, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    return decays


@triton.jit
def store_gate_gradient(
    dg, at, d, parts, width, g, rows, stride, columns, L, K: tl.constexpr, BK: tl.constexpr, A_log, bias, hv, As, bs, bias_k,
    number, MAP: tl.constexpr,
):  # fmt: skip
    """Store of a tile of the gate's gradient ``d``; of a raw gate's, and of sums over the tile's tokens for its parameters.

    ``parts [2, width]`` are those of ``A`` a channel of every head, and of the bias; from this head's place on.
    """
    there = (rows < L)[:, None] & (columns < K)[None, :]
    if MAP != NONE:
        x, _ = load_raw_gate(g, rows, stride, columns, L, K, BK, bias, hv, bs, bias_k)
        by_x, by_A = decay_slopes(x, load_rate(A_log, hv.to(tl.int64) * As), number, MAP)
        reaches = there & (d != 0.0)
        if parts is not None:
            tl.store(parts + columns, tl.sum(tl.where(reaches, d * by_A, 0.0), 0), mask=columns < K)
        d = tl.where(reaches, d * by_x, 0.0)
        if parts is not None:
            tl.store(parts + width + columns, tl.sum(d, 0), mask=columns < K)
    tl.store(dg + at, d.to(dg.dtype.element_ty), mask=there)


@triton.jit
def load_beta(beta, rows, L, stride, BETA: tl.constexpr):
    """``beta`` of tokens, one number each, float32; ones if there is none."""
    if BETA == 1:
        return tl.load(beta + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)
    return tl.full(rows.shape, 1.0, tl.float32)
