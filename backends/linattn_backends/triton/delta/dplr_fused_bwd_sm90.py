"""Scores, solved systems and the gradient of the state of ``dplr`` in one kernel, in Gluon for Hopper.

As :mod:`.dplr_fused_sm90`, in its symbols, from the last chunk on; a chunk's spans too are gone through from the last. With
``dS'`` the gradient of the state after a span, and ``y`` the adjoint of its errors::

    adjoint   dx = Aᵀ do + b̂ (h ∘ dS')                       y = dx + ((I - N)⁻¹ N)ᵀ dx
              dS = h ∘ (h ∘ dS' + q̂ᵀ do + âᵀ y)

``q̂, â`` are zero outside the span.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.indexing import head_pointer, locate_segment, state_tile
from ..lib.sm90 import mma_async, mma_layout, wait_for_predecessor
from ..lib.sm90_gates import load_log2_gates, store_split
from ..lib.sm90_pipeline import copy_tile, opaque, store_buffer
from .dplr_fused_sm90 import Operands, allocate_tiles, copy_operands, load_scaled, store_span
from .rows_sm90 import allocate_halves, as_left, centered_sums, load_wide_rows, lower_left, store_wide_rows
from .solve_sm90 import allocate_scratch, solve_system

__all__ = ["delta_dplr_fused_bwd_sm90"]


@gluon.jit
def cut_span_before(G, gate, c, hi, C: gl.constexpr, RANGE: gl.constexpr):
    """The start of a span until ``hi``, if its gates are strong before the chunk's start; and what is left of its gates.

    ``G`` is measured from ``c``, half of all gates' sum.
    """
    acc: gl.constexpr = mma_layout(C)
    lo = gl.to_tensor(0)
    if gl.min(c, 0) <= -0.5 * RANGE:
        t = gl.arange(0, C, gl.SliceLayout(1, acc))
        total = gl.convert_layout(c, gl.SliceLayout(0, acc))[None, :]
        beyond = (gl.min(total - G + gate, 1) <= -RANGE) & (t < hi)
        lo = gl.minimum(gl.max(gl.where(beyond, t + 1, 0), 0), hi - 1)
        after = (t >= lo)[:, None]
        gate = gl.where(after, gate, 0.0)
        half = gl.sum(gate, 0) * 0.5
        G = gl.where(after, G - total + half[None, :], -half[None, :])
        c = gl.convert_layout(half, gl.SliceLayout(1, acc))
    return lo, G, gate, c


@gluon.jit(do_not_specialize=["T", "HV"])
def delta_dplr_fused_bwd_sm90(
    q, a, b, g, do, start, end, dstates, adjoint, log_decays, chunk_first, cu, T, HV, scale,
    qb, qt, qh, ab, at, ah, bb, bt, bh, gb, gt, gh, ob, ot, oh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, RANGE: gl.constexpr, PACKED: gl.constexpr,
    START: gl.constexpr, END: gl.constexpr,
):  # fmt: skip
    """The gradient of the state after every chunk of a sequence's head, and what chunks decay by; the errors' adjoint."""
    gl.static_assert(K == V and K == C)
    wait_for_predecessor()
    hv = gl.program_id(0) % HV
    i = gl.program_id(0) // HV
    _, bos, L, n, _, high = locate_segment(i, None, None, cu, T, 1, 0, C, PACKED, True)
    limit = L.to(gl.int32)
    do = head_pointer(do, n, bos, hv, ob, ot, oh, 1)
    operands = Operands(
        head_pointer(q, n, bos, hv, qb, qt, qh, GROUP), head_pointer(a, n, bos, hv, ab, at, ah, 1),
        head_pointer(b, n, bos, hv, bb, bt, bh, 1), do, do, head_pointer(g, n, bos, hv, gb, gt, gh, 1), qt, at, bt, ot, ot, gt,
    )  # fmt: skip
    adjoint += ((n * T + bos) * HV + hv) * V
    if PACKED:
        before = gl.load(chunk_first + i).to(gl.int64)
    else:
        before = n * ((T + C - 1) // C)
    dstates += (before * HV + hv) * (K * V)
    log_decays += before * HV + hv

    acc: gl.constexpr = mma_layout(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    zeros = gl.zeros((C, C), gl.float32, acc)
    dS = zeros
    if START:
        dS = dS + gl.load(state_tile(start + i.to(gl.int64) * sn + hv.to(gl.int64) * sh, t, s, sk, sv)).to(gl.float32)
    tiles = allocate_tiles(g.dtype.element_ty, C, K)
    halves, whole = allocate_halves(C)
    M = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, zeros.to(gl.bfloat16))  # above its diagonal nobody writes
    rows = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], tile)
    bq, ba = rows.index(0), rows.index(1)

    chunk = high - 1
    hi = gl.to_tensor(C)
    row = chunk * C
    if high > 0:
        copy_operands(tiles, operands, row, limit, False, C, K)
    async_copy.commit_group()
    if high > 0:
        copy_tile(tiles.v, do, row, ot, limit, C, V)
    async_copy.commit_group()
    here = gl.where(high > 0, row, 0).to(gl.int64)
    left = gl.where(high > 0, limit - row, 0)
    wide = load_wide_rows(operands.a + here * at, at, left, C, K)
    store_wide_rows(tiles.a, operands.a, wide)
    wide = load_wide_rows(operands.b + here * bt, bt, left, C, K)
    store_wide_rows(tiles.b, operands.b, wide)
    while chunk >= 0:
        row = chunk * C
        async_copy.wait_group(1)
        gl.thread_barrier()
        gate = load_log2_gates(tiles.g, K)
        if hi < C:
            gate = gl.where(t < hi, gate, 0.0)
        store_split(bq, ba, gate)
        fence_async_shared()
        gl.thread_barrier()
        G, c = centered_sums(halves, whole, bq, ba, C, K)
        if hi == C:
            gl.store(log_decays + chunk * HV, 2.0 * gl.min(c, 0))
        lo, G, gate, c = cut_span_before(G, gate, c, hi, C, RANGE)
        half = gl.exp2(c)[:, None]
        last = lo == 0
        following = row - C
        ahead_of = last & (chunk > 0)  # another chunk is to come

        early = gl.exp2(G) * scale
        reads = gl.exp2(G - gate)
        if (lo > 0) | (hi < C):
            there = (t >= lo) & (t < hi)
            early = gl.where(there, early, 0.0)
            reads = gl.where(there, reads, 0.0)
        gl.thread_barrier()  # the gates' terms were read by all
        bq.store(load_scaled(tiles.q, early, K))
        read = load_scaled(tiles.a, reads, K)
        ba.store(read)
        read = as_left(read, K)
        writes = load_scaled(tiles.b, gl.exp2(-G), K)
        bw = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile, writes)
        writes = as_left(writes, K)
        fence_async_shared()
        gl.thread_barrier()
        if ahead_of:
            copy_operands(tiles, operands, following, limit, False, C, K)
        async_copy.commit_group()
        N = mma_async(read, bw.permute((1, 0)), zeros, True)
        A = mma_async(writes, bq.permute((1, 0)), zeros, True)
        left = gl.where(ahead_of, C, 0)
        place = gl.where(ahead_of, following, 0).to(gl.int64)
        wide = load_wide_rows(operands.a + place * at, at, left, C, K)
        N, A = warpgroup_mma_wait(0, [N, A])
        bw._keep_alive()
        gl.thread_barrier()  # the solve takes its place
        ahead = s + opaque(gl.to_tensor(0))  # masks are made again in every chunk, not held
        A = lower_left(A, ahead >= t, C)
        scratch = allocate_scratch(C)
        solve_system(M, gl.where(ahead < t, N, 0.0), scratch, C)
        if ahead_of:
            store_wide_rows(tiles.a, operands.a, wide)
        gl.thread_barrier()

        state = gl.allocate_shared_memory(gl.bfloat16, [K, V], tile)
        if hi == C:
            state.permute((1, 0)).store(dS.to(gl.bfloat16))
            gl.thread_barrier()
            store_buffer(dstates + chunk.to(gl.int64) * (HV * K * V), state, K, V, V, K)
            gl.thread_barrier()
        dS = dS * half
        state.store(dS.to(gl.bfloat16))
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        dx = mma_async(A, tiles.v, zeros, True)
        dx = mma_async(writes, state, dx, False)
        dS = mma_async(bq.permute((1, 0)), tiles.v, dS, False)
        wide = load_wide_rows(operands.b + place * bt, bt, left, C, K)
        dx = warpgroup_mma_wait(1, [dx])
        wrote = gl.allocate_shared_memory(gl.bfloat16, [C, V], tile, dx.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        y = mma_async(M.permute((1, 0)), wrote, dx, False)
        dS, y = warpgroup_mma_wait(0, [dS, y])
        state._keep_alive()
        gl.thread_barrier()
        wrote.store(y.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        store_span(adjoint + row.to(gl.int64) * (HV * V), y, HV * V, lo, gl.minimum(hi, limit - row), C, V)
        if ahead_of:
            copy_tile(tiles.v, do, following, ot, limit, C, V)
        async_copy.commit_group()
        dS = mma_async(ba.permute((1, 0)), wrote, dS, False)
        if ahead_of:
            store_wide_rows(tiles.b, operands.b, wide)
        dS = warpgroup_mma_wait(0, [dS])
        wrote._keep_alive()
        dS = dS * half
        chunk = gl.where(last, chunk - 1, chunk)
        hi = gl.where(last, C, lo)
        gl.thread_barrier()
    if END:
        gl.store(end + ((i.to(gl.int64) * HV + hv) * (K * V) + t * V + s), dS)
