"""Scores, decayed rows and gradients of the delta families with a gate per key channel: ``kda``, and ``dplr``.

Both are one recurrence of *readers* ``q, r`` and *writers* ``w``; what is not here is as in :mod:`.scores` and
:mod:`.gradients`::

    kda     r = k            writes  x with k
    dplr    r = -a           writes  w with b, and v with k         (r reads before the token's own gate: ``EXCLUSIVE``)

    scores  A_ts = scale Σ_k q_t w_s e^{G_t - G_s}, s ≤ t           L_ts = Σ_k r_t w_s e^{G_t - G_s}, s < t
            A' and L' likewise with the second writer               e = -L' v - (r ∘ e^G) S - L e  for dplr

``delta_vector_scores_fwd`` makes the scores and the decayed rows that :mod:`.state` takes: ``q ∘ e^G``, ``r ∘ e^G``,
``w ∘ e^{G_C - G}``. ``delta_vector_gradients_bwd`` goes the other way. A relation of a reader and a writer contributes
``d reader = dA (w e^{-G}) e^G``, ``d writer = dAᵀ (r e^G) e^{-G}``, by the products or levels of its scores: every exponent
is a sum of gates, and ``dg_j`` sums over the pairs ``s < j ≤ t`` without cancellation where that matters.

Of ``kda``, raw projections are mapped as they are loaded: ``q, k`` times the reciprocal lengths ``uq, uk`` of their rows
(``UNIT``), whose gradients are left as those of unit rows, and raw gates to log decays (``MAP``), whose gradient is taken as it
is stored.
"""

import triton
import triton.language as tl

from ..lib.gates import (
    LOG2E,
    block_decays,
    decay_rows,
    excess,
    level_masks,
    level_pairs_transposed,
    level_scores,
    lower_gates_transposed,
    plain_block_half,
    sum_where,
    upper_gates_transposed,
)
from ..lib.indexing import items_there, locate_sequence
from ..lib.tiles import accumulate, dot, dot_add, load_tile, to_operand
from .gradients import state_product, state_products
from .loads import load_decays, load_keys, load_two_lengths, store_gate_gradient

__all__ = ["delta_vector_gradients_bwd", "delta_vector_rows_fwd", "delta_vector_scores_fwd", "delta_vector_values_bwd"]


