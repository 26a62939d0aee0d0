"""Scores, decayed rows and gradients of ``dplr`` in Gluon, for Hopper: bfloat16, usual sizes, chunks that take plain products.

Equations are those of :mod:`.vector`. ``a`` and ``b``, here ``-r`` and ``w``, may have another dtype. No copy converts, so
those pass through registers.

Everything is asked for at once and used as it comes, a product is waited for where its result is used, and two programs share
a multiprocessor. So shared memory is what there is least of: a place is given to what comes next as soon as what it held was
used.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.gates import FLOOR, LOG2E
from ..lib.indexing import head_pointer
from ..lib.sm90 import (
    copy_layout,
    copy_rows_async,
    locate_chunk,
    mma_async,
    mma_layout,
    program_parts,
    store_or_add_rows,
    store_rows,
)
from ..lib.sm90_gates import load_log2_gates, opaque_offset, store_split, sum_where, sum_where_async
from .rows_sm90 import copy_narrow_rows, load_wide_rows, scale_rows, store_product, store_wide_rows

__all__ = ["delta_dplr_gradients_bwd_sm90", "delta_dplr_scores_fwd_sm90"]


@gluon.jit
def load_gates(p, stride, count, C: gl.constexpr, BK: gl.constexpr):
    """Log decays ``[C, BK]``, at least ``FLOOR``, base 2."""
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(BK)))[:, None]
    columns = gl.arange(0, BK, gl.SliceLayout(0, mma_layout(BK)))[None, :]
    g = gl.load(p + (t * stride + columns), mask=t < count, other=0.0).to(gl.float32)
    return gl.maximum(g, FLOOR, propagate_nan=tl.PropagateNan.ALL) * LOG2E


@gluon.jit
def store_decayed_rows(p, buffer, early, wide, stride, count, C: gl.constexpr, BK: gl.constexpr):
    """Store of ``buffer ∘ early ∘ late``, which leaves ``buffer ∘ early`` in its place."""
    x = buffer.load(mma_layout(BK)).to(gl.float32) * early
    buffer.store(x.to(gl.bfloat16))
    store_rows(p, (x * wide).to(gl.bfloat16), stride, count, C, BK)


@gluon.jit
def sum_of_gates(ones, which, high, rest, C: gl.constexpr, BK: gl.constexpr):
    """Sums over the tokens ``which [C, C]`` of gates in two terms."""
    gl.thread_barrier()
    ones.store(gl.where(which, gl.full((C, C), 1.0, gl.float32, mma_layout(C)), 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    result = warpgroup_mma_wait(0, [sum_where_async(ones, high, rest, C, BK)])
    ones._keep_alive()
    return result


@gluon.jit
def score_products(left, right, C: gl.constexpr, NK: gl.constexpr):
    """Scores ``left rightᵀ``, of rows in ``NK`` pieces."""
    acc = gl.zeros((C, C), gl.float32, mma_layout(C))
    for ik in gl.static_range(NK):
        acc = mma_async(left.index(ik), right.index(ik).permute((1, 0)), acc, ik == 0)
    return acc


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_dplr_scores_fwd_sm90(
    q, r, w, k, g, uq, uk, A_log, bias, beta, A, L1, A2, L2, decays, read, compare, write, write2, log_decays,
    owner, first, cu, T, PER, N, HV, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr,
    SCORES: gl.constexpr, STRONG: gl.constexpr, SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr,
    DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Scores and decayed rows of every chunk that takes plain products.

    Without ``SCORES``, decayed rows alone, whatever the chunk decays by.
    """
    NK: gl.constexpr = K // BK
    _, hv, i = program_parts(1, HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    here = i.to(gl.int64) * HV + hv
    b, row, count = locate_chunk(i, owner, first, cu, T, PER, C, PACKED)
    head = ((b * T + row) * HV + hv) * K

    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    bq = gl.allocate_shared_memory(gl.bfloat16, [NK, C, BK], tile)
    br = gl.allocate_shared_memory(gl.bfloat16, [NK, C, BK], tile)
    bw = gl.allocate_shared_memory(gl.bfloat16, [NK, C, BK], tile)
    bk = gl.allocate_shared_memory(gl.bfloat16, [NK, C, BK], tile)
    q = head_pointer(q, b, row, hv, qb, qt, qh, GROUP)
    r = head_pointer(r, b, row, hv, rb, rt, rh, 1)
    w = head_pointer(w, b, row, hv, wb, wt, wh, 1)
    k = head_pointer(k, b, row, hv, kb, kt, kh, GROUP)
    for ik in gl.static_range(NK):
        copy_rows_async(bq.index(ik), q + ik * BK, qt, count, C, BK)
        copy_narrow_rows(br.index(ik), r + ik * BK, rt, count, C, BK)
        copy_narrow_rows(bw.index(ik), w + ik * BK, wt, count, C, BK)
        copy_rows_async(bk.index(ik), k + ik * BK, kt, count, C, BK)
        async_copy.commit_group()
    wide = ()
    for ik in gl.static_range(NK):  # all asked for at once
        wide = wide + (load_wide_rows(r + ik * BK, rt, count, C, BK), load_wide_rows(w + ik * BK, wt, count, C, BK))  # noqa: RUF005
    for ik in gl.static_range(NK):
        store_wide_rows(br.index(ik), r, wide[2 * ik])
        store_wide_rows(bw.index(ik), w, wide[2 * ik + 1])
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(BK)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, mma_layout(BK)))
    high = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    ones = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile)
    least = 0.0
    for ik in gl.static_range(NK):
        gate = load_gates(head_pointer(g, b, row, hv, gb, gt, gh, 1) + ik * BK, gt, count, C, BK)
        whole = gl.sum(gate, 0)
        gl.store(decays + here * K + ik * BK + s, gl.exp2(whole))
        least = gl.minimum(least, gl.min(whole, 0))
        gl.thread_barrier()
        store_split(high, rest, gate)
        place = head + ik * BK
        if SCORES:
            # Both sides measured from half of what the chunk decays by.
            states = gl.where(least > -RANGE, count, 0)
            half = gl.exp2(whole * 0.5)[None, :]
            G = sum_of_gates(ones, s[None, :] <= t, high, rest, C, BK) - (whole * 0.5)[None, :]
            async_copy.wait_group(NK - 1 - ik)
            gl.thread_barrier()
            store_decayed_rows(read + place, bq.index(ik), gl.exp2(G), half, HV * K, states, C, BK)
            store_decayed_rows(compare + place, br.index(ik), -gl.exp2(G - gate), half, HV * K, states, C, BK)
            store_decayed_rows(write + place, bw.index(ik), gl.exp2(-G), half, HV * K, states, C, BK)
            store_decayed_rows(write2 + place, bk.index(ik), gl.exp2(-G), half, HV * K, states, C, BK)
        else:
            early = gl.exp2(sum_of_gates(ones, s[None, :] <= t, high, rest, C, BK))
            async_copy.wait_group(NK - 1 - ik)
            gl.thread_barrier()
            store_decayed_rows(read + place, bq.index(ik), early, 1.0, HV * K, count, C, BK)
            before = gl.exp2(sum_of_gates(ones, s[None, :] < t, high, rest, C, BK))
            store_decayed_rows(compare + place, br.index(ik), before, -1.0, HV * K, count, C, BK)
            later = gl.exp2(sum_of_gates(ones, s[None, :] > t, high, rest, C, BK))
            store_decayed_rows(write + place, bw.index(ik), later, 1.0, HV * K, count, C, BK)
            store_decayed_rows(write2 + place, bk.index(ik), later, 1.0, HV * K, count, C, BK)
    gl.store(log_decays + here, least)
    if SCORES:
        fence_async_shared()
        gl.thread_barrier()
        wanted = gl.where(least > -RANGE, C, 0)
        a, m = warpgroup_mma_wait(0, [score_products(bq, bw, C, NK), score_products(br, bw, C, NK)])
        store_scores(A, L1, a * scale, m, here, wanted, C)
        a, m = warpgroup_mma_wait(0, [score_products(bq, bk, C, NK), score_products(br, bk, C, NK)])
        bq._keep_alive()
        br._keep_alive()
        bw._keep_alive()
        bk._keep_alive()
        a = gl.where(s[None, :] <= t, a * scale, 0.0)
        m = gl.where(s[None, :] < t, m, 0.0)
        store_rows(A2 + here * (C * C), a.to(gl.bfloat16), C, wanted, C, C)
        store_rows(L2 + here * (C * C), m.to(gl.bfloat16), C, wanted, C, C)


