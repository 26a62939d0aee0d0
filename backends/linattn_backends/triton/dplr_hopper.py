"""Kernels of :mod:`.delta_vector` for ``dplr`` in Gluon, for Hopper: bfloat16, usual sizes, chunks that take the plain products.

As in :mod:`.delta_hopper`: everything is asked for at once and used as it comes, a product is waited for where its result is
used, and two programs share a processor. So shared memory is what there is least of: a place is given to what comes next as
soon as what it held was used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from .hopper import chunk_of, copy, gates, issue, parts, rows_of, spread, sums, totals, unknown_zero
from .kernels import at_head

__all__ = ["gradients"]


@gluon.jit
def decay(buffer, x, C: gl.constexpr, BK: gl.constexpr):
    """``buffer ∘ x``, in its place."""
    buffer.store((buffer.load(sums(BK)).to(gl.float32) * x).to(gl.bfloat16))


@gluon.jit
def in_common(S, dS, V: gl.constexpr, BK: gl.constexpr):
    """``Σ_v S ∘ dS [BK]``, a few rows at a time: registers are short."""
    layout: gl.constexpr = rows_of(BK)
    acc = gl.zeros((16, BK), gl.float32, layout)
    for part in gl.static_range(V // 16):
        x = S.slice(16 * part, 16).load(layout).to(gl.float32)
        acc += x * dS.slice(16 * part, 16).load(layout).to(gl.float32)
    return gl.sum(acc, 0)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV"])
def gradients(
    q, r, w, k, v, do, g, errors, adjoint, dA, dL, dA2, dL2, kept, dkept, dq, dr, dw, dk, dg, ranges,
    owner, first, cu, T, PER, N, HV, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    RANGE: gl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, da, db, dk, dg [C, BK]``: readers' gradients first, then writers'; nothing of strong chunks."""
    ik, hv, i = parts(K // BK, HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    here = i.to(gl.int64) * HV + hv
    if gl.load(ranges + here) <= -RANGE:
        return
    b, row, count = chunk_of(i, owner, first, cu, T, PER, C, PACKED)
    head = (b * T + row) * HV + hv
    none = unknown_zero(i).to(gl.float32)  # factors are made again where they are needed, not held

    rows_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type))
    rows = gl.allocate_shared_memory(gl.bfloat16, [4, C, BK], tile)
    bq, br, bw, bk = rows.index(0), rows.index(1), rows.index(2), rows.index(3)
    values = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], rows_v)
    given, y = values.index(0), values.index(1)
    copy(bg, at_head(g, b, row, hv, gb, gt, gh, 1) + ik * BK, gt, count, C, BK)
    async_copy.commit_group()
    copy(bq, at_head(q, b, row, hv, qb, qt, qh, GROUP) + ik * BK, qt, count, C, BK)
    copy(br, at_head(r, b, row, hv, rb, rt, rh, 1) + ik * BK, rt, count, C, BK)
    copy(bw, at_head(w, b, row, hv, wb, wt, wh, 1) + ik * BK, wt, count, C, BK)
    copy(bk, at_head(k, b, row, hv, kb, kt, kh, GROUP) + ik * BK, kt, count, C, BK)
    async_copy.commit_group()
    copy(given, at_head(do, b, row, hv, ob, ot, oh, 1), ot, count, C, V)
    copy(y, adjoint + head * V, HV * V, count, C, V)
    async_copy.commit_group()

    # All rows decayed to and from the chunk's middle, by half of what it decays by.
    acc: gl.constexpr = sums(BK)
    zeros = gl.zeros((C, BK), gl.float32, acc)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    async_copy.wait_group(2)
    gl.thread_barrier()
    gate = gates(bg, BK)
    c = gl.sum(gate, 0) * 0.5
    half = gl.exp2(c)[None, :]
    G = totals(gl.where(s <= t, zeros + 1.0, 0.0), gate, C, BK) - c[None, :]
    gl.thread_barrier()
    S = gl.allocate_shared_memory(gl.bfloat16, [V, BK], tile)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, BK], tile)
    copy(S, kept + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    copy(dS, dkept + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    async_copy.wait_group(3)
    gl.thread_barrier()
    decay(bq, gl.exp2(G), C, BK)
    decay(br, -gl.exp2(G - gate), C, BK)  # reads before its own gate
    decay(bw, gl.exp2(-G), C, BK)
    decay(bk, gl.exp2(-G), C, BK)
    G += none

    # Readers.
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    read = issue(given, S, zeros, True)
    compared = issue(y, S, zeros, True)
    async_copy.wait_group(0)
    read, compared = warpgroup_mma_wait(0, [read, compared])
    values._keep_alive()
    gl.thread_barrier()
    squares = gl.allocate_shared_memory(gl.bfloat16, [4, C, C], tile)
    sA, sL, sA2, sL2 = squares.index(0), squares.index(1), squares.index(2), squares.index(3)
    copy(sA, dA + here * (C * C), C, C, C, C)
    copy(sL, dL + here * (C * C), C, C, C, C)
    copy(sA2, dA2 + here * (C * C), C, C, C, C)
    copy(sL2, dL2 + here * (C * C), C, C, C, C)
    async_copy.commit_group()
    met = gl.convert_layout(in_common(S, dS, V, BK), gl.SliceLayout(0, acc))[None, :] * half * half
    gl.thread_barrier()
    e = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    copy(e, errors + head * V, HV * V, count, C, V)
    async_copy.commit_group()
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    compared = issue(sL, bw, compared * -half, False)
    compared = issue(sL2, bk, compared, False)
    read = issue(sA, bw, read * (scale * half), False)
    read = issue(sA2, bk, read, False)
    place = head * K + ik * BK
    compared = warpgroup_mma_wait(2, [compared])
    behind = br.load(acc).to(gl.float32) * compared
    spread(dr + place, (compared * -gl.exp2(G - gate)).to(dr.dtype.element_ty), HV * K, count, C, BK)
    read = warpgroup_mma_wait(0, [read])
    crossing = bq.load(acc).to(gl.float32) * read
    spread(dq + place, (read * gl.exp2(G)).to(dq.dtype.element_ty), HV * K, count, C, BK)
    G += none

    # Writers. What a pair gives to its two tokens must cancel for gates outside: so both sides as they were rounded.
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    wrote = warpgroup_mma_wait(0, [issue(e, dS, zeros, True)])
    e._keep_alive()
    gl.thread_barrier()
    bv = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    copy(bv, at_head(v, b, row, hv, vb, vt, vh, 1), vt, count, C, V)
    async_copy.commit_group()
    wrote *= half
    through = met + gl.sum(bw.load(acc).to(gl.float32) * wrote, 0)[None, :]
    wrote = issue(sA.permute((1, 0)), bq, wrote, False)
    wrote = warpgroup_mma_wait(0, [issue(sL.permute((1, 0)), br, wrote, False)])
    crossing -= bw.load(acc).to(gl.float32) * wrote
    spread(dw + place, (wrote * gl.exp2(-G)).to(dw.dtype.element_ty), HV * K, count, C, BK)
    G += none
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    wrote = warpgroup_mma_wait(0, [issue(bv, dS, zeros, True)])
    bv._keep_alive()
    dS._keep_alive()
    wrote *= half
    through += gl.sum(bk.load(acc).to(gl.float32) * wrote, 0)[None, :]
    wrote = issue(sA2.permute((1, 0)), bq, wrote, False)
    wrote = warpgroup_mma_wait(0, [issue(sL2.permute((1, 0)), br, wrote, False)])
    squares._keep_alive()
    rows._keep_alive()
    gl.thread_barrier()
    crossing -= bk.load(acc).to(gl.float32) * wrote
    spread(dk + place, (wrote * gl.exp2(-G)).to(dk.dtype.element_ty), HV * K, count, C, BK)
    gl.thread_barrier()
    crossing = totals(gl.where(s >= t, zeros + 1.0, 0.0), crossing + behind, C, BK) - behind + through
    spread(dg + place, crossing.to(dg.dtype.element_ty), HV * K, count, C, BK)
