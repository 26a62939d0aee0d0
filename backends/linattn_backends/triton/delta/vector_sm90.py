"""Scores, solved systems and gradients of ``kda`` in Gluon, for Hopper: bfloat16, usual sizes, a ``beta`` a token.

Equations are those of :mod:`.vector`. Chunks that decay by less than ``2^RANGE`` in every channel take plain products. The
others, strong chunks, are left to programs that look for them and go by levels, as :mod:`..lib.sm90` does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.indexing import head_pointer, items_there, locate_sequence
from ..lib.sm90 import (
    copy_layout,
    copy_rows_async,
    load_lengths,
    load_scalars,
    locate_chunk,
    mma_async,
    mma_layout,
    reciprocal_lengths,
    scale_rows,
    store_or_add_rows,
    store_rows,
    wait_for_predecessor,
    widen,
)
from ..lib.sm90_gates import (
    any_strong,
    copy_chunk_async,
    load_mapped_gates,
    opaque_offset,
    store_decayed_rows,
    store_gate_gradient,
    store_split,
    strong_gradients,
    strong_scores,
    sum_where,
    sum_where_async,
)
from .scores_sm90 import solve_and_store


@gluon.jit
def tile_gradients(
    item, q, k, do, g, uq, uk, A_log, bias, beta, errors, adjoint, states, dstates, dq, dk, dv, dg, parts, dbeta,
    owner, first, cu, T, PER, HV, TURN, scale, number,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, TURNS: gl.constexpr,
    PACKED: gl.constexpr, STRONG: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Gradients ``dq, dk, dg [C, BK]`` of one chunk, a part of ``dv``, and ``dbeta``; if ``STRONG``, by levels."""
    NK: gl.constexpr = K // BK
    ik = item % NK
    heads = HV // TURNS
    hv = item // NK % heads * TURNS + TURN
    i = item // (NK * heads)
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    count = (L - row).to(gl.int32)
    here = i.to(gl.int64) * HV + hv
    head = (b * T + bos + row) * HV + hv

    rows_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type))
    bq = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    bk = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    bdo = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    e = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    y = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    g += b * gb + (bos + row) * gt + hv.to(gl.int64) * gh + ik * BK
    copy_rows_async(bg, g, gt, count, C, BK)
    async_copy.commit_group()
    copy_rows_async(bq, q + b * qb + (bos + row) * qt + (hv // GROUP).to(gl.int64) * qh + ik * BK, qt, count, C, BK)
    copy_rows_async(bk, k + b * kb + (bos + row) * kt + (hv // GROUP).to(gl.int64) * kh + ik * BK, kt, count, C, BK)
    async_copy.commit_group()
    copy_rows_async(bdo, do + b * ob + (bos + row) * ot + hv.to(gl.int64) * oh, ot, count, C, V)
    copy_rows_async(e, errors + head * V, HV * V, count, C, V)
    copy_rows_async(y, adjoint + head * V, HV * V, count, C, V)
    async_copy.commit_group()

    acc: gl.constexpr = mma_layout(C)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    of_columns: gl.constexpr = gl.SliceLayout(0, acc)
    zeros = gl.zeros((C, C), gl.float32, acc)
    t = gl.arange(0, C, of_rows)
    s = gl.arange(0, C, of_columns)
    beta += b * bb + (bos + row) * bt + hv.to(gl.int64) * bh
    beta_t = gl.load(beta + t.to(gl.int64) * bt, mask=t < count, other=0.0).to(gl.float32)
    beta_s = gl.load(beta + s.to(gl.int64) * bt, mask=s < count, other=0.0).to(gl.float32)
    one = zeros + 1.0
    if UNIT and not STRONG:
        lq = load_lengths(uq, t, b, bos + row, hv, T, HV // GROUP, count, GROUP)
        lk = load_lengths(uk, t, b, bos + row, hv, T, HV // GROUP, count, GROUP)

    if not STRONG:
        async_copy.wait_group(2)
        gl.thread_barrier()
        gate = load_mapped_gates(bg, ik * BK, count, A_log, bias, hv, As, bs, bias_k, number, C, BK, MAP, acc)
        c = gl.sum(gate, 0) * 0.5
        half = gl.exp2(c)
        G = sum_where(gl.where(s[None, :] <= t[:, None], one, 0.0), gate, C, BK) - c[None, :]
        gl.thread_barrier()
    S = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    copy_rows_async(S, states + here * (K * V) + ik * BK, K, V, V, BK)
    copy_rows_async(dS, dstates + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    if not STRONG:
        async_copy.wait_group(2)
        gl.thread_barrier()
        key = widen(bk.load(acc))
        queries = widen(bq.load(acc))
        if UNIT:
            key *= lk[:, None]
            queries *= lq[:, None]
        right = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (key * gl.exp2(-G)).to(gl.bfloat16))
        early = gl.exp2(G)
        behind = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (key * early).to(gl.bfloat16))
        reads = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (queries * early).to(gl.bfloat16))

    async_copy.wait_group(1)
    if STRONG and UNIT:
        scale_rows(bq, uq, b, bos + row, hv, T, HV // GROUP, count, C, BK, GROUP)
        scale_rows(bk, uk, b, bos + row, hv, T, HV // GROUP, count, C, BK, GROUP)
    fence_async_shared()
    gl.thread_barrier()
    A = mma_async(bdo, e.permute((1, 0)), zeros, True)
    own = mma_async(y, e.permute((1, 0)), zeros, True)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    read = mma_async(bdo, S, zeros, True)
    A, own = warpgroup_mma_wait(1, [A, own])
    if ik == 0:
        both = gl.sum(gl.where(t[:, None] == s[None, :], own, 0.0), 1)
        gl.store(dbeta + head + t * HV, both.to(dbeta.dtype.element_ty), mask=t < count)
    A = gl.where(s[None, :] <= t[:, None], A * (scale * beta_s[None, :]), 0.0).to(gl.bfloat16)
    own = gl.where(s[None, :] < t[:, None], own * (-beta_t[:, None] * beta_s[None, :]), 0.0).to(gl.bfloat16)
    read = warpgroup_mma_wait(0, [read])
    bdo._keep_alive()
    if not STRONG:
        gl.thread_barrier()
        sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, A)
        sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, own)
        fence_async_shared()
        gl.thread_barrier()
    compared = mma_async(y, S, zeros, True)
    wrote = mma_async(e, dS, zeros, True)
    overlap = gl.sum(widen(S.load(copy_layout(BK))) * widen(dS.load(copy_layout(BK))), 0)
    place = head * K + ik * BK
    if parts is not None:
        parts += (here + i.to(gl.int64) * HV) * K + ik * BK
    summed = ((b * T + bos + row) * heads + hv // TURNS) * K + ik * BK
    mine = dv + head * V
    if STRONG:
        compared, wrote = warpgroup_mma_wait(0, [compared, wrote])
        e._keep_alive()
        S._keep_alive()
        dS._keep_alive()
        store_value_gradients(mine, y, beta, bt, ik, HV * V, count, C, V, NK)
        gl.thread_barrier()
        sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, A)
        sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, own)
        gl.thread_barrier()
        both = gl.sum(gl.where(t[:, None] == s[None, :], A.to(gl.float32), 0.0), 1)[:, None]
        mirror_lower(sA, C)
        mirror_lower(sL, C)
        read *= scale
        compared *= -beta_t[:, None]
        wrote *= beta_t[:, None]
        overlap = gl.convert_layout(overlap, of_columns)
        gate = load_mapped_gates(bg, ik * BK, count, A_log, bias, hv, As, bs, bias_k, number, C, BK, MAP, acc)
        read, compared, crossing = strong_gradients(
            gate, bq, bk, sA, sL, both, read, compared, wrote, overlap, C, BK, True
        )  # fmt: skip
        store_or_add_rows(dq + summed, read, heads * K, count, TURN, C, BK, TURNS)
        store_or_add_rows(dk + summed, compared, heads * K, count, TURN, C, BK, TURNS)
        store_gate_gradient(
            dg + place, crossing, HV * K, parts, g, gt, ik * BK, count, A_log, bias, hv, As, bs, bias_k, number, C, BK, MAP
        )  # fmt: skip
    else:
        read = mma_async(sA, right, read * (scale * half)[None, :], False)
        compared = warpgroup_mma_wait(2, [compared])
        compared = mma_async(sL, right, compared * -beta_t[:, None] * half[None, :], False)
        wrote = warpgroup_mma_wait(2, [wrote])
        e._keep_alive()
        S._keep_alive()
        dS._keep_alive()
        gl.thread_barrier()
        wrote = wrote * beta_t[:, None] * half[None, :]
        through = gl.sum(widen(right.load(acc)) * wrote, 0) + gl.convert_layout(overlap, of_columns) * half * half
        wrote = mma_async(sA.permute((1, 0)), reads, wrote, False)
        wrote = mma_async(sL.permute((1, 0)), behind, wrote, False)
        store_value_gradients(mine, y, beta, bt, ik, HV * V, count, C, V, NK)
        early = gl.exp2(G)
        read = warpgroup_mma_wait(3, [read])
        store_or_add_rows(dq + summed, read * early, heads * K, count, TURN, C, BK, TURNS)
        crossing = widen(reads.load(acc)) * read
        compared = warpgroup_mma_wait(2, [compared])
        crossing += widen(behind.load(acc)) * compared
        wrote = warpgroup_mma_wait(0, [wrote])
        sA._keep_alive()
        sL._keep_alive()
        reads._keep_alive()
        behind._keep_alive()
        gl.thread_barrier()
        crossing -= widen(right.load(acc)) * wrote
        wrote = compared * early + wrote * gl.exp2(-G)
        store_or_add_rows(dk + summed, wrote, heads * K, count, TURN, C, BK, TURNS)
        crossing = sum_where(gl.where(s[None, :] >= t[:, None], one, 0.0), crossing, C, BK) + through[None, :]
        store_gate_gradient(
            dg + place, crossing, HV * K, parts, g, gt, ik * BK, count, A_log, bias, hv, As, bs, bias_k, number, C, BK, MAP
        )  # fmt: skip


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "COUNT"])
def delta_vector_gradients_bwd_sm90(
    q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates, dq, dr, dw, dk, dv,
    dg, parts, dbeta, log_decays, owner, first, cu, T, PER, N, HV, TURN, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr, STRONG: gl.constexpr,
    SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Gradients of every tile. ``STRONG`` programs look for chunks that decay by ``2^RANGE``; the others leave those."""
    wait_for_predecessor()
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    if STRONG:
        COUNT = items_there(COUNT, first, N, NK * (HV // TURNS), PACKED)
        if any_strong(log_decays, pid, COUNT, TURNS, NK, -RANGE):
            for item in range(pid, COUNT, gl.num_programs(0)):
                if gl.load(log_decays + item // NK * TURNS + TURN) <= -RANGE:
                    none = opaque_offset(item)
                    tile_gradients(
                        item, q, k, do, g, uq, uk, A_log, bias, beta, errors, adjoint, states, dstates, dq, dk, dv, dg, parts,
                        dbeta, owner, first, cu, T, PER, HV + none, TURN, scale, number, qb, qt + none, qh, kb, kt + none, kh,
                        ob, ot + none, oh, gb, gt + none, gh, bb, bt + none, bh, As, bs, bias_k,
                        K, V, C, BK, GROUP, TURNS, PACKED, STRONG, UNIT, MAP
                    )  # fmt: skip
                    gl.thread_barrier()  # the next item's copies may land where a slower warp still reads this one's
    else:
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if gl.load(owner + pid // (NK * (HV // TURNS))) >= N:
                return
        if gl.load(log_decays + pid // NK * TURNS + TURN) <= -RANGE:
            return
        tile_gradients(
            pid, q, k, do, g, uq, uk, A_log, bias, beta, errors, adjoint, states, dstates, dq, dk, dv, dg, parts, dbeta,
            owner, first, cu, T, PER, HV, TURN, scale, number,
            qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh, As, bs, bias_k,
            K, V, C, BK, GROUP, TURNS, PACKED, STRONG, UNIT, MAP
        )  # fmt: skip


@gluon.jit
def store_value_gradients(p, buffer, beta, bt, ik, stride, count, C: gl.constexpr, V: gl.constexpr, NK: gl.constexpr):
    """Store of ``beta ∘ buffer [C, V]``: of ``NK`` parts of its rows, number ``ik``."""
    part: gl.constexpr = C // NK
    layout: gl.constexpr = copy_layout(V)
    r = ik * part + gl.arange(0, part, gl.SliceLayout(1, layout))
    columns = gl.arange(0, V, gl.SliceLayout(0, layout))
    if NK == 1:
        mine = buffer.load(layout)
    elif ik == 0:
        mine = buffer.slice(0, part).load(layout)
    else:
        mine = buffer.slice(part, part).load(layout)
    x = (mine.to(gl.float32) * load_scalars(beta, r, bt, count)[:, None]).to(p.dtype.element_ty)
    gl.store(p + (r[:, None] * stride + columns[None, :]), x, mask=(r < count)[:, None])


@gluon.jit
def mirror_lower(buffer, C: gl.constexpr):
    """A lower triangular matrix made symmetric in its place, without its diagonal."""
    acc: gl.constexpr = mma_layout(C)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    lower = buffer.load(acc)
    upper = buffer.permute((1, 0)).load(acc)
    gl.thread_barrier()
    buffer.store(gl.where(s < t, lower, gl.where(s > t, upper, gl.zeros((C, C), buffer.dtype, acc))))


@gluon.constexpr_function
def column_sum_layout(width):
    """Layout of a tile whose columns are summed: a thread has four of them, and few threads the same."""
    return gl.BlockedLayout([1, 4], [128 // width, width // 4], [4, 1], [1, 0])


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_vector_scores_fwd_sm90(
    q, r, w, k, g, uq, uk, A_log, bias, beta, A, M, A2, L2, decays, read, compare, write, write2, log_decays,
    owner, first, cu, T, PER, N, HV, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr,
    SCORES: gl.constexpr, STRONG: gl.constexpr, SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr,
    DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Scores ``A``, solved ``M`` and decayed rows of every chunk that takes plain products.

    If ``UNIT``, the reciprocal lengths ``uq, uk`` of all chunks' rows too, which others read. Without ``SCORES``, decayed rows
    alone, whatever the chunk decays by.
    """
    wait_for_predecessor()
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + pid // HV) >= N:
            return
    if SCORES:
        betas = load_chunk_beta(pid, beta, owner, first, cu, T, PER, HV, bb, bt, bh, C, PACKED)
    gs, terms, qs, ks, here, head, count = copy_chunk_async(
        pid, q, k, g, owner, first, cu, T, PER, HV, qb, qt, qh, kb, kt, kh, gb, gt, gh, K, C, BK, GROUP, 1, PACKED
    )
    acc: gl.constexpr = mma_layout(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    s = gl.arange(0, C, gl.SliceLayout(0, acc))
    t = gl.arange(0, C, gl.SliceLayout(1, acc))
    if SCORES:
        from_middle = gl.where(s[None, :] <= t[:, None], gl.full((C, C), 0.5, gl.float32, acc), -0.5)
        halves = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, from_middle.to(gl.bfloat16))
    by_query = 1.0
    by_key = 1.0
    if UNIT and not SCORES:
        lq, lk = load_two_lengths(pid, uq, uk, owner, first, cu, T, PER, HV, C, GROUP, PACKED, acc)
        by_query = lq[:, None]
        by_key = lk[:, None]
    async_copy.wait_group(NK)
    gl.thread_barrier()
    wholes = ()
    least = 0.0
    for ik in gl.static_range(NK):
        gate = load_mapped_gates(
            gs[ik], ik * BK, count, A_log, bias, pid % HV, As, bs, bias_k, number, C, BK, MAP, column_sum_layout(BK)
        )  # fmt: skip
        whole = gl.convert_layout(gl.sum(gate, 0), gl.SliceLayout(0, acc))
        gl.store(decays + here * K + ik * BK + s, gl.exp2(whole))
        least = gl.minimum(least, gl.min(whole, 0))
        wholes = wholes + (whole,)  # noqa: RUF005
        store_split(terms[ik].index(0), terms[ik].index(1), gate)
    gl.store(log_decays + here, least)
    if not SCORES:
        ones = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], tile)
        for ik in gl.static_range(NK):
            async_copy.wait_group(NK - 1 - ik)
            gl.thread_barrier()
            place = head + ik * BK
            store_decayed_rows(
                read + place, compare + place, write + place, qs[ik], ks[ik], by_query, by_key, terms[ik].index(0),
                terms[ik].index(1), ones, HV * K, count, C, BK, True
            )  # fmt: skip
            gl.thread_barrier()
    else:
        if UNIT:
            async_copy.wait_group(0)
            gl.thread_barrier()
            lq = reciprocal_lengths(qs, C, BK, NK)
            lk = reciprocal_lengths(ks, C, BK, NK)
            store_two_lengths(pid, uq, uk, lq, lk, owner, first, cu, T, PER, HV, C, GROUP, PACKED)
        if least <= -RANGE:  # left to the strong kernel
            async_copy.wait_group(0)
            return
        wrote = ()
        for ik in gl.static_range(NK):
            place = head + ik * BK
            half = gl.exp2(wholes[ik] * 0.5)[None, :]
            fence_async_shared()
            if not UNIT:
                async_copy.wait_group(NK - 1 - ik)
            gl.thread_barrier()
            G = warpgroup_mma_wait(0, [sum_where_async(halves, terms[ik].index(0), terms[ik].index(1), C, BK)])
            terms[ik]._keep_alive()
            gl.thread_barrier()
            key = widen(ks[ik].load(acc))
            if UNIT:
                key *= lk[:, None]
            right = key * gl.exp2(-G)
            wrote = wrote + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile, right.to(gl.bfloat16)),)  # noqa: RUF005
            store_rows(write + place, (right * half).to(gl.bfloat16), HV * K, count, C, BK)
            early = gl.exp2(G)
            key = key * early
            ks[ik].store(key.to(gl.bfloat16))
            store_rows(compare + place, (key * half).to(gl.bfloat16), HV * K, count, C, BK)
            queries = widen(qs[ik].load(acc)) * early
            if UNIT:
                queries *= lq[:, None]
            qs[ik].store(queries.to(gl.bfloat16))
            store_rows(read + place, (queries * half).to(gl.bfloat16), HV * K, count, C, BK)
        fence_async_shared()
        gl.thread_barrier()
        qw = gl.zeros((C, C), gl.float32, acc)
        rw = gl.zeros((C, C), gl.float32, acc)
        for ik in gl.static_range(NK):
            rw = mma_async(ks[ik], wrote[ik].permute((1, 0)), rw, ik == 0)
            qw = mma_async(qs[ik], wrote[ik].permute((1, 0)), qw, ik == 0)
        rw, qw = warpgroup_mma_wait(0, [rw, qw])
        for ik in gl.static_range(NK):
            qs[ik]._keep_alive()
            ks[ik]._keep_alive()
            wrote[ik]._keep_alive()
        gl.thread_barrier()
        store_scores_and_solve(A, M, qw * scale, rw, betas, here, C)


