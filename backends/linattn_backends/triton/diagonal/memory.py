"""Chunk kernels with states in memory: no gate, a scalar one, ``gla`` with a value gate. Other vector gates: :mod:`.vector`.

In chunks of ``C`` tokens, with ``S`` the state before a chunk and ``dS'`` the gradient of the state after it::

    states     S' = Diag(e^{G_C}) S + (k ∘ e^{G_C - G})ᵀ v              stored at every chunk's start
      reverse  dS = Diag(e^{G_C}) dS' + scale (q ∘ e^G)ᵀ do             stored at every chunk's end
    outputs    o  = scale (A v + (q ∘ e^G) S),   A_ts = Σ_k q_t k_s e^{G_t - G_s}, s ≤ t
      reverse  dv = scale Aᵀ do + (k ∘ e^{G_C - G}) dS'
    gradients  dq = scale (dA (k e^{-G})  + do Sᵀ) e^{G},  dA = do vᵀ, s ≤ t
               dk = scale dAᵀ (q e^{G}) e^{-G} + (v dS'ᵀ) e^{G_C - G}
               dg_j = Σ_{s<j≤t} (scale A ∘ dA)_ts + Σ_{t≥j} q dq_inter + Σ_{t<j} k dk_inter + e^{G_C} Σ_v S ∘ dS'

``e^{G_t - G_s}`` is never formed as a product of an overflowing factor: see :mod:`..lib.tiles`.

A value gate ``w`` (``gv``) decays values as ``g`` does keys: ``y`` and ``do`` against the state, and every ``[C, C]`` product
of values, with references in the chunk as for the keys. The recurrence stays the same if keys and values, queries and ``do``,
both gates, ``S`` and ``Sᵀ`` change places: the kernel of the gradients in these roles (``TRANSPOSED``) gives ``dv`` and the
gradient of ``w``.

Every kernel is one grid of programs along one axis and none of them waits for another, adds to shared memory locations or asks
the host for a size: results are deterministic and launches can be captured. ``GATE`` is one of the kinds in :mod:`.gate`.
"""

import triton
import triton.language as tl

from ..lib.gates import (
    LOG2E,
    block_decays,
    decay_from_sums,
    decay_rows,
    decay_to_queries,
    decayed_values,
    decays_of_values,
    level_masks,
    level_pairs_transposed,
    level_scores,
    load_gate,
    lower_gates_transposed,
    plain_block_half,
    reset_tokens,
    scalar_decays,
    sum_where,
    upper_gates_transposed,
)
from ..lib.indexing import chunk_at, head_pointer, load_state, locate_segment, locate_sequence, state_offsets
from ..lib.tiles import accumulate, dot, dot_add, load_tile, to_operand, total
from .gate import NONE, SCALAR, SUMMED, VECTOR, load_chunk_decay, load_chunk_sum, load_numbers