@triton.jit
def load_writer(
    writer, k, w, lk, rows, columns, L, kt, wt, K: tl.constexpr, BK: tl.constexpr, DPLR: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """A tile of the first writer, for ``dplr`` ``w``, or of the last, ``k``; in float32, whatever the dtype of each."""
    result = load_keys(k, rows, kt, columns, L, K, BK, lk, UNIT).to(tl.float32)
    if DPLR:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if writer == 0:
            result = load_tile(w, rows, wt, columns, L, K, BK).to(tl.float32)
    return result


@triton.jit
def chunk_scores(
    pid, q, r, w, k, g, uq, uk, A_log, bias, A, L1, A2, L2, decays, read, compare, write, write2, log_decays,
    owner, first, cu, T, PER, HV, scale, number, qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, As, bs, bias_k,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr,
    STRONG: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, UNIT: tl.constexpr,
    MAP: tl.constexpr,
):  # fmt: skip
    """Scores and decayed rows of one chunk of one value head; if ``STRONG``, by levels."""
    hv = pid % HV
    i = pid // HV
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    head = (hv // GROUP).to(tl.int64)
    q += b * qb + bos * qt + head * qh
    k += b * kb + bos * kt + head * kh
    g += b * gb + bos * gt + hv.to(tl.int64) * gh
    lq, lk = load_two_lengths(uq, uk, (b * T + bos) * (HV // GROUP) + head, rows, L, HV // GROUP, UNIT)
    if DPLR:
        r += b * rb + bos * rt + hv.to(tl.int64) * rh
        w += b * wb + bos * wt + hv.to(tl.int64) * wh
    at = i.to(tl.int64) * HV + hv
    if not STRONG:
        least = 0.0
        for ik in range((K + BK - 1) // BK):
            columns = ik * BK + tl.arange(0, BK)
            whole = (
                tl.sum(
                    load_decays(g, rows, gt, columns, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP).to(tl.float32), 0
                )
                * LOG2E
            )
            tl.store(decays + at * K + columns, tl.exp2(whole), mask=columns < K)
            least = tl.minimum(least, tl.min(whole, 0))
        tl.store(log_decays + at, least)
        if least <= -RANGE:
            return
    square = at * (C * C) + t * C + s
    if STRONG:
        written = write
        for writer in range(2 if DPLR else 1):  # one after the other: the compiler takes long for their levels
            qx = tl.zeros((C, C), tl.float32)
            rx = tl.zeros((C, C), tl.float32)
            for ik in range((K + BK - 1) // BK):
                columns = ik * BK + tl.arange(0, BK)
                p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
                keep = (rows < L)[:, None] & (columns < K)[None, :]
                none = tl.zeros((BK,), tl.float32)
                bg = load_decays(g, rows, gt, columns, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP)
                bx = load_writer(writer, k, w, lk, rows, columns, L, kt, wt, K, BK, DPLR, UNIT)
                later = bx * tl.exp2(sum_where(s > t, bg, SPLIT) * LOG2E)
                tl.store(written + p, later.to(written.dtype.element_ty), mask=keep)
                bq = load_keys(q, rows, qt, columns, L, K, BK, lq, UNIT).to(tl.float32)
                qx += level_scores(bq, bx, bg, none, C, False, False, SPLIT, RANGE, DT, PREC)
                br = bx
                if DPLR:
                    br = -load_tile(r, rows, rt, columns, L, K, BK).to(tl.float32)
                rx += level_scores(br, bx, bg, none, C, False, DPLR, SPLIT, RANGE, DT, PREC)
                if writer == 0:
                    left = decay_rows(bq, bg, C, False, False, SPLIT)
                    tl.store(read + p, left.to(read.dtype.element_ty), mask=keep)
                    left = decay_rows(br, bg, C, False, DPLR, SPLIT)
                    tl.store(compare + p, left.to(compare.dtype.element_ty), mask=keep)
            qx = tl.where(s <= t, qx * scale, 0.0)
            rx = tl.where(s < t, rx, 0.0)
            if writer == 0:
                tl.store(A + square, qx.to(A.dtype.element_ty))
                tl.store(L1 + square, rx)
            if DPLR:
                if writer == 1:
                    tl.store(A2 + square, qx.to(A2.dtype.element_ty))
                    tl.store(L2 + square, rx.to(L2.dtype.element_ty))
                written = write2
        return
    qw = tl.zeros((C, C), tl.float32)
    rw = tl.zeros((C, C), tl.float32)
    if DPLR:
        qk = tl.zeros((C, C), tl.float32)
        rk = tl.zeros((C, C), tl.float32)
    for ik in range((K + BK - 1) // BK):
        columns = ik * BK + tl.arange(0, BK)
        p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
        keep = (rows < L)[:, None] & (columns < K)[None, :]
        bg = load_decays(g, rows, gt, columns, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP)
        # Both sides measured from c = G_C / 2. The diagonal of A, where they cancel, is exact to rounding. One operand at
        # a time: registers are what there is least of.
        c = tl.sum(bg.to(tl.float32), 0) * (0.5 * LOG2E)
        G = sum_where(s <= t, bg, SPLIT) * LOG2E - c[None, :]
        half = tl.exp2(c)[None, :]
        if DPLR:
            right = load_keys(k, rows, kt, columns, L, K, BK, lk, UNIT).to(tl.float32) * tl.exp2(-G)
            tl.store(write2 + p, (right * half).to(write2.dtype.element_ty), mask=keep)
            right2 = tl.trans(right.to(DT))
            right = load_tile(w, rows, wt, columns, L, K, BK).to(tl.float32) * tl.exp2(-G)
        else:
            bk = load_keys(k, rows, kt, columns, L, K, BK, lk, UNIT)
            right = bk.to(tl.float32) * tl.exp2(-G)
        tl.store(write + p, (right * half).to(write.dtype.element_ty), mask=keep)
        right = tl.trans(right.to(DT))
        if DPLR:
            Gr = G - bg.to(tl.float32) * LOG2E  # reads before its own gate
            left = -load_tile(r, rows, rt, columns, L, K, BK).to(tl.float32) * tl.exp2(Gr)
        else:
            left = bk.to(tl.float32) * tl.exp2(G)
        tl.store(compare + p, (left * half).to(compare.dtype.element_ty), mask=keep)
        rw = dot_add(left.to(DT), right, rw, PREC)
        if DPLR:
            rk = dot_add(left.to(DT), right2, rk, PREC)
        left = load_keys(q, rows, qt, columns, L, K, BK, lq, UNIT).to(tl.float32) * tl.exp2(G)
        tl.store(read + p, (left * half).to(read.dtype.element_ty), mask=keep)
        qw = dot_add(left.to(DT), right, qw, PREC)
        if DPLR:
            qk = dot_add(left.to(DT), right2, qk, PREC)
    tl.store(A + square, tl.where(s <= t, qw * scale, 0.0).to(A.dtype.element_ty))
    tl.store(L1 + square, tl.where(s < t, rw, 0.0))
    if DPLR:
        tl.store(A2 + square, tl.where(s <= t, qk * scale, 0.0).to(A2.dtype.element_ty))
        tl.store(L2 + square, tl.where(s < t, rk, 0.0).to(L2.dtype.element_ty))


@triton.jit
def least_log_decay(log_decays, pid, COUNT, TILES: tl.constexpr, TURNS: tl.constexpr):
    """Least of the ``log_decays``, every ``TURNS``-th, of all that program ``pid`` has to look at; a chunk has ``TILES``."""
    least = 0.0
    jump = tl.num_programs(0)
    for base in range(pid, COUNT, jump * 64):
        items = base + tl.arange(0, 64) * jump
        found = tl.load(log_decays + items // TILES * TURNS, mask=items < COUNT, other=0.0)
        least = tl.minimum(least, tl.min(found, 0))
    return least


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_vector_scores_fwd(
    q, r, w, k, g, uq, uk, A_log, bias, beta, A, L1, A2, L2, decays, read, compare, write, write2, log_decays,
    owner, first, cu, T, PER, N, HV, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, bb, bt, bh, As, bs, bias_k,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr,
    SCORES: tl.constexpr, STRONG: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr, UNIT: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Scores and decayed rows of chunks. ``STRONG`` programs look for those that decay by ``2^RANGE``; others leave them."""
    pid = tl.program_id(0)
    if STRONG:
        COUNT = items_there(COUNT, first, N, HV, PACKED)
        if least_log_decay(log_decays, pid, COUNT, 1, 1) > -RANGE:
            return
        for item in range(pid, COUNT, tl.num_programs(0)):
            if tl.load(log_decays + item) <= -RANGE:
                chunk_scores(
                    item, q, r, w, k, g, uq, uk, A_log, bias, A, L1, A2, L2, decays, read, compare, write, write2, log_decays,
                    owner, first, cu, T, PER, HV, scale, number,
                    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, As, bs, bias_k,
                    K, C, BK, GROUP, DPLR, PACKED, STRONG, SPLIT, RANGE, PREC, DT, UNIT, MAP
                )  # fmt: skip
    else:
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if tl.load(owner + pid // HV) >= N:
                return
        chunk_scores(
            pid, q, r, w, k, g, uq, uk, A_log, bias, A, L1, A2, L2, decays, read, compare, write, write2, log_decays,
            owner, first, cu, T, PER, HV, scale, number,
            qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, As, bs, bias_k,
            K, C, BK, GROUP, DPLR, PACKED, STRONG, SPLIT, RANGE, PREC, DT, UNIT, MAP
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_vector_rows_fwd(
    q, r, w, k, g, uq, uk, A_log, bias, beta, A, L1, A2, L2, decays, read, compare, write, write2, log_decays,
    owner, first, cu, T, PER, N, HV, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, bb, bt, bh, As, bs, bias_k,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr,
    SCORES: tl.constexpr, STRONG: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr, UNIT: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Decayed rows of every chunk whose scores are known, whatever it decays by."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    head = (hv // GROUP).to(tl.int64)
    q += b * qb + bos * qt + head * qh
    k += b * kb + bos * kt + head * kh
    g += b * gb + bos * gt + hv.to(tl.int64) * gh
    lq, lk = load_two_lengths(uq, uk, (b * T + bos) * (HV // GROUP) + head, rows, L, HV // GROUP, UNIT)
    if DPLR:
        r += b * rb + bos * rt + hv.to(tl.int64) * rh
        w += b * wb + bos * wt + hv.to(tl.int64) * wh
    at = i.to(tl.int64) * HV + hv
    least = 0.0
    for ik in range((K + BK - 1) // BK):
        columns = ik * BK + tl.arange(0, BK)
        p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
        keep = (rows < L)[:, None] & (columns < K)[None, :]
        bg = load_decays(g, rows, gt, columns, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP)
        whole = tl.sum(bg.to(tl.float32), 0) * LOG2E
        tl.store(decays + at * K + columns, tl.exp2(whole), mask=columns < K)
        least = tl.minimum(least, tl.min(whole, 0))
        early = tl.exp2(sum_where(s <= t, bg, SPLIT) * LOG2E)
        later = tl.exp2(sum_where(s > t, bg, SPLIT) * LOG2E)
        left = load_keys(q, rows, qt, columns, L, K, BK, lq, UNIT).to(tl.float32) * early
        tl.store(read + p, left.to(read.dtype.element_ty), mask=keep)
        bk = load_keys(k, rows, kt, columns, L, K, BK, lk, UNIT).to(tl.float32)
        right = (bk * later).to(write.dtype.element_ty)
        if DPLR:
            tl.store(write2 + p, right, mask=keep)
            right = (load_tile(w, rows, wt, columns, L, K, BK).to(tl.float32) * later).to(write.dtype.element_ty)
            bk = -load_tile(r, rows, rt, columns, L, K, BK).to(tl.float32)
            early = tl.exp2(sum_where(s < t, bg, SPLIT) * LOG2E)
        tl.store(write + p, right, mask=keep)
        tl.store(compare + p, (bk * early).to(compare.dtype.element_ty), mask=keep)
    tl.store(log_decays + at, least)


@triton.jit
def level_gradients(
    left, right, g, dA, dAT, C: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of ``left, right, g [C, BK]`` through ``A_ts = Σ_k left_tk right_sk e^{G_tk - G_sk}``, ``s < t``.

    ``dA`` is strictly lower triangular and ``dAT`` its transpose. The levels are those of ``level_scores``.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    dleft = tl.zeros(left.shape, tl.float32)
    dright = tl.zeros(left.shape, tl.float32)
    dg = tl.zeros(left.shape, tl.float32)
    stop = plain_block_half(g, RANGE - 2.0 * excess(dA, RANGE), C, EXCLUSIVE, SPLIT)
    half = C // 2
    while half > stop:
        upper, between, pairs = level_masks(half, C, EXCLUSIVE)
        e = tl.exp2(sum_where(between, g, SPLIT) * LOG2E)
        W = tl.where(pairs, dA, 0.0) + tl.where(level_pairs_transposed(half, C), dAT, 0.0)
        X = tl.where(upper, left, right) * e
        Z = dot(W.to(DT), X.to(DT), PREC)
        leaning = upper_gates_transposed(half, C, EXCLUSIVE) | lower_gates_transposed(half, C)
        dg += sum_where(leaning, X * Z, SPLIT)
        Z = Z * e
        dleft += tl.where(upper, Z, 0.0)
        dright += tl.where(upper, 0.0, Z)
        half = half // 2
    if stop > 0:
        Gq, G = block_decays(g, stop, C, EXCLUSIVE, SPLIT)
        near = (t ^ s) < 2 * stop
        eq = tl.exp2(Gq)
        ek = tl.exp2(-G)
        Z = eq * dot(tl.where(near, dA, 0.0).to(DT), (right * ek).to(DT), PREC)
        Y = ek * dot(tl.where(near, dAT, 0.0).to(DT), (left * eq).to(DT), PREC)
        dleft += Z
        dright += Y
        Z = Z * left
        Y = Y * right
        if EXCLUSIVE:
            dg += sum_where(near & (s > t), Z - Y, SPLIT) - Y
        else:
            dg += sum_where(near & (s >= t), Z - Y, SPLIT)
    return dleft, dright, dg


@triton.jit
def load_score_gradient(p, C: tl.constexpr):
    """Three parts of a gradient of scores: what is below its diagonal, the transpose of that, and its diagonal."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    d = tl.load(p + t * C + s).to(tl.float32)
    transposed = tl.load(p + s * C + t).to(tl.float32)
    return tl.where(s < t, d, 0.0), tl.where(t < s, transposed, 0.0), tl.sum(tl.where(s == t, d, 0.0), 1)[:, None]


@triton.jit
def chunk_gradients(
    pid, q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates, dq, dr, dw, dk,
    dg, parts, owner, first, cu, T, PER, HV, TURN, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    TURNS: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr, STRONG: tl.constexpr,
    SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, UNIT: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Gradients ``dq, dk, dg [C, BK]`` of one chunk and, for ``dplr``, ``dr, dw``; if ``STRONG``, by levels."""
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = pid % NK
    heads = HV // TURNS
    hv = pid // NK % heads * TURNS + TURN
    i = pid // (NK * heads)
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_k = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    g += b * gb + bos * gt + hv.to(tl.int64) * gh
    lq, lk = load_two_lengths(uq, uk, (b * T + bos) * (HV // GROUP) + hv // GROUP, rows, L, HV // GROUP, UNIT)
    do += b * ob + bos * ot + hv.to(tl.int64) * oh
    here = i.to(tl.int64) * HV + hv
    if parts is not None:
        parts += (here + i.to(tl.int64) * HV) * K
    dA += here * (C * C)
    dL += here * (C * C)
    if DPLR:
        r += b * rb + bos * rt + hv.to(tl.int64) * rh
        w += b * wb + bos * wt + hv.to(tl.int64) * wh
        v += b * vb + bos * vt + hv.to(tl.int64) * vh
        dA2 += here * (C * C)
        dL2 += here * (C * C)
    states += here * (K * V)
    dstates += here * (K * V)
    errors += ((b * T + bos) * HV + hv) * V
    adjoint += ((b * T + bos) * HV + hv) * V
    at = (b * T + bos + rows) * HV + hv
    in_k = (rows < L)[:, None] & (columns_k < K)[None, :]
    at_k = at[:, None] * K + columns_k[None, :]
    summed = ((b * T + bos + rows) * heads + hv // TURNS)[:, None] * K + columns_k[None, :]
    if BETA > 0:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    bg = load_decays(g, rows, gt, columns_k, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP)
    c = tl.sum(bg.to(tl.float32), 0) * (0.5 * LOG2E)
    square = t * C + s

    if STRONG:
        acc, bdr, wrote, overlap = state_products(
            do, ot, beta, bt, errors, adjoint, HV * V, states, dstates, rows, columns_k, L, K, V, C, BK, BV, BETA, True, PREC,
            DT
        )  # fmt: skip
        bq = load_keys(q, rows, qt, columns_k, L, K, BK, lq, UNIT).to(tl.float32)
        acc = acc * scale * tl.exp2(sum_where(s <= t, bg, SPLIT) * LOG2E)
        bdg = sum_where(s >= t, bq * acc, SPLIT) + (overlap * tl.exp2(2.0 * c))[None, :]
        if DPLR:
            br = -load_tile(r, rows, rt, columns_k, L, K, BK).to(tl.float32)
            bdr = -bdr * tl.exp2(sum_where(s < t, bg, SPLIT) * LOG2E)
            bdg += sum_where(s > t, br * bdr, SPLIT)
        else:
            br = load_keys(k, rows, kt, columns_k, L, K, BK, lk, UNIT).to(tl.float32)
            bdr = -bdr * tl.exp2(sum_where(s <= t, bg, SPLIT) * LOG2E)
            bdg += sum_where(s >= t, br * bdr, SPLIT)
        bdw = wrote
        for writer in range(2 if DPLR else 1):  # one after the other: the compiler takes long for their levels
            bw = load_writer(writer, k, w, lk, rows, columns_k, L, kt, wt, K, BK, DPLR, UNIT)
            bdw = wrote * tl.exp2(sum_where(s > t, bg, SPLIT) * LOG2E)
            bdg += sum_where(s < t, bw * bdw, SPLIT)
            below, above, own = load_score_gradient(dA, C)
            dleft, dright, more = level_gradients(bq, bw, bg, below, above, C, False, SPLIT, RANGE, DT, PREC)
            acc += dleft + own * bw
            bdw += dright + own * bq
            bdg += more
            below, above, own = load_score_gradient(dL, C)
            dleft, dright, more = level_gradients(br, bw, bg, below, above, C, DPLR, SPLIT, RANGE, DT, PREC)
            bdr += dleft
            bdw += dright
            bdg += more
            if DPLR:
                if writer == 0:
                    tl.store(dw + at_k, bdw.to(dw.dtype.element_ty), mask=in_k)
                    wrote, overlap = state_product(
                        v, vt, beta, bt, dstates, states, rows, columns_k, L, K, V, C, BK, BV, 0, False, PREC, DT
                    )
                dA, dL = dA2, dL2
        accumulate(dq + summed, acc, in_k, TURN, TURNS)
        if DPLR:
            tl.store(dr + at_k, (-bdr).to(dr.dtype.element_ty), mask=in_k)
            accumulate(dk + summed, bdw, in_k, TURN, TURNS)
        else:
            accumulate(dk + summed, bdr + bdw, in_k, TURN, TURNS)
        store_gate_gradient(
            dg, at_k, bdg, parts, HV * K, g, rows, gt, columns_k, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP
        )  # fmt: skip
    else:
        # Both sides measured from c = G_C / 2: the scores' part and the state's share their factors. For dg, what a pair gives
        # to its two tokens must cancel for gates outside: so both sides as they were rounded for the products. One gradient
        # after the other: registers are what there is least of.
        half = tl.exp2(c)[None, :]
        G = sum_where(s <= t, bg, SPLIT) * LOG2E - c[None, :]
        if DPLR:
            right = load_tile(w, rows, wt, columns_k, L, K, BK).to(tl.float32)
            right2 = to_operand(load_keys(k, rows, kt, columns_k, L, K, BK, lk, UNIT).to(tl.float32) * tl.exp2(-G), DT, PREC)
        else:
            right = load_keys(k, rows, kt, columns_k, L, K, BK, lk, UNIT).to(tl.float32)
        right = to_operand(right * tl.exp2(-G), DT, PREC)

        acc, overlap = state_product(do, ot, beta, bt, states, dstates, rows, columns_k, L, K, V, C, BK, BV, 0, False, PREC, DT)
        acc = dot_add(tl.load(dA + square), right, acc * (scale * half), PREC)
        if DPLR:
            acc = dot_add(tl.load(dA2 + square), right2, acc, PREC)
        reads = to_operand(load_keys(q, rows, qt, columns_k, L, K, BK, lq, UNIT).to(tl.float32) * tl.exp2(G), DT, PREC)
        bdg = reads.to(tl.float32) * acc
        accumulate(dq + summed, acc * tl.exp2(G), in_k, TURN, TURNS)

        bdr, overlap = state_product(
            adjoint, HV * V, beta, bt, states, dstates, rows, columns_k, L, K, V, C, BK, BV, BETA, False, PREC, DT
        )  # fmt: skip
        bdr = dot_add(to_operand(tl.load(dL + square), DT, PREC), right, bdr * -half, PREC)
        if DPLR:
            bdr = dot_add(to_operand(tl.load(dL2 + square), DT, PREC), right2, bdr, PREC)
            Gr = G - bg.to(tl.float32) * LOG2E  # reads before its own gate
            left = to_operand(-load_tile(r, rows, rt, columns_k, L, K, BK).to(tl.float32) * tl.exp2(Gr), DT, PREC)
            behind = left.to(tl.float32) * bdr
            tl.store(dr + at_k, (-bdr * tl.exp2(Gr)).to(dr.dtype.element_ty), mask=in_k)
        else:
            left = to_operand(load_keys(k, rows, kt, columns_k, L, K, BK, lk, UNIT).to(tl.float32) * tl.exp2(G), DT, PREC)
            bdg += left.to(tl.float32) * bdr
            bdr = bdr * tl.exp2(G)

        wrote, overlap = state_product(
            errors, HV * V, beta, bt, dstates, states, rows, columns_k, L, K, V, C, BK, BV, BETA, True, PREC, DT
        )  # fmt: skip
        wrote = wrote * half
        through = tl.sum(right.to(tl.float32) * wrote, 0) + overlap * tl.exp2(2.0 * c)
        wrote = dot_add(tl.trans(tl.load(dA + square)), reads, wrote, PREC)
        wrote = dot_add(tl.trans(to_operand(tl.load(dL + square), DT, PREC)), left, wrote, PREC)
        bdg -= right.to(tl.float32) * wrote
        bdw = wrote * tl.exp2(-G)
        if DPLR:
            tl.store(dw + at_k, bdw.to(dw.dtype.element_ty), mask=in_k)
            wrote, overlap = state_product(
                v, vt, beta, bt, dstates, states, rows, columns_k, L, K, V, C, BK, BV, 0, False, PREC, DT
            )
            wrote = wrote * half
            through += tl.sum(right2.to(tl.float32) * wrote, 0)
            wrote = dot_add(tl.trans(tl.load(dA2 + square)), reads, wrote, PREC)
            wrote = dot_add(tl.trans(to_operand(tl.load(dL2 + square), DT, PREC)), left, wrote, PREC)
            bdg -= right2.to(tl.float32) * wrote
            accumulate(dk + summed, wrote * tl.exp2(-G), in_k, TURN, TURNS)
        else:
            accumulate(dk + summed, bdr + bdw, in_k, TURN, TURNS)
        bdg = sum_where(s >= t, bdg, SPLIT) + through[None, :]
        if DPLR:
            bdg += sum_where(s > t, behind, SPLIT)
        store_gate_gradient(
            dg, at_k, bdg, parts, HV * K, g, rows, gt, columns_k, L, K, BK, A_log, bias, hv, As, bs, bias_k, number, MAP
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "COUNT"])
def delta_vector_gradients_bwd(
    q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates, dq, dr, dw, dk, dv,
    dg, parts, dbeta, log_decays, owner, first, cu, T, PER, N, HV, TURN, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    TURNS: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr, STRONG: tl.constexpr,
    SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, UNIT: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Gradients of every tile. ``STRONG`` programs look for chunks that decay by ``2^RANGE``; the others leave those.

    Where ``TURNS`` value heads share ``dq, dk``, they take turns: this is the ``TURN``-th of each.
    """
    pid = tl.program_id(0)
    NK: tl.constexpr = (K + BK - 1) // BK
    log_decays += TURN
    if STRONG:
        COUNT = items_there(COUNT, first, N, NK * (HV // TURNS), PACKED)
        if least_log_decay(log_decays, pid, COUNT, NK, TURNS) > -RANGE:
            return
        for item in range(pid, COUNT, tl.num_programs(0)):
            if tl.load(log_decays + item // NK * TURNS) <= -RANGE:
                chunk_gradients(
                    item, q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates,
                    dq, dr, dw, dk, dg, parts, owner, first, cu, T, PER, HV, TURN, scale, number,
                    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh,
                    As, bs, bias_k,
                    K, V, C, BK, BV, GROUP, TURNS, BETA, DPLR, PACKED, STRONG, SPLIT, RANGE, PREC, DT, UNIT, MAP
                )  # fmt: skip
    else:
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if tl.load(owner + pid // (NK * (HV // TURNS))) >= N:
                return
        if tl.load(log_decays + pid // NK * TURNS) <= -RANGE:
            return
        chunk_gradients(
            pid, q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates,
            dq, dr, dw, dk, dg, parts, owner, first, cu, T, PER, HV, TURN, scale, number,
            qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
            K, V, C, BK, BV, GROUP, TURNS, BETA, DPLR, PACKED, STRONG, SPLIT, RANGE, PREC, DT, UNIT, MAP
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def delta_vector_values_bwd(
    do, adjoint, A2, L2, write2, dstates, dv, owner, first, cu, T, PER, N, HV, ob, ot, oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """The gradient ``dv = A'ᵀ do - L'ᵀ y + (k ∘ e^{G_C - G}) dS'`` of ``dplr``, one chunk and ``BV`` channels."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_v = iv * BV + tl.arange(0, BV)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    here = i.to(tl.int64) * HV + hv
    head = (b * T + bos) * HV + hv
    square = here * (C * C) + s * C + t
    bdo = load_tile(do + b * ob + bos * ot + hv.to(tl.int64) * oh, rows, ot, columns_v, L, V, BV)
    by = load_tile(adjoint + head * V, rows, HV * V, columns_v, L, V, BV)
    acc = dot(tl.load(A2 + square), bdo.to(DT), PREC)
    acc -= dot(tl.load(L2 + square).to(DT), by, PREC)
    for ik in range((K + BK - 1) // BK):
        columns_k = ik * BK + tl.arange(0, BK)
        bw = load_tile(write2 + head * K, rows, HV * K, columns_k, L, K, BK)
        tile = here * (K * V) + columns_v[:, None] * K + columns_k[None, :]
        bdS = tl.load(dstates + tile, mask=(columns_v < V)[:, None] & (columns_k < K)[None, :], other=0.0)
        acc = dot_add(bw.to(DT), tl.trans(bdS), acc, PREC)
    at_v = (head + rows * HV)[:, None] * V + columns_v[None, :]
    tl.store(dv + at_v, acc.to(dv.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])
