"""Gradients for at most a scalar gate in Gluon, for Hopper: bfloat16, usual sizes, a ``beta`` a token.

Equations are those of :mod:`.gradients`. Everything is asked for at once and used as it comes; two programs share a
multiprocessor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.indexing import head_pointer
from ..lib.sm90 import (
    copy_layout,
    copy_rows_async,
    lhs_layout,
    load_scalars,
    locate_chunk,
    mma_async,
    mma_layout,
    program_parts,
    scale_rows,
    store_or_add_rows,
    wait_for_predecessor,
)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "tiles_stride"])
def delta_gradients_bwd_sm90(
    q, k, uq, uk, do, g, beta, errors, adjoint, rates, states, dstates, dq, dk, dv, partial_dg, dbeta,
    owner, first, cu, T, PER, N, HV, TURN, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, PREC: gl.constexpr,
    DT: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Gradients ``dq, dk [C, BK]`` and a part of ``dv`` of one chunk; in the first of its programs, ``dbeta`` too.

    With a gate, :func:`.gradients.delta_gate_bwd` makes ``dg`` of ``partial_dg [tiles, chunks, HV, 2, C]``.
    """
    wait_for_predecessor()
    NK: gl.constexpr = K // BK
    heads = HV // TURNS
    ik, h, i = program_parts(NK, heads)
    hv = h * TURNS + TURN
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    b, row, count = locate_chunk(i, owner, first, cu, T, PER, C, PACKED)
    here = i.to(gl.int64) * HV + hv
    head = (b * T + row) * HV + hv

    acc: gl.constexpr = mma_layout(C)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    of_columns: gl.constexpr = gl.SliceLayout(0, acc)
    zeros = gl.zeros((C, C), gl.float32, acc)
    t = gl.arange(0, C, of_rows)
    s = gl.arange(0, C, of_columns)
    scan: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    j = gl.arange(0, C, scan)
    betas = load_scalars(head_pointer(beta, b, row, hv, bb, bt, bh, 1), j, bt, count)  # ahead of the copies, not behind them
    if GATE == 1:
        sums_of_gates = rates + here * ((6 if UNIT else 3) * C) + 2 * C
        G_t = gl.load(sums_of_gates + t)
        G_s = gl.load(sums_of_gates + s)
        whole = gl.load(sums_of_gates + C - 1)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    # Values in parts of C, of which a program stores its own: a part of a larger buffer is loaded a number at a time.
    NV: gl.constexpr = V // C
    bdo = gl.allocate_shared_memory(gl.bfloat16, [NV, C, C], square)
    e = gl.allocate_shared_memory(gl.bfloat16, [NV, C, C], square)
    y = gl.allocate_shared_memory(gl.bfloat16, [NV, C, C], square)
    S = gl.allocate_shared_memory(gl.bfloat16, [NV, C, BK], square)
    dS = gl.allocate_shared_memory(gl.bfloat16, [NV, C, BK], square)
    bq = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    bk = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    do = head_pointer(do, b, row, hv, ob, ot, oh, 1)
    for n in gl.static_range(NV):
        copy_rows_async(bdo.index(n), do + n * C, ot, count, C, C)
        copy_rows_async(e.index(n), errors + head * V + n * C, HV * V, count, C, C)
        copy_rows_async(y.index(n), adjoint + head * V + n * C, HV * V, count, C, C)
    async_copy.commit_group()
    for n in gl.static_range(NV):
        copy_rows_async(S.index(n), states + here * (K * V) + n * (C * K) + ik * BK, K, C, C, BK)
        copy_rows_async(dS.index(n), dstates + here * (K * V) + n * (C * K) + ik * BK, K, C, C, BK)
    async_copy.commit_group()
    copy_rows_async(bq, head_pointer(q, b, row, hv, qb, qt, qh, GROUP) + ik * BK, qt, count, C, BK)
    copy_rows_async(bk, head_pointer(k, b, row, hv, kb, kt, kh, GROUP) + ik * BK, kt, count, C, BK)
    async_copy.commit_group()

    beta_t = gl.convert_layout(betas, of_rows)
    beta_s = gl.convert_layout(betas, of_columns)
    if GATE == 1:
        D = gl.exp2(G_t[:, None] - G_s[None, :])
        early = gl.exp2(G_t)
        late = gl.exp2(whole - G_t)

    async_copy.wait_group(2)
    fence_async_shared()
    gl.thread_barrier()
    dA = zeros
    dL = zeros
    for n in gl.static_range(NV):
        dA = mma_async(bdo.index(n), e.index(n).permute((1, 0)), dA, n == 0)
    for n in gl.static_range(NV):
        dL = mma_async(y.index(n), e.index(n).permute((1, 0)), dL, n == 0)
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    read = zeros
    compared = zeros
    wrote = zeros
    for n in gl.static_range(NV):
        read = mma_async(bdo.index(n), S.index(n), read, n == 0)
    for n in gl.static_range(NV):
        compared = mma_async(y.index(n), S.index(n), compared, n == 0)
    for n in gl.static_range(NV):
        wrote = mma_async(e.index(n), dS.index(n), wrote, n == 0)
    dA = warpgroup_mma_wait(4 * NV, [dA])
    dL = warpgroup_mma_wait(3 * NV, [dL])
    if ik == 0:
        own = gl.sum(gl.where(t[:, None] == s[None, :], dL, 0.0), 1)
        gl.store(dbeta + head + t * HV, own.to(dbeta.dtype.element_ty), mask=t < count)
    dA = dA * (scale * beta_s[None, :])
    dL = dL * (-beta_t[:, None] * beta_s[None, :])
    if GATE == 1:
        dA = dA * D
        dL = dL * D
    dA = gl.where(s[None, :] <= t[:, None], dA, 0.0).to(gl.bfloat16)
    dL = gl.where(s[None, :] < t[:, None], dL, 0.0).to(gl.bfloat16)
    sA.store(dA)
    sL.store(dL)
    dA = gl.convert_layout(dA, lhs_layout(C))
    dL = gl.convert_layout(dL, lhs_layout(C))
    async_copy.wait_group(0)
    if UNIT:
        scale_rows(bq, uq, b, row, hv, T, HV // GROUP, count, C, BK, GROUP)
        scale_rows(bk, uk, b, row, hv, T, HV // GROUP, count, C, BK, GROUP)
    fence_async_shared()
    gl.thread_barrier()

    overlap = zeros
    if GATE == 1:  # its diagonal is wanted: what the whole chunk decays of the state
        for n in gl.static_range(NV):
            overlap = mma_async(S.index(n).permute((1, 0)), dS.index(n), overlap, n == 0)
    read = warpgroup_mma_wait((2 + GATE) * NV, [read])
    read = read * (scale * early[:, None] if GATE == 1 else scale)
    read = mma_async(dA, bk, read, False)
    compared = warpgroup_mma_wait((1 + GATE) * NV + 1, [compared])
    compared = compared * (-beta_t * early if GATE == 1 else -beta_t)[:, None]
    compared = mma_async(dL, bk, compared, False)
    wrote = warpgroup_mma_wait(GATE * NV + 2, [wrote])
    if GATE == 1:
        overlap = warpgroup_mma_wait(2, [overlap])
    bdo._keep_alive()  # until what reads them is done, or the compiler gives their place away
    e._keep_alive()
    S._keep_alive()
    dS._keep_alive()
    gl.thread_barrier()  # every warp waits for its own rows of a product only
    wrote = wrote * (beta_t * late if GATE == 1 else beta_t)[:, None]
    if GATE == 1:
        key = bk.load(acc).to(gl.float32)
        crossing = gl.sum(key * wrote + gl.where(t[:, None] == s[None, :], overlap * gl.exp2(whole), 0.0), 1)
    wrote = mma_async(sA.permute((1, 0)), bq, wrote, False)
    wrote = mma_async(sL.permute((1, 0)), bk, wrote, False)

    place = ((b * T + row) * heads + hv // TURNS) * K + ik * BK
    read, dA = warpgroup_mma_wait(3, [read, dA])
    store_or_add_rows(dq + place, read, heads * K, count, TURN, C, BK, TURNS)
    if GATE == 1:
        across = gl.sum(bq.load(acc).to(gl.float32) * read, 1)
    # While those run: the value's gradient, a part of it in every program.
    EACH: gl.constexpr = NV // NK
    if EACH == 0:
        store_value_part(dv + head * V, y.index(0), betas, HV * V, gl.where(ik == 0, count, 0), C)
    for n in gl.static_range(EACH):
        part = ik * EACH + n
        store_value_part(dv + head * V + part * C, y.index(part), betas, HV * V, count, C)
    compared, wrote, dL = warpgroup_mma_wait(0, [compared, wrote, dL])
    bq._keep_alive()
    bk._keep_alive()
    sA._keep_alive()
    sL._keep_alive()
    store_or_add_rows(dk + place, wrote + compared, heads * K, count, TURN, C, BK, TURNS)
    if GATE == 1:
        across += gl.sum(key * (compared - wrote), 1)
        partial_dg += ik * tiles_stride + here * (2 * C)
        gl.store(partial_dg + t, across)
        gl.store(partial_dg + C + t, crossing)


@gluon.jit
def store_value_part(p, buffer, betas, stride, count, C: gl.constexpr):
    """Store of the first ``count`` rows of ``beta ∘ buffer [C, C]``."""
    layout: gl.constexpr = copy_layout(C)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, C, gl.SliceLayout(0, layout))
    x = buffer.load(layout).to(gl.float32) * gl.convert_layout(betas, gl.SliceLayout(1, layout))[:, None]
    gl.store(p + (r[:, None] * stride + columns[None, :]), x.to(p.dtype.element_ty), mask=(r < count)[:, None])
