"""States of ``mixed_attn`` and, with ``causal=False``, of ``linear_attn``: what is summed of every chunk, and its running sum.

::

    mixed_sums_fwd      k_linᵀ v of every chunk; for the backward pass, lin_scale q_linᵀ do
    mixed_states_fwd    S before every chunk, and after the last whole one: the sum over the chunks before, or over all of them
                        if not CAUSAL; in REVERSE dS, what later chunks make of a chunk's sum

A state takes whole chunks alone: the tokens of the last one, if it is not full, are held beside it.
"""

import triton
import triton.language as tl

from ..lib.tiles import dot_add
from .blocks import load_rows, locate_chunk

__all__ = ["mixed_states_fwd", "mixed_sums_fwd"]


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C"])
def mixed_sums_fwd(
    x, y, held_x, held_y, out, owner, first, cu, length, T, PER, N, HV, C, scale,
    xb, xt, xh, yb, yt, yh, hx, hy,
    L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, HELD: tl.constexpr, QUERIES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``scale xᵀ y`` of one chunk, a ``[BL, BV]`` tile, float32; ``QUERIES`` have no rows in the state."""
    NL: tl.constexpr = (L + BL - 1) // BL
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    il = pid // NV % NL
    hv = pid // (NV * NL) % HV
    i = pid // (NV * NL * HV)
    n, row, bos, p, tokens, chunk = locate_chunk(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    if chunk * C >= tokens:
        return
    head = hv.to(tl.int64)
    columns_l = il * BL + tl.arange(0, BL)
    columns_v = iv * BV + tl.arange(0, BV)
    x += row * xb + bos * xt + (head // GROUP) * xh
    y += row * yb + bos * yt + head * yh
    if HELD and not QUERIES:
        held_x += n * C * hx + head * L
        held_y += n * C * hy + head * V
    stop = tl.minimum(chunk * C + C, tokens)
    acc = tl.zeros((BL, BV), tl.float32)
    for start in range(chunk * C, stop, BT):
        j = start + tl.arange(0, BT)
        bx = load_rows(x, held_x, j, xt, hx, columns_l, p, stop, L, BL, HELD and not QUERIES)
        by = load_rows(y, held_y, j, yt, hy, columns_v, p, stop, V, BV, HELD and not QUERIES)
        acc = dot_add(tl.trans(bx.to(by.dtype)), by, acc, PREC)
    at = out + (i.to(tl.int64) * HV + hv) * (L * V) + columns_l[:, None] * V + columns_v[None, :]
    tl.store(at, acc * scale, mask=(columns_l < L)[:, None] & (columns_v < V)[None, :])


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C"])
def mixed_states_fwd(
    chunk_sums, states, start, end, owner, first, cu, length, T, PER, N, HV, C,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr,
    REVERSE: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """The states that chunks read, from the sums of chunks; ``SIZE`` numbers a head. Only whole chunks add to a state."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    columns = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    hv = pid // BLOCKS % HV
    n = (pid // (BLOCKS * HV)).to(tl.int64)
    tokens = T
    chunk0 = (n * PER).to(tl.int64)
    if PACKED:
        tokens = (tl.load(cu + n + 1).to(tl.int64) - tl.load(cu + n).to(tl.int64)).to(tl.int32)
        chunk0 = tl.load(first + n).to(tl.int64)
    if HELD:
        tokens += tl.load(length + n).to(tl.int32)
    chunks = (tokens + C - 1) // C
    whole = tokens // C
    S = tl.zeros((BLOCK,), tl.float32)
    if START:
        S += tl.load(start + (n * HV + hv) * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        for step in range(0, chunks):
            c = step
            if REVERSE:
                c = chunks - 1 - step
            at = ((chunk0 + c) * HV + hv) * SIZE + columns
            own = tl.load(chunk_sums + at, mask=inside, other=0.0)
            if REVERSE:
                tl.store(states + at, tl.where(c < whole, S, 0.0).to(states.dtype.element_ty), mask=inside)
                S += own
            else:
                tl.store(states + at, S.to(states.dtype.element_ty), mask=inside)
                S += tl.where(c < whole, own, 0.0)
    else:
        for c in range(0, chunks):
            S += tl.load(chunk_sums + ((chunk0 + c) * HV + hv) * SIZE + columns, mask=inside, other=0.0)
        for c in range(0, chunks):
            tl.store(states + ((chunk0 + c) * HV + hv) * SIZE + columns, S.to(states.dtype.element_ty), mask=inside)
    if END:
        tl.store(end + (n * HV + hv) * SIZE + columns, S, mask=inside)
