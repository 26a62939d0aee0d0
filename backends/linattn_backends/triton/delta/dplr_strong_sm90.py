"""All gradients of strong chunks of ``dplr``, in Gluon for Hopper: heads of 64, span by span.

Spans and rows are those of :mod:`.dplr_fused_sm90`, gradients those of :mod:`.dplr_gradients_sm90`. Inside a chunk, the state
before a span is made of the state before the chunk and of errors, which are known, and the gradient of the state after it from
the chunk's end on::

    S' = h ∘ (h ∘ S + k̂ᵀ v + b̂ᵀ e)           dS = h ∘ (h ∘ dS' + q̂ᵀ do + âᵀ y)

Programs look for strong chunks; no model that is known to us has many.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.indexing import head_pointer, items_there
from ..lib.sm90 import copy_rows_async, locate_chunk, mma_async, mma_layout
from ..lib.sm90_gates import any_strong, load_log2_gates, opaque_offset, store_split
from .dplr_fused_bwd_sm90 import cut_span_before
from .dplr_fused_sm90 import cut_span, load_scaled
from .dplr_gradients_sm90 import Rows, copy_key_rows, copy_value_rows, factor, results_at, span_gradients
from .rows_sm90 import allocate_halves, centered_sums, load_wide_rows, store_wide_rows

__all__ = ["delta_dplr_strong_bwd_sm90"]


@gluon.jit
def state_before(
    S, bg, chunk, writers, halves, whole, lo, C: gl.constexpr, K: gl.constexpr, RANGE: gl.constexpr
):  # fmt: skip
    """The state ``[V, K]`` before token ``lo`` of a chunk, from that before the chunk; rows of ``chunk`` as they are."""
    acc: gl.constexpr = mma_layout(C)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    bw, bk = writers.index(0), writers.index(1)
    start = gl.to_tensor(0)
    while start < lo:
        gate = gl.where((t >= start) & (t < lo), load_log2_gates(bg, K), 0.0)
        store_split(bw, bk, gate)
        fence_async_shared()
        gl.thread_barrier()
        G, c = centered_sums(halves, whole, bw, bk, C, K)
        end, G, gate, c = cut_span(G, gate, c, start, C, RANGE)
        end = gl.minimum(end, lo)
        late = factor(-G, t, start, end, True)
        half = gl.convert_layout(gl.exp2(c), gl.SliceLayout(0, acc))[None, :]
        gl.thread_barrier()  # the gates' terms were read by all
        bw.store(load_scaled(chunk.b, late, K))
        bk.store(load_scaled(chunk.k, late, K))
        fence_async_shared()
        gl.thread_barrier()
        S = mma_async(chunk.e.permute((1, 0)), bw, S * half, False)
        S = mma_async(chunk.v.permute((1, 0)), bk, S, False)
        S = warpgroup_mma_wait(0, [S]) * half
        gl.thread_barrier()
        start = end
    return S


@gluon.jit
def strong_chunk(
    i, hv, q, r, w, k, v, do, g, errors, adjoint, states, dstates, dq, dr, dw, dk, dv, dg, owner, first, cu, T, PER, HV, TURN,
    scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr, PACKED: gl.constexpr,
    RANGE: gl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one value head."""
    here = i.to(gl.int64) * HV + hv
    b, row, count = locate_chunk(i, owner, first, cu, T, PER, C, PACKED)
    head = (b * T + row) * HV + hv
    none = opaque_offset(i).to(gl.float32)
    acc: gl.constexpr = mma_layout(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, K], gl.NVMMASharedLayout.get_default_for([C, K], type))
    given = gl.allocate_shared_memory(gl.bfloat16, [8, C, K], tile)
    decayed = gl.allocate_shared_memory(gl.bfloat16, [4, C, K], tile)
    squares = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], tile)
    states_now = gl.allocate_shared_memory(gl.bfloat16, [2, V, K], tile)
    halves, whole = allocate_halves(C)
    chunk = Rows(
        given.index(0), given.index(1), given.index(2), given.index(3),
        given.index(4), given.index(5), given.index(6), given.index(7),
    )  # fmt: skip
    S, dS = states_now.index(0), states_now.index(1)
    r = head_pointer(r, b, row, hv, rb, rt, rh, 1)
    w = head_pointer(w, b, row, hv, wb, wt, wh, 1)
    copy_rows_async(bg, head_pointer(g, b, row, hv, gb, gt, gh, 1), gt, count, C, K)
    copy_key_rows(chunk, q, r, w, k, qb, qt, qh, rt, wt, kb, kt, kh, b, row, hv, count, C, K, GROUP)
    copy_value_rows(chunk, v, do, errors, adjoint, vb, vt, vh, ob, ot, oh, b, row, hv, head, HV, count, C, V)
    copy_rows_async(S, states + here * (K * V), K, V, V, K)
    copy_rows_async(dS, dstates + here * (K * V), K, V, V, K)
    async_copy.commit_group()
    store_wide_rows(chunk.a, r, load_wide_rows(r, rt, count, C, K))
    store_wide_rows(chunk.b, w, load_wide_rows(w, wt, count, C, K))
    results = results_at(dq, dr, dw, dk, dv, dg, b * T + row, hv, head, HV, K, V, TURNS)
    rows = Rows(
        decayed.index(0), decayed.index(1), decayed.index(2), decayed.index(3), chunk.v, chunk.do, chunk.e, chunk.y
    )  # fmt: skip
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    async_copy.wait_group(0)
    gl.thread_barrier()
    before = S.load(acc).to(gl.float32)
    after = dS.load(acc).to(gl.float32)
    gl.thread_barrier()
    hi = gl.minimum(count, C)
    while hi > 0:
        gate = gl.where(t < hi, load_log2_gates(bg, K), 0.0)
        store_split(rows.q, rows.a, gate)
        fence_async_shared()
        gl.thread_barrier()
        G, c = centered_sums(halves, whole, rows.q, rows.a, C, K)
        lo, G, gate, c = cut_span_before(G, gate, c, hi, C, RANGE)
        half = gl.convert_layout(gl.exp2(c), gl.SliceLayout(0, acc))[None, :]
        gl.thread_barrier()  # the gates' terms were read by all
        state = state_before(before, bg, chunk, squares, halves, whole, lo, C, K, RANGE)
        S.store(state.to(gl.bfloat16))
        dS.store(after.to(gl.bfloat16))
        rows.q.store(load_scaled(chunk.q, factor(G, t, lo, hi, True) * scale, K))
        rows.a.store(load_scaled(chunk.a, factor(G - gate, t, lo, hi, True), K))
        late = factor(-G, t, lo, hi, True)
        rows.b.store(load_scaled(chunk.b, late, K))
        rows.k.store(load_scaled(chunk.k, late, K))
        fence_async_shared()
        gl.thread_barrier()
        span_gradients(
            rows, squares, S, dS, G, gate, half, results, lo, hi, hi, TURN, scale, none, C, K, V, TURNS, True
        )  # fmt: skip
        gl.thread_barrier()
        after = mma_async(chunk.do.permute((1, 0)), rows.q, after * half, False)
        after = mma_async(chunk.y.permute((1, 0)), rows.a, after, False)
        after = warpgroup_mma_wait(0, [after]) * half
        gl.thread_barrier()
        hi = lo
    given._keep_alive()
    decayed._keep_alive()
    squares._keep_alive()
    states_now._keep_alive()
    halves._keep_alive()
    whole._keep_alive()


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "COUNT"])
def delta_dplr_strong_bwd_sm90(
    q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates, dq, dr, dw, dk, dv,
    dg, parts, dbeta, log_decays, owner, first, cu, T, PER, N, HV, TURN, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr, STRONG: gl.constexpr,
    SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Gradients of chunks that decay by ``2^RANGE`` in some channel, for which programs look. ``r, w`` are ``a, b`` here."""
    gl.static_assert(K == V and K == C)
    pid = gl.program_id(0)
    COUNT = items_there(COUNT, first, N, HV // TURNS, PACKED)
    if any_strong(log_decays, pid, COUNT, TURNS, 1, -RANGE):
        for item in range(pid, COUNT, gl.num_programs(0)):
            if gl.load(log_decays + item * TURNS + TURN) <= -RANGE:
                hv = item % (HV // TURNS) * TURNS + TURN
                strong_chunk(
                    item // (HV // TURNS), hv, q, r, w, k, v, do, g, errors, adjoint, states, dstates,
                    dq, dr, dw, dk, dv, dg, owner, first, cu, T, PER, HV, TURN, scale,
                    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh,
                    K, V, C, GROUP, TURNS, PACKED, RANGE
                )  # fmt: skip
                gl.thread_barrier()  # the next item's copies may land where a slower warp still reads this one's