__all__ = ["diagonal_carries", "diagonal_gradients_bwd", "diagonal_outputs", "diagonal_scalar_gradients_bwd", "diagonal_states"]


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def diagonal_states(
    x, y, g, w, weight, start, end, decay, value_decay, kept, ranges,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    xb, xt, xh, yb, yt, yh, gb, gt, gh, wb, wt, wh, mb, mt, mh, sn, sh, sk, sv,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr, END: tl.constexpr, KEEP: tl.constexpr,
    RANGED: tl.constexpr, VALUE_GATE: tl.constexpr, WEIGHTED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a segment with a ``[BK, BV]`` tile of the state in registers.

    ``x, y`` are ``k, v``, or ``q, do`` in reverse. ``start`` and ``end`` hold a state a segment, ``kept`` one a chunk,
    ``decay`` and ``value_decay`` the sums of a segment's gates, base 2. If ``RANGED``, only the chunks of ``ranges`` are
    scanned: the state at the far end is right, and so are the sums of gates as far as they leave anything.

    Under a scalar gate values may have weights.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    ik = pid // NV % NK
    hv = pid // (NV * NK) % HV
    i = pid // (NV * NK * HV)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    n, bos, L, b, low, high = locate_segment(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    if RANGED:
        low = tl.maximum(low, tl.load(ranges + 2 * (n * HV + hv)))
        high = tl.minimum(high, tl.load(ranges + 2 * (n * HV + hv) + 1))
    if KEEP or GATE == SUMMED:
        if PACKED:
            chunk0 = tl.load(chunk_first + n).to(tl.int64)
        else:
            chunk0 = n * ((T + C - 1) // C)
    columns_k = ik * BK + tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    tile, inside = state_offsets(columns_k, columns_v, K, V)
    x = head_pointer(x, b, bos, hv, xb, xt, xh, GROUP)
    y = head_pointer(y, b, bos, hv, yb, yt, yh, 1)
    if GATE == SCALAR or GATE == VECTOR:  # noqa: SIM109 - the compiler has no `in`
        g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
    if VALUE_GATE:
        w = head_pointer(w, b, bos, hv, wb, wt, wh, 1)
    if WEIGHTED:
        weight = head_pointer(weight, b, bos, hv, mb, mt, mh, 1)
    at = (i.to(tl.int64) * HV + hv) * (K * V)
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        S += load_state(start, i, hv, columns_k[:, None], columns_v[None, :], inside, sn, sh, sk, sv)
    sum_g = tl.zeros((BK,), tl.float32)
    sum_w = tl.zeros((BV,), tl.float32)
    t = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    if GATE == SUMMED:
        later = load_chunk_decay(g, chunk0, chunk_at(low, low, high, REVERSE), hv, HV, columns_k, low < high, K)
    for step in range(low, high):
        chunk = chunk_at(step, low, high, REVERSE)
        rows = chunk * C + tl.arange(0, C)
        if GATE == SUMMED:
            all = later
            later = load_chunk_decay(g, chunk0, chunk_at(step + 1, low, high, REVERSE), hv, HV, columns_k, step + 1 < high, K)
        if KEEP:
            p = kept + ((chunk0 + chunk) * HV + hv) * (K * V)
            tl.store(p + tile, S.to(kept.dtype.element_ty), mask=inside)
        bx = load_tile(x, rows, xt, columns_k, L, K, BK)
        by = load_tile(y, rows, yt, columns_v, L, V, BV)
        if GATE == SUMMED:
            xd = bx
            S = S * tl.exp2(all)[:, None]
            sum_g += all
        elif REVERSE:
            xd = bx.to(tl.float32) * scale
        else:
            xd = bx.to(tl.float32)
        if GATE == SCALAR:
            to_start, to_end, all = scalar_decays(g, rows, load_chunk_sum(g, chunk, L, gt, True, C), gt, L)
            if WEIGHTED:
                to_end *= load_numbers(weight, rows, mt, L)
            if REVERSE:
                xd = xd * to_start[:, None]
            else:
                xd = xd * to_end[:, None]
            S = S * tl.exp2(all)
            sum_g += all
        if GATE == VECTOR:
            bg = load_gate(g, rows, gt, columns_k, L, K, BK)
            if not REVERSE:
                E = sum_where(j > t, bg, SPLIT)
            else:
                E = sum_where(j <= t, bg, SPLIT)
            xd = xd * tl.exp2(E * LOG2E)
            all = tl.sum(bg.to(tl.float32), 0) * LOG2E
            S = S * tl.exp2(all)[:, None]
            sum_g += all
        if VALUE_GATE:
            bw = load_gate(w, rows, wt, columns_v, L, V, BV)
            if REVERSE:
                E = sum_where(j <= t, bw, SPLIT)
            else:
                E = sum_where(j > t, bw, SPLIT)
            by = (by.to(tl.float32) * tl.exp2(E * LOG2E)).to(by.dtype)
            all = tl.sum(bw.to(tl.float32), 0) * LOG2E
            S = S * tl.exp2(all)[None, :]
            sum_w += all
        S = dot_add(tl.trans(xd.to(by.dtype)), by, S, PREC)
    if END:
        tl.store(end + at + tile, S, mask=inside)
        if GATE != NONE and not WHOLE and iv == 0:
            p = decay + (i.to(tl.int64) * HV + hv) * K
            tl.store(p + columns_k, sum_g, mask=columns_k < K)
        if VALUE_GATE and not WHOLE:  # noqa: SIM102
            if ik == 0:
                p = value_decay + (i.to(tl.int64) * HV + hv) * V
                tl.store(p + columns_v, sum_w, mask=columns_v < V)


@triton.jit
def load_segment(
    local, decay, value_decay, i, last, hv, HV, tile, inside, columns_k, columns_v,
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, VALUE_GATE: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Segment ``i``'s own state and the decay factors of its tile; past ``last``, zeros and ones."""
    if REVERSE:
        there = i >= last
    else:
        there = i <= last
    has = inside & there
    head = i.to(tl.int64) * HV + hv
    p = local + head * (K * V) + tile
    own = tl.load(p, mask=has, other=0.0)
    keep = tl.full(columns_k.shape, 1.0, tl.float32)[:, None]
    if GATE != NONE:
        keep = tl.exp2(tl.load(decay + head * K + columns_k, mask=(columns_k < K) & there, other=0.0))[:, None]
    if VALUE_GATE:
        keep = keep * tl.exp2(tl.load(value_decay + head * V + columns_v, mask=(columns_v < V) & there, other=0.0))[None, :]
    return own, keep, p, has


@triton.jit(do_not_specialize=["PER", "HV"])
def diagonal_carries(
    local, decay, value_decay, start, end, first, PER, HV, sn, sh, sk, sv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, VALUE_GATE: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    """From the states that segments make out of zero, the state before each (in place in ``local``) and after the last."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    ik = pid // NV % NK
    hv = pid // (NV * NK) % HV
    n = (pid // (NV * NK * HV)).to(tl.int64)
    if PACKED:
        low = tl.load(first + n).to(tl.int32)
        high = tl.load(first + n + 1).to(tl.int32)
    else:
        low = n.to(tl.int32) * PER
        high = low + PER
    columns_k = ik * BK + tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    tile, inside = state_offsets(columns_k, columns_v, K, V)
    at = (n * HV + hv) * (K * V)
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        S += load_state(start, n, hv, columns_k[:, None], columns_v[None, :], inside, sn, sh, sk, sv)
    jump = -1 if REVERSE else 1
    last = low if REVERSE else high - 1
    i = high - 1 if REVERSE else low
    for _ in range(low, high, 4):  # four at a time: their loads do not wait for each other
        own0, keep0, p0, has0 = load_segment(
            local, decay, value_decay, i, last, hv, HV, tile, inside, columns_k, columns_v, K, V, GATE, VALUE_GATE, REVERSE
        )  # fmt: skip
        own1, keep1, p1, has1 = load_segment(
            local, decay, value_decay, i + jump, last, hv, HV, tile, inside, columns_k, columns_v, K, V, GATE, VALUE_GATE,
            REVERSE
        )  # fmt: skip
        own2, keep2, p2, has2 = load_segment(
            local, decay, value_decay, i + 2 * jump, last, hv, HV, tile, inside, columns_k, columns_v, K, V, GATE, VALUE_GATE,
            REVERSE
        )  # fmt: skip
        own3, keep3, p3, has3 = load_segment(
            local, decay, value_decay, i + 3 * jump, last, hv, HV, tile, inside, columns_k, columns_v, K, V, GATE, VALUE_GATE,
            REVERSE
        )  # fmt: skip
        S1 = S * keep0 + own0
        S2 = S1 * keep1 + own1
        S3 = S2 * keep2 + own2
        tl.store(p0, S, mask=has0)
        tl.store(p1, S1, mask=has1)
        tl.store(p2, S2, mask=has2)
        tl.store(p3, S3, mask=has3)
        S = S3 * keep3 + own3
        i += 4 * jump
    tl.store(end + at + tile, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def diagonal_outputs(
    q, k, y, g, w, kept, out, owner, first, cu, T, PER, N, HV, scale,
    qb, qt, qh, kb, kt, kh, yb, yt, yh, gb, gt, gh, wb, wt, wh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr,
    VALUE_GATE: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """A ``[C, BV]`` tile of one chunk of ``o`` (``y = v``) or, in reverse, of ``dv`` (``y = do``), summed over ``BK`` tiles."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_v = iv * BV + tl.arange(0, BV)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    y = head_pointer(y, b, bos, hv, yb, yt, yh, 1)
    if GATE != NONE:
        g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
    kept += (i.to(tl.int64) * HV + hv) * (K * V)
    A = tl.zeros((C, C), tl.float32)
    acc = tl.zeros((C, BV), tl.float32)
    for ik in range(NK):
        columns_k = ik * BK + tl.arange(0, BK)
        bq = load_tile(q, rows, qt, columns_k, L, K, BK)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        tile, inside = state_offsets(columns_k, columns_v, K, V)
        bS = tl.load(kept + tile, mask=inside, other=0.0)
        if GATE == VECTOR:
            bg = load_gate(g, rows, gt, columns_k, L, K, BK)
            none = tl.zeros((BK,), tl.float32)
            A += level_scores(bq, bk, bg, none, C, REVERSE, False, SPLIT, RANGE, DT, PREC)
        elif REVERSE:
            A = dot_add(bk, tl.trans(bq), A, PREC)
            acc = dot_add(bk.to(bS.dtype), bS, acc, PREC)
        else:
            A = dot_add(bq, tl.trans(bk), A, PREC)
            acc = dot_add(bq.to(bS.dtype), bS, acc, PREC)
    if GATE == VECTOR:  # apart from the levels, which need the registers
        for ik in range(NK):
            columns_k = ik * BK + tl.arange(0, BK)
            bg = load_gate(g, rows, gt, columns_k, L, K, BK)
            if REVERSE:
                bx = load_tile(k, rows, kt, columns_k, L, K, BK)
            else:
                bx = load_tile(q, rows, qt, columns_k, L, K, BK)
            tile, inside = state_offsets(columns_k, columns_v, K, V)
            bS = tl.load(kept + tile, mask=inside, other=0.0)
            acc = dot_add(decay_rows(bx, bg, C, REVERSE, False, SPLIT).to(bS.dtype), bS, acc, PREC)
    if GATE == SCALAR:
        to_start, to_end, _ = scalar_decays(g, rows, load_chunk_sum(g, piece, L, gt, True, C), gt, L)
        if REVERSE:
            acc = acc * to_end[:, None]
        else:
            acc = acc * to_start[:, None]
        A = A * decay_from_sums(g, rows, gt, L, REVERSE)
    if GATE == NONE:
        if REVERSE:
            A = tl.where(t <= s, A, 0.0)
        else:
            A = tl.where(s <= t, A, 0.0)
    if not REVERSE:
        acc = acc * scale
    by = load_tile(y, rows, yt, columns_v, L, V, BV)
    if VALUE_GATE:
        bw = load_gate(head_pointer(w, b, bos, hv, wb, wt, wh, 1), rows, wt, columns_v, L, V, BV)
        acc = acc * tl.exp2(sum_where(s <= t, bw, SPLIT) * LOG2E) + decayed_values(A * scale, by, bw, C, SPLIT, RANGE, DT, PREC)
    else:
        acc = dot_add((A * scale).to(DT), by.to(DT), acc, PREC)
    p = out + ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
    tl.store(p, acc.to(out.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "tiles_stride"])
def diagonal_gradients_bwd(
    q, k, v, do, g, w, kept, dkept, dq, dk, dg, owner, first, cu, T, PER, N, HV, TURN, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ob, ot, oh, gb, gt, gh, wb, wt, wh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_GATE_GROUP: tl.constexpr,
    TURNS: tl.constexpr, GATE: tl.constexpr, VALUE_GATE: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk [C, BK]`` and ``dg``, over tiles of ``BV`` value channels; ``dA`` and its transpose: ``[C, C]``.

    Where ``TURNS`` value heads share ``dq, dk``, they take turns: this is the ``TURN``-th of each.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    heads = HV // TURNS
    hv = pid // NK % heads * TURNS + TURN
    i = pid // (NK * heads)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_k = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    v = head_pointer(v, b, bos, hv, vb, vt, vh, VALUE_GROUP)
    do = head_pointer(do, b, bos, hv, ob, ot, oh, VALUE_GROUP)
    if VALUE_GATE:
        w = head_pointer(w, b, bos, hv, wb, wt, wh, VALUE_GATE_GROUP)
    if GATE != NONE:
        g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
    kept += (i.to(tl.int64) * HV + hv) * (K * V)
    dkept += (i.to(tl.int64) * HV + hv) * (K * V)

    inside = (rows < L)[:, None] & (columns_k < K)[None, :]
    at = (b * T + bos + rows) * HV + hv
    p = ((b * T + bos + rows) * heads + hv // TURNS)[:, None] * K + columns_k[None, :]

    # The query's side: dA [C, C] and dq [C, BK].
    dA, bdq, _ = one_sided_products(
        do, ot, v, vt, w, wt, kept, kept, rows, columns_k, L, K, V, C, BK, BV, False, VALUE_GATE, TRANSPOSED, SPLIT, RANGE,
        PREC, DT
    )  # fmt: skip
    dA = dA * scale
    bdq = bdq * scale
    own = tl.sum(tl.where(t == s, dA, 0.0), 1)
    bk = load_tile(k, rows, kt, columns_k, L, K, BK)
    bq = load_tile(q, rows, qt, columns_k, L, K, BK)
    if GATE == NONE:
        bdq = dot_add(tl.where(s <= t, dA, 0.0).to(DT), bk.to(DT), bdq, PREC)
        accumulate(dq + p, bdq, inside, TURN, TURNS)
    if GATE == SCALAR:
        to_start, to_end, all = scalar_decays(g, rows, load_chunk_sum(g, piece, L, gt, True, C), gt, L)
        dA = dA * decay_from_sums(g, rows, gt, L, False)
        bdq = bdq * to_start[:, None]
        pairs = tl.where(s < t, dA * dot(bq, tl.trans(bk), PREC), 0.0)
        across = tl.sum(tl.where(s < t, sum_where(s >= t, pairs, SPLIT), 0.0), 1)
        across += tl.sum(tl.where(s >= t, tl.sum(bq * bdq, 1)[None, :], 0.0), 1)
        bdq = dot_add(dA.to(DT), bk.to(DT), bdq, PREC)
        accumulate(dq + p, bdq, inside, TURN, TURNS)
    if GATE == VECTOR:
        bg = load_gate(g, rows, gt, columns_k, L, K, BK)
        qf = bq.to(tl.float32)
        kf = bk.to(tl.float32)
        weight = own[:, None]
        whole = tl.sum(bg.to(tl.float32), 0) * LOG2E
        bdq = bdq * tl.exp2(sum_where(s <= t, bg, SPLIT) * LOG2E)
        bdg = sum_where(s >= t, qf * bdq, SPLIT)
        stop = plain_block_half(bg, RANGE, C, False, 1)
        half = C // 2
        while half > stop:
            upper, between, pairs = level_masks(half, C, False)
            e = tl.exp2(sum_where(between, bg, SPLIT) * LOG2E)
            X = (tl.where(upper, 0.0, bk).to(tl.float32) * e).to(DT)
            Z = tl.where(upper, e * dot(tl.where(pairs, dA, 0.0).to(DT), X, PREC), 0.0)
            bdq += Z
            bdg += sum_where(upper_gates_transposed(half, C, False), tl.where(upper, bq, 0.0).to(tl.float32) * Z, SPLIT)
            half = half // 2
        if stop > 0:
            Gq, G = block_decays(bg, stop, C, False, SPLIT)
            near = (t ^ s) < 2 * stop
            Z = tl.exp2(Gq) * dot(tl.where(near & (s < t), dA, 0.0).to(DT), (kf * tl.exp2(-G)).to(DT), PREC)
            bdq += Z
            bdg += sum_where(near & (s >= t), qf * Z, SPLIT)
        if not TRANSPOSED:  # then it is the output, known already
            accumulate(dq + p, bdq + weight * kf, inside, TURN, TURNS)

    # The key's side: dA transposed and dk [C, BK].
    dAT, bdk, met = one_sided_products(
        v, vt, do, ot, w, wt, dkept, kept, rows, columns_k, L, K, V, C, BK, BV, GATE != NONE, VALUE_GATE, TRANSPOSED, SPLIT,
        RANGE, PREC, DT
    )  # fmt: skip
    dAT = dAT * scale
    if GATE == NONE:
        bdk = dot_add(tl.where(t <= s, dAT, 0.0).to(DT), bq.to(DT), bdk, PREC)
        accumulate(dk + p, bdk, inside, TURN, TURNS)
    if GATE == SCALAR:
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        bq = load_tile(q, rows, qt, columns_k, L, K, BK)
        bdk = bdk * to_end[:, None]
        across_k = tl.sum(bk.to(tl.float32) * bdk, 1)
        through = tl.sum(met, 0) * tl.exp2(all)
        bdk = dot_add((dAT * decay_from_sums(g, rows, gt, L, True)).to(DT), bq.to(DT), bdk, PREC)
        accumulate(dk + p, bdk, inside, TURN, TURNS)
        across += tl.sum(tl.where(s < t, across_k[None, :], 0.0), 1) + through
        tl.store(dg + ik * tiles_stride + at, across.to(dg.dtype.element_ty), mask=rows < L)
    if GATE == VECTOR:
        bg = load_gate(g, rows, gt, columns_k, L, K, BK)
        bq = load_tile(q, rows, qt, columns_k, L, K, BK)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        qf = bq.to(tl.float32)
        kf = bk.to(tl.float32)
        bdk = bdk * tl.exp2(sum_where(s > t, bg, SPLIT) * LOG2E)
        bdg += sum_where(s < t, kf * bdk, SPLIT) + (met * tl.exp2(whole))[None, :]
        half = C // 2
        while half > stop:
            upper, between, pairs = level_masks(half, C, False)
            e = tl.exp2(sum_where(between, bg, SPLIT) * LOG2E)
            X = (tl.where(upper, bq, 0.0).to(tl.float32) * e).to(DT)
            Z = tl.where(upper, 0.0, e * dot(tl.where(level_pairs_transposed(half, C), dAT, 0.0).to(DT), X, PREC))
            bdk += Z
            bdg += sum_where(lower_gates_transposed(half, C), tl.where(upper, 0.0, bk).to(tl.float32) * Z, SPLIT)
            half = half // 2
        if stop > 0:
            Gq, G = block_decays(bg, stop, C, False, SPLIT)
            near = (t ^ s) < 2 * stop
            Z = tl.exp2(-G) * dot(tl.where(near & (t < s), dAT, 0.0).to(DT), (qf * tl.exp2(Gq)).to(DT), PREC)
            bdk += Z
            bdg -= sum_where(near & (s >= t), kf * Z, SPLIT)
        accumulate(dk + p, bdk + weight * qf, inside, TURN, TURNS)
        tl.store(dg + at[:, None] * K + columns_k[None, :], bdg.to(dg.dtype.element_ty), mask=inside)


@triton.jit
def one_sided_products(
    a, at, b, bt, w, wt, kept, other, rows, columns_k, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MEET: tl.constexpr,
    VALUE_GATE: tl.constexpr, TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """``a bᵀ [C, C]``, ``a Sᵀ [C, BK]`` and, if ``MEET``, ``Σ_v S ∘ S2 [BK]``, for two rows of values and two states.

    With ``MEET``, ``a, b`` are ``v, do``, else ``do, v``. A value gate ``w`` decays all three: scores as those of the keys.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    M = tl.zeros((C, C), tl.float32)
    R = tl.zeros((C, BK), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range(NV):
        columns_v = iv * BV + tl.arange(0, BV)
        ba = load_tile(a, rows, at, columns_v, L, V, BV).to(DT)
        bb = load_tile(b, rows, bt, columns_v, L, V, BV).to(DT)
        tile, inside = state_offsets(columns_k, columns_v, K, V)
        if TRANSPOSED:
            tile = columns_v[None, :] * K + columns_k[:, None]
        bS = tl.load(kept + tile, mask=inside, other=0.0)
        if VALUE_GATE:
            bw = load_gate(w, rows, wt, columns_v, L, V, BV)
            none = tl.zeros((BV,), tl.float32)
            if MEET:
                M += level_scores(bb, ba, bw, none, C, True, False, SPLIT, RANGE, DT, PREC)
            else:
                M += level_scores(ba, bb, bw, none, C, False, False, SPLIT, RANGE, DT, PREC)
            ba = decay_rows(ba, bw, C, MEET, False, SPLIT)
        else:
            M = dot_add(ba, tl.trans(bb), M, PREC)
        R = dot_add(ba.to(bS.dtype), tl.trans(bS), R, PREC)
        if MEET:
            both = bS.to(tl.float32) * tl.load(other + tile, mask=inside, other=0.0).to(tl.float32)
            if VALUE_GATE:
                both = both * tl.exp2(tl.sum(bw.to(tl.float32), 0) * LOG2E)[None, :]
            met += tl.sum(both, 1)
    return M, R, met


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "tiles_stride"])
def diagonal_scalar_gradients_bwd(
    q, k, v, do, G, late, kept, dkept, dq, dk, dg, dweight, dskip,
    owner, first, cu, T, PER, N, HV, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ob, ot, oh, gb, gt, gh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, WEIGHTED: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk [C, BK]``, and these channels' part of ``dg``. ``G`` are running sums.

    Both sides come from one pass over the value channels. ``dg_j`` is the sum over ``t ≥ j`` of ``q·dq - k·dk``, and all that
    passes through the chunk; what both have, ``dA_tt q_t·k_t``, is in float32 on either side. ``HEADS`` value heads that share
    a query/key head come one after the other, and ``dq, dk`` are their sums.

    Where values have weights, ``late`` stands for ``G`` at the token of a value, and the gradient of a weight's logarithm is
    ``k·dk``, ``dweight``; that of a skip's factor is a sum of ``do·v``, ``dskip``.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    sums = HV // HEADS
    hs = pid // NK % sums
    i = pid // (NK * sums)
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns = ik * BK + tl.arange(0, BK)
    sum_dq = tl.zeros((C, BK), tl.float32)
    sum_dk = tl.zeros((C, BK), tl.float32)
    for head in range(HEADS):
        hv = hs * HEADS + head
        gates = head_pointer(G, b, bos, hv, gb, gt, gh, 1)
        here = (i.to(tl.int64) * HV + hv) * (K * V)
        bdq, bdk, below, met = products_with_states(
            head_pointer(v, b, bos, hv, vb, vt, vh, 1), head_pointer(do, b, bos, hv, ob, ot, oh, 1),
            kept + here, dkept + here, rows, columns, vt, ot, L, K, V, C, BK, BV, PREC,
        )  # fmt: skip
        # Not before the loop: kept in registers as float32, they would leave no room for the sums.
        bk = load_tile(head_pointer(k, b, bos, hv, kb, kt, kh, GROUP), rows, kt, columns, L, K, BK)
        bq = load_tile(head_pointer(q, b, bos, hv, qb, qt, qh, GROUP), rows, qt, columns, L, K, BK)
        end = load_chunk_sum(gates, piece, L, gt, True, C)
        if WEIGHTED:
            of_values = head_pointer(late, b, bos, hv, gb, gt, gh, 1)
            to_start, to_end, all = decays_of_values(gates, of_values, rows, end, gt, L)
        else:
            to_start, to_end, all = scalar_decays(gates, rows, end, gt, L)
        if SKIP:
            same = tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :]
            own = tl.sum(tl.where(same, below, 0.0), 1)
            tl.store(dskip + (b * T + bos + rows) * HV + hv, own, mask=(rows < L) & (ik == 0))
        bdk = bdk * to_end[:, None]
        through = met * tl.exp2(all) + total(tl.sum(bk.to(tl.float32) * bdk, 1))
        if WEIGHTED:
            pairs = to_operand(below * scale * decay_to_queries(gates, of_values, rows, gt, L), DT, PREC)
        else:
            pairs = to_operand(below * scale * decay_from_sums(gates, rows, gt, L, False), DT, PREC)
        bdq = dot_add(pairs, bk.to(DT), bdq * (to_start * scale)[:, None], PREC)
        across = tl.sum(bq.to(tl.float32) * bdq, 1)
        bdk = dot_add(tl.trans(pairs), bq.to(DT), bdk, PREC)
        of_keys = tl.sum(bk.to(tl.float32) * bdk, 1)
        at = (b * T + bos + rows) * HV + hv
        if WEIGHTED:
            tl.store(dweight + ik * tiles_stride + at, of_keys, mask=rows < L)
        across = tl.cumsum(across - of_keys, 0, reverse=True) + through
        across = tl.where(reset_tokens(gates, rows, gt, L, C), 0.0, across)
        tl.store(dg + ik * tiles_stride + at, across, mask=rows < L)
        sum_dq += bdq
        sum_dk += bdk
    keep = (rows < L)[:, None] & (columns < K)[None, :]
    p = ((b * T + bos + rows) * sums + hs)[:, None] * K + columns[None, :]
    tl.store(dq + p, sum_dq.to(dq.dtype.element_ty), mask=keep)
    tl.store(dk + p, sum_dk.to(dk.dtype.element_ty), mask=keep)


@triton.jit
def products_with_states(
    v, do, kept, dkept, rows, columns, vt, ot, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``do Sᵀ`` and ``v dS'ᵀ [C, BK]``, ``do vᵀ [C, C]`` and ``Σ S ∘ dS'`` of one chunk of a head."""
    bdq = tl.zeros((C, BK), tl.float32)
    bdk = tl.zeros((C, BK), tl.float32)
    below = tl.zeros((C, C), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        tile, inside = state_offsets(columns, columns_v, K, V)
        bo = load_tile(do, rows, ot, columns_v, L, V, BV)
        bv = load_tile(v, rows, vt, columns_v, L, V, BV)
        bS = tl.load(kept + tile, mask=inside, other=0.0)
        bD = tl.load(dkept + tile, mask=inside, other=0.0)
        bdq = dot_add(bo.to(bS.dtype), tl.trans(bS), bdq, PREC)
        bdk = dot_add(bv.to(bS.dtype), tl.trans(bD), bdk, PREC)
        below = dot_add(bo, tl.trans(bv), below, PREC)
        met += tl.sum(bS.to(tl.float32) * bD.to(tl.float32), 1)
    return bdq, bdk, below, tl.sum(met, 0)