@gluon.jit
def load_two_lengths(
    item, uq, uk, owner, first, cu, T, PER, HV, C: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Reciprocal lengths of the queries and the keys of one chunk and value head, one a row of a tile of this layout."""
    b, row, count = locate_chunk(item // HV, owner, first, cu, T, PER, C, PACKED)
    t = gl.arange(0, C, gl.SliceLayout(1, layout))
    lq = load_lengths(uq, t, b, row, item % HV, T, HV // GROUP, count, GROUP)
    return lq, load_lengths(uk, t, b, row, item % HV, T, HV // GROUP, count, GROUP)


@gluon.jit
def store_two_lengths(
    item, uq, uk, lq, lk, owner, first, cu, T, PER, HV, C: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Store of those, by the first value head of a group."""
    b, row, count = locate_chunk(item // HV, owner, first, cu, T, PER, C, PACKED)
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(C)))
    HEADS = HV // GROUP
    here = (b * T + row) * HEADS + item % HV // GROUP + t * HEADS
    mine = (t < count) & (item % HV % GROUP == 0)
    gl.store(uq + here, lq, mask=mine)
    gl.store(uk + here, lk, mask=mine)


@gluon.jit
def load_chunk_beta(item, beta, owner, first, cu, T, PER, HV, bb, bt, bh, C: gl.constexpr, PACKED: gl.constexpr):
    """``beta`` of the tokens of one chunk and value head."""
    b, row, count = locate_chunk(item // HV, owner, first, cu, T, PER, C, PACKED)
    j = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    return load_scalars(head_pointer(beta, b, row, item % HV, bb, bt, bh, 1), j, bt, count)


@gluon.jit
def store_scores_and_solve(A, M, a, compared, betas, here, C: gl.constexpr):
    """Store of a chunk's ``A`` and, solved of ``L`` and ``beta``, its ``M``."""
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(C)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, mma_layout(C)))[None, :]
    square = here * (C * C)
    store_rows(A + square, gl.where(s <= t, a, 0.0).to(gl.bfloat16), C, C, C, C)
    solve_and_store(M + square, gl.where(s < t, compared, 0.0), betas, 1, C)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_vector_scores_strong_fwd_sm90(
    q, r, w, k, g, uq, uk, A_log, bias, beta, A, M, A2, L2, decays, read, compare, write, write2, log_decays,
    owner, first, cu, T, PER, N, HV, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr,
    SCORES: gl.constexpr, STRONG: gl.constexpr, SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr,
    DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Scores, solved systems and decayed rows of the strong chunks, by levels: those that decay by ``2^RANGE``."""
    wait_for_predecessor()
    pid = gl.program_id(0)
    COUNT = items_there(COUNT, first, N, HV, PACKED)
    if any_strong(log_decays, pid, COUNT, 1, 1, -RANGE):
        for item in range(pid, COUNT, gl.num_programs(0)):
            if gl.load(log_decays + item) <= -RANGE:
                none = opaque_offset(item)
                gs, terms, qs, ks, here, head, count = copy_chunk_async(
                    item, q, k, g, owner, first, cu, T, PER, HV, qb, qt + none, qh, kb, kt + none, kh, gb, gt + none, gh,
                    K, C, K, GROUP, 1, PACKED
                )  # fmt: skip
                by_query = 1.0
                by_key = 1.0
                if UNIT:
                    lq, lk = load_two_lengths(
                        item, uq, uk, owner, first, cu, T, PER, HV, C, GROUP, PACKED, mma_layout(K)
                    )  # fmt: skip
                    by_query = lq[:, None]
                    by_key = lk[:, None]
                async_copy.wait_group(0)
                gl.thread_barrier()
                gate = load_mapped_gates(
                    gs[0], 0, count, A_log, bias, item % HV, As, bs, bias_k, number, C, K, MAP, mma_layout(K)
                )  # fmt: skip
                a, m = strong_scores(
                    read + head, compare + head, write + head, gate, terms[0], qs[0], ks[0], by_query, by_key, (HV + none) * K,
                    count, C, K, True
                )  # fmt: skip
                if UNIT:
                    acc: gl.constexpr = mma_layout(C)
                    of_writers = gl.convert_layout(lk, gl.SliceLayout(0, acc))[None, :]
                    a *= gl.convert_layout(lq, gl.SliceLayout(1, acc))[:, None] * of_writers
                    m *= gl.convert_layout(lk, gl.SliceLayout(1, acc))[:, None] * of_writers
                betas = load_chunk_beta(item, beta, owner, first, cu, T, PER, HV, bb, bt, bh, C, PACKED)
                store_scores_and_solve(A, M, a * scale, m, betas, here, C)
                gl.thread_barrier()