@gluon.jit
def states_overlap(S, dS, V: gl.constexpr, BK: gl.constexpr):
    """Sums ``Σ_v S ∘ dS [BK]``, a few rows at a time: registers are short."""
    layout: gl.constexpr = copy_layout(BK)
    acc = gl.zeros((16, BK), gl.float32, layout)
    for part in gl.static_range(V // 16):
        x = S.slice(16 * part, 16).load(layout).to(gl.float32)
        acc += x * dS.slice(16 * part, 16).load(layout).to(gl.float32)
    return gl.sum(acc, 0)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "COUNT"])
def delta_dplr_gradients_bwd_sm90(
    q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates, dq, dr, dw, dk, dv,
    dg, parts, dbeta, log_decays, owner, first, cu, T, PER, N, HV, TURN, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr, STRONG: gl.constexpr,
    SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Gradients ``dq, da, db, dk, dg [C, BK]`` of one chunk: readers' first, then writers'; nothing of strong chunks."""
    heads = HV // TURNS
    ik, h, i = program_parts(K // BK, heads)
    hv = h * TURNS + TURN
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    here = i.to(gl.int64) * HV + hv
    if gl.load(log_decays + here) <= -RANGE:
        return
    b, row, count = locate_chunk(i, owner, first, cu, T, PER, C, PACKED)
    head = (b * T + row) * HV + hv
    none = opaque_offset(i).to(gl.float32)  # factors are made again where they are needed, not held

    rows_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type))
    rows = gl.allocate_shared_memory(gl.bfloat16, [4, C, BK], tile)
    bq, br, bw, bk = rows.index(0), rows.index(1), rows.index(2), rows.index(3)
    values = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], rows_v)
    bdo, y = values.index(0), values.index(1)
    r = head_pointer(r, b, row, hv, rb, rt, rh, 1) + ik * BK
    w = head_pointer(w, b, row, hv, wb, wt, wh, 1) + ik * BK
    copy_rows_async(bg, head_pointer(g, b, row, hv, gb, gt, gh, 1) + ik * BK, gt, count, C, BK)
    async_copy.commit_group()
    copy_rows_async(bq, head_pointer(q, b, row, hv, qb, qt, qh, GROUP) + ik * BK, qt, count, C, BK)
    copy_narrow_rows(br, r, rt, count, C, BK)
    copy_narrow_rows(bw, w, wt, count, C, BK)
    copy_rows_async(bk, head_pointer(k, b, row, hv, kb, kt, kh, GROUP) + ik * BK, kt, count, C, BK)
    async_copy.commit_group()
    copy_rows_async(bdo, head_pointer(do, b, row, hv, ob, ot, oh, 1), ot, count, C, V)
    copy_rows_async(y, adjoint + head * V, HV * V, count, C, V)
    async_copy.commit_group()
    xr = load_wide_rows(r, rt, count, C, BK)
    xw = load_wide_rows(w, wt, count, C, BK)

    # All rows decayed to and from the chunk's middle, by half of what it decays by.
    acc: gl.constexpr = mma_layout(BK)
    zeros = gl.zeros((C, BK), gl.float32, acc)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    async_copy.wait_group(2)
    gl.thread_barrier()
    gate = load_log2_gates(bg, BK)
    c = gl.sum(gate, 0) * 0.5
    half = gl.exp2(c)[None, :]
    G = sum_where(gl.where(s <= t, zeros + 1.0, 0.0), gate, C, BK) - c[None, :]
    gl.thread_barrier()
    S = gl.allocate_shared_memory(gl.bfloat16, [V, BK], tile)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, BK], tile)
    copy_rows_async(S, states + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    copy_rows_async(dS, dstates + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    store_wide_rows(br, r, xr)
    store_wide_rows(bw, w, xw)
    async_copy.wait_group(3)
    gl.thread_barrier()
    scale_rows(bq, gl.exp2(G), C, BK)
    scale_rows(br, -gl.exp2(G - gate), C, BK)  # reads before its own gate
    scale_rows(bw, gl.exp2(-G), C, BK)
    scale_rows(bk, gl.exp2(-G), C, BK)
    G += none

    # Readers.
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    read = mma_async(bdo, S, zeros, True)
    compared = mma_async(y, S, zeros, True)
    async_copy.wait_group(0)
    read, compared = warpgroup_mma_wait(0, [read, compared])
    values._keep_alive()
    gl.thread_barrier()
    squares = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], tile)
    sA, sL, sA2, sL2 = squares.index(0), squares.index(1), squares.index(2), squares.index(3)
    copy_rows_async(sA, dA + here * (C * C), C, C, C, C)
    copy_rows_async(sL, dL + here * (C * C), C, C, C, C)
    copy_rows_async(sA2, dA2 + here * (C * C), C, C, C, C)
    copy_rows_async(sL2, dL2 + here * (C * C), C, C, C, C)
    async_copy.commit_group()
    overlap = gl.convert_layout(states_overlap(S, dS, V, BK), gl.SliceLayout(0, acc))[None, :] * half * half
    gl.thread_barrier()
    e = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    copy_rows_async(e, errors + head * V, HV * V, count, C, V)
    async_copy.commit_group()
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    compared = mma_async(sL, bw, compared * -half, False)
    compared = mma_async(sL2, bk, compared, False)
    read = mma_async(sA, bw, read * (scale * half), False)
    read = mma_async(sA2, bk, read, False)
    place = head * K + ik * BK
    summed = ((b * T + row) * heads + hv // TURNS) * K + ik * BK
    compared = warpgroup_mma_wait(2, [compared])
    behind = br.load(acc).to(gl.float32) * compared
    store_product(dr + place, compared * -gl.exp2(G - gate), HV * K, count, C, BK)
    read = warpgroup_mma_wait(0, [read])
    crossing = bq.load(acc).to(gl.float32) * read
    store_or_add_rows(dq + summed, read * gl.exp2(G), heads * K, count, TURN, C, BK, TURNS)
    G += none

    # Writers. What a pair gives to its two tokens must cancel for gates outside: so both sides as they were rounded.
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    wrote = warpgroup_mma_wait(0, [mma_async(e, dS, zeros, True)])
    e._keep_alive()
    gl.thread_barrier()
    bv = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    copy_rows_async(bv, head_pointer(v, b, row, hv, vb, vt, vh, 1), vt, count, C, V)
    async_copy.commit_group()
    wrote *= half
    through = overlap + gl.sum(bw.load(acc).to(gl.float32) * wrote, 0)[None, :]
    wrote = mma_async(sA.permute((1, 0)), bq, wrote, False)
    wrote = warpgroup_mma_wait(0, [mma_async(sL.permute((1, 0)), br, wrote, False)])
    crossing -= bw.load(acc).to(gl.float32) * wrote
    store_product(dw + place, wrote * gl.exp2(-G), HV * K, count, C, BK)
    G += none
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    wrote = warpgroup_mma_wait(0, [mma_async(bv, dS, zeros, True)])
    bv._keep_alive()
    dS._keep_alive()
    wrote *= half
    through += gl.sum(bk.load(acc).to(gl.float32) * wrote, 0)[None, :]
    wrote = mma_async(sA2.permute((1, 0)), bq, wrote, False)
    wrote = warpgroup_mma_wait(0, [mma_async(sL2.permute((1, 0)), br, wrote, False)])
    squares._keep_alive()
    rows._keep_alive()
    gl.thread_barrier()
    crossing -= bk.load(acc).to(gl.float32) * wrote
    store_or_add_rows(dk + summed, wrote * gl.exp2(-G), heads * K, count, TURN, C, BK, TURNS)
    gl.thread_barrier()
    crossing = sum_where(gl.where(s >= t, zeros + 1.0, 0.0), crossing + behind, C, BK) - behind + through
    store_rows(dg + place, crossing.to(dg.dtype.element_ty), HV * K, count, C, BK)


@gluon.jit
def store_scores(A, L, a, m, here, rows, C: gl.constexpr):
    """Store of the first ``rows`` of a chunk's scores: what is above their diagonals is zero, or not read."""
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(C)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, mma_layout(C)))[None, :]
    square = here * (C * C)
    store_rows(A + square, gl.where(s <= t, a, 0.0).to(gl.bfloat16), C, rows, C, C)
    gl.store(L + square + t * C + s, gl.where(s < t, m, 0.0), mask=(s // 16 <= t // 16) & (t < rows))
