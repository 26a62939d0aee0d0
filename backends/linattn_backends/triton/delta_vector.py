"""Chunk kernels of the delta families with a decay per key channel: ``kda``, and ``dplr``.

As in :mod:`.delta_kernels`, which walks the chunks. Both are one recurrence of *readers* ``q, r`` and *writers* ``w``::

    kda     r = k            writes  x with k
    dplr    r = -a           writes  w with b, and v with k         (r reads before the token's own gate: ``EXCLUSIVE``)

    scores  A_ts = scale Σ_k q_t w_s e^{G_t - G_s}, s ≤ t           L_ts = Σ_k r_t w_s e^{G_t - G_s}, s < t
            A' and L' likewise with the second writer               e = -L' v - (r ∘ e^G) S - L e  for dplr

``prepare`` makes the scores and ``M``, and the decayed rows that the walk takes: ``q ∘ e^G``, ``r ∘ e^G``,
``w ∘ e^{G_C - G}``. ``gradients`` goes the other way. A relation of a reader and a writer contributes
``d reader = dA (w e^{-G}) e^G``, ``d writer = dAᵀ (r e^G) e^{-G}``, by the products or levels of its scores: every exponent
is a sum of gates, and ``dg_j`` sums over the pairs ``s < j ≤ t`` without cancellation where that matters.
"""

import triton
import triton.language as tl

from .delta_kernels import solved, strength
from .kernels import levels_mask_transposed, sequence_of, strongest
from .tiles import BLOCK, LOG2E, block_sums, blocks, levels_mask, load_gate, load_tile, product, times, total, vector_scores

__all__ = ["gradients", "prepare", "values"]


@triton.jit
def prepare_of(
    pid, q, r, w, k, g, beta, A, M, A2, L2, rates, read, compare, write, write2, ranges,
    owner, first, cu, T, PER, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr,
    PACKED: tl.constexpr, SLOW: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head."""
    hv = pid % HV
    i = pid // HV
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    head = (hv // GROUP).to(tl.int64)
    q += b * qb + bos * qt + head * qh
    k += b * kb + bos * kt + head * kh
    g += b * gb + bos * gt + hv.to(tl.int64) * gh
    if DPLR:
        r += b * rb + bos * rt + hv.to(tl.int64) * rh
        w += b * wb + bos * wt + hv.to(tl.int64) * wh
    at = i.to(tl.int64) * HV + hv
    if not SLOW:
        least = 0.0
        for ik in range((K + BK - 1) // BK):
            columns = ik * BK + tl.arange(0, BK)
            whole = tl.sum(load_gate(g, rows, gt, columns, L, K, BK).to(tl.float32), 0) * LOG2E
            tl.store(rates + at * K + columns, tl.exp2(whole), mask=columns < K)
            least = tl.minimum(least, tl.min(whole, 0))
        tl.store(ranges + at, least)
        if least <= -RANGE:
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
        bg = load_gate(g, rows, gt, columns, L, K, BK)
        bq = load_tile(q, rows, qt, columns, L, K, BK)
        bk = load_tile(k, rows, kt, columns, L, K, BK)
        none = tl.zeros((BK,), tl.float32)
        later = tl.exp2(total(s > t, bg, SPLIT) * LOG2E)
        if DPLR:
            br = -load_tile(r, rows, rt, columns, L, K, BK).to(tl.float32)
            bw = load_tile(w, rows, wt, columns, L, K, BK)
            more, left = vector_scores(bq, bk, bg, none, C, False, False, SPLIT, SLOW, RANGE, DT, PREC)
            qk += more
            more, left = vector_scores(br, bk, bg, none, C, False, True, SPLIT, SLOW, RANGE, DT, PREC)
            rk += more
            tl.store(write2 + p, (bk.to(tl.float32) * later).to(write2.dtype.element_ty), mask=keep)
        else:
            br = bk
            bw = bk
        more, left = vector_scores(bq, bw, bg, none, C, False, False, SPLIT, SLOW, RANGE, DT, PREC)
        qw += more
        tl.store(read + p, left.to(read.dtype.element_ty), mask=keep)
        more, left = vector_scores(br, bw, bg, none, C, False, DPLR, SPLIT, SLOW, RANGE, DT, PREC)
        rw += more
        tl.store(compare + p, left.to(compare.dtype.element_ty), mask=keep)
        tl.store(write + p, (bw.to(tl.float32) * later).to(write.dtype.element_ty), mask=keep)
    square = at * (C * C) + t * C + s
    tl.store(A + square, (qw * scale).to(A.dtype.element_ty))
    if DPLR:
        tl.store(A2 + square, (qk * scale).to(A2.dtype.element_ty))
        tl.store(L2 + square, tl.where(s < t, rk, 0.0).to(L2.dtype.element_ty))
    rw = tl.where(s < t, rw, 0.0)
    if BETA < 2:
        if BETA == 1:
            p = beta + b * bb + (bos + rows) * bt + hv.to(tl.int64) * bh
            bbeta = tl.load(p, mask=rows < L, other=0.0).to(tl.float32)
        else:
            bbeta = tl.full((C,), 1.0, tl.float32)
        rw = solved(rw, bbeta, C, PREC)
    tl.store(M + square, rw.to(M.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def prepare(
    q, r, w, k, g, beta, A, M, A2, L2, rates, read, compare, write, write2, ranges,
    owner, first, cu, T, PER, N, HV, COUNT, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr,
    PACKED: tl.constexpr, SLOW: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``prepare_of`` for every chunk. ``SLOW`` programs look for those that decay by ``2^RANGE``; the others leave them."""
    pid = tl.program_id(0)
    if SLOW:
        if strongest(ranges, pid, COUNT, 1, 1) > -RANGE:
            return
        for item in range(pid, COUNT, tl.num_programs(0)):
            wanted = tl.load(ranges + item) <= -RANGE
            if PACKED:
                wanted = wanted & (tl.load(owner + item // HV) < N)
            if wanted:
                prepare_of(
                    item, q, r, w, k, g, beta, A, M, A2, L2, rates, read, compare, write, write2, ranges, owner, first, cu, T,
                    PER, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh,
                    K, C, BK, GROUP, BETA, DPLR, PACKED, SLOW, SPLIT, RANGE, PREC, DT
                )  # fmt: skip
    else:
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if tl.load(owner + pid // HV) >= N:
                return
        prepare_of(
            pid, q, r, w, k, g, beta, A, M, A2, L2, rates, read, compare, write, write2, ranges, owner, first, cu, T,
            PER, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh,
            K, C, BK, GROUP, BETA, DPLR, PACKED, SLOW, SPLIT, RANGE, PREC, DT
        )  # fmt: skip


@triton.jit
def pair_gradients(
    left, right, g, dA, dAT, C: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, SLOW: tl.constexpr,
    RANGE: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of ``left, right, g [C, BK]`` through ``A_ts = Σ_k left_tk right_sk e^{G_tk - G_sk}``, ``s < t``.

    ``dA`` is strictly lower triangular and ``dAT`` its transpose. The paths are those of ``vector_scores``.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    if not SLOW:
        c = tl.sum(g.to(tl.float32), 0) * (0.5 * LOG2E)
        if EXCLUSIVE:
            Gq = total(s < t, g, SPLIT) * LOG2E - c[None, :]
            G = Gq + g.to(tl.float32) * LOG2E
        else:
            Gq = total(s <= t, g, SPLIT) * LOG2E - c[None, :]
            G = Gq
        eq = tl.exp2(Gq)
        ek = tl.exp2(-G)
        dleft = eq * times(dA.to(DT), (right * ek).to(DT), PREC)
        dright = ek * times(dAT.to(DT), (left * eq).to(DT), PREC)
        lean = left * dleft - right * dright
        if EXCLUSIVE:
            dg = total(s > t, lean, SPLIT) - right * dright
        else:
            dg = total(s >= t, lean, SPLIT)
    else:
        dleft = tl.zeros(left.shape, tl.float32)
        dright = tl.zeros(left.shape, tl.float32)
        dg = tl.zeros(left.shape, tl.float32)
        stop, c = blocks(g, C, SPLIT, RANGE)
        half = C // 2
        while half > stop:
            upper, between, pairs = levels_mask(half, C, EXCLUSIVE)
            e = tl.exp2(total(between, g, SPLIT) * LOG2E)
            W = tl.where(pairs, dA, 0.0)
            W += tl.where(((t ^ s) < 2 * half) & (upper == 0) & ((s & half) != 0), dAT, 0.0)
            X = tl.where(upper, left, right) * e
            Z = times(W.to(DT), X.to(DT), PREC)
            dg += total(levels_mask_transposed(half, C, EXCLUSIVE), X * Z, SPLIT)
            Z = Z * e
            dleft += tl.where(upper, Z, 0.0)
            dright += tl.where(upper, 0.0, Z)
            half = half // 2
        if stop > 0:
            Gq, G = block_sums(g, c, C, EXCLUSIVE, SPLIT)
            eq = tl.exp2(Gq)
            ek = tl.exp2(-G)
            near = (t ^ s) < BLOCK
            Z = eq * times(tl.where(near, dA, 0.0).to(DT), (right * ek).to(DT), PREC)
            Y = ek * times(tl.where(near, dAT, 0.0).to(DT), (left * eq).to(DT), PREC)
            dleft += Z
            dright += Y
            Z = Z * left
            Y = Y * right
            if EXCLUSIVE:
                dg += total(near & (s > t), Z - Y, SPLIT) - Y
            else:
                dg += total(near & (s >= t), Z - Y, SPLIT)
    return dleft, dright, dg


@triton.jit
def facing(
    a, at, c, ct, b, bt, d, dt, states, other, rows, columns_k, L, V: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BETA_A: tl.constexpr, BETA_B: tl.constexpr, MEET: tl.constexpr, PREC: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """``x yᵀ [C, C]``, ``x Sᵀ [C, BK]`` and, if ``MEET``, ``Σ_v S ∘ S2``: ``x = a`` or ``c ∘ a``, ``y = b`` or ``d ∘ b``."""
    R = tl.zeros((C, C), tl.float32)
    X = tl.zeros((C, BK), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        x = load_tile(a, rows, at, columns_v, L, V, BV)
        y = load_tile(b, rows, bt, columns_v, L, V, BV)
        if BETA_A > 0:
            x = (x.to(tl.float32) * strength(c, rows, ct, columns_v, L, V, BV, BETA_A)).to(ST)
        if BETA_B > 0:
            y = (y.to(tl.float32) * strength(d, rows, dt, columns_v, L, V, BV, BETA_B)).to(ST)
        tile = columns_k[:, None] * V + columns_v[None, :]
        inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
        bS = tl.load(states + tile, mask=inside, other=0.0)
        R = product(x.to(ST), tl.trans(y.to(ST)), R, PREC)
        X = product(x.to(ST), tl.trans(bS), X, PREC)
        if MEET:
            met += tl.sum(bS.to(tl.float32) * tl.load(other + tile, mask=inside, other=0.0).to(tl.float32), 1)
    return R, X, met


@triton.jit
def gradients_of(
    pid, q, r, w, k, v, do, beta, g, errors, adjoint, kept, dkept, dq, dr, dw, dk, dv, dbeta, dg,
    owner, first, cu, T, PER, HV, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    BETA: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr, SLOW: tl.constexpr, SPLIT: tl.constexpr,
    RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk, dg [C, BK]``, and of ``dv, dbeta`` (``kda``) or ``dr, dw`` (``dplr``)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_k = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    g += b * gb + bos * gt + hv.to(tl.int64) * gh
    do += b * ob + bos * ot + hv.to(tl.int64) * oh
    if BETA > 0:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    if DPLR:
        r += b * rb + bos * rt + hv.to(tl.int64) * rh
        w += b * wb + bos * wt + hv.to(tl.int64) * wh
        v += b * vb + bos * vt + hv.to(tl.int64) * vh
    here = i.to(tl.int64) * HV + hv
    kept += here * (K * V)
    dkept += here * (K * V)
    errors += ((b * T + bos) * HV + hv) * V
    adjoint += ((b * T + bos) * HV + hv) * V
    et = HV * V
    at = (b * T + bos + rows) * HV + hv
    in_k = (rows < L)[:, None] & (columns_k < K)[None, :]
    at_k = at[:, None] * K + columns_k[None, :]

    # q and the first writer: dA [C, C], its transpose, dq and dw [C, BK].
    dA, bdq, met = facing(
        do, ot, beta, bt, errors, et, beta, bt, kept, dkept, rows, columns_k, L, V, C, K, BK, BV, 0, BETA, True, PREC, ST
    )  # fmt: skip
    dAT, bdw, _ = facing(
        errors, et, beta, bt, do, ot, beta, bt, dkept, kept, rows, columns_k, L, V, C, K, BK, BV, BETA, 0, False, PREC, ST
    )  # fmt: skip
    bg = load_gate(g, rows, gt, columns_k, L, K, BK)
    bq = load_tile(q, rows, qt, columns_k, L, K, BK).to(tl.float32)
    if DPLR:
        bw = load_tile(w, rows, wt, columns_k, L, K, BK).to(tl.float32)
    else:
        bw = load_tile(k, rows, kt, columns_k, L, K, BK).to(tl.float32)
    later = tl.exp2(total(s > t, bg, SPLIT) * LOG2E)
    bdq = bdq * scale * tl.exp2(total(s <= t, bg, SPLIT) * LOG2E)
    bdw = bdw * later
    wrote = bw * bdw
    bdg = total(s >= t, bq * bdq, SPLIT) + (met * tl.exp2(tl.sum(bg.to(tl.float32), 0) * LOG2E))[None, :]
    own = tl.sum(tl.where(t == s, dA, 0.0), 1)[:, None] * scale
    dA = tl.where(s < t, dA * scale, 0.0)
    dAT = tl.where(t < s, dAT * scale, 0.0)
    dleft, dright, more = pair_gradients(bq, bw, bg, dA, dAT, C, False, SPLIT, SLOW, RANGE, DT, PREC)
    bdq += dleft + own * bw
    bdw += dright + own * bq
    bdg += more
    if DPLR:  # q and the second writer
        dA, _, _ = facing(
            do, ot, beta, bt, v, vt, beta, bt, kept, kept, rows, columns_k, L, V, C, K, BK, BV, 0, 0, False, PREC, ST
        )  # fmt: skip
        dAT, bdk, _ = facing(
            v, vt, beta, bt, do, ot, beta, bt, dkept, kept, rows, columns_k, L, V, C, K, BK, BV, 0, 0, False, PREC, ST
        )  # fmt: skip
        bk = load_tile(k, rows, kt, columns_k, L, K, BK).to(tl.float32)
        bdk = bdk * later
        wrote += bk * bdk
        own = tl.sum(tl.where(t == s, dA, 0.0), 1)[:, None] * scale
        dA = tl.where(s < t, dA * scale, 0.0)
        dAT = tl.where(t < s, dAT * scale, 0.0)
        dleft, dright, more = pair_gradients(bq, bk, bg, dA, dAT, C, False, SPLIT, SLOW, RANGE, DT, PREC)
        bdq += dleft + own * bk
        bdk += dright + own * bq
        bdg += more
    tl.store(dq + at_k, bdq.to(dq.dtype.element_ty), mask=in_k)
    bdg += total(s < t, wrote, SPLIT)

    # The other reader and the first writer: dL, its transpose, dr and the rest of dw.
    dA, bdr, _ = facing(
        adjoint, et, beta, bt, errors, et, beta, bt, kept, kept, rows, columns_k, L, V, C, K, BK, BV, BETA, BETA, False,
        PREC, ST
    )  # fmt: skip
    dAT, _, _ = facing(
        errors, et, beta, bt, adjoint, et, beta, bt, kept, kept, rows, columns_k, L, V, C, K, BK, BV, BETA, BETA, False,
        PREC, ST
    )  # fmt: skip
    if DPLR:
        br = -load_tile(r, rows, rt, columns_k, L, K, BK).to(tl.float32)
        bdr = -bdr * tl.exp2(total(s < t, bg, SPLIT) * LOG2E)
        bdg += total(s > t, br * bdr, SPLIT)
    else:
        br = bw
        bdr = -bdr * tl.exp2(total(s <= t, bg, SPLIT) * LOG2E)
        bdg += total(s >= t, br * bdr, SPLIT)
    dA = tl.where(s < t, -dA, 0.0)
    dAT = tl.where(t < s, -dAT, 0.0)
    dleft, dright, more = pair_gradients(br, bw, bg, dA, dAT, C, DPLR, SPLIT, SLOW, RANGE, DT, PREC)
    bdr += dleft
    bdw += dright
    bdg += more
    if DPLR:  # the other reader and the second writer
        dA, _, _ = facing(
            adjoint, et, beta, bt, v, vt, beta, bt, kept, kept, rows, columns_k, L, V, C, K, BK, BV, 0, 0, False, PREC, ST
        )  # fmt: skip
        dAT, _, _ = facing(
            v, vt, beta, bt, adjoint, et, beta, bt, kept, kept, rows, columns_k, L, V, C, K, BK, BV, 0, 0, False, PREC, ST
        )  # fmt: skip
        dA = tl.where(s < t, -dA, 0.0)
        dAT = tl.where(t < s, -dAT, 0.0)
        dleft, dright, more = pair_gradients(br, bk, bg, dA, dAT, C, DPLR, SPLIT, SLOW, RANGE, DT, PREC)
        bdr += dleft
        bdk += dright
        bdg += more
        tl.store(dr + at_k, (-bdr).to(dr.dtype.element_ty), mask=in_k)
        tl.store(dw + at_k, bdw.to(dw.dtype.element_ty), mask=in_k)
        tl.store(dk + at_k, bdk.to(dk.dtype.element_ty), mask=in_k)
    else:
        tl.store(dk + at_k, (bdr + bdw).to(dk.dtype.element_ty), mask=in_k)
        if ik == 0:
            share = tl.zeros((C,), tl.float32)
            for iv in range((V + BV - 1) // BV):
                columns_v = iv * BV + tl.arange(0, BV)
                at_v = at[:, None] * V + columns_v[None, :]
                in_v = (rows < L)[:, None] & (columns_v < V)[None, :]
                bbeta = strength(beta, rows, bt, columns_v, L, V, BV, BETA)
                e = load_tile(errors, rows, et, columns_v, L, V, BV).to(tl.float32)
                y = load_tile(adjoint, rows, et, columns_v, L, V, BV).to(tl.float32)
                tl.store(dv + at_v, (y * bbeta).to(dv.dtype.element_ty), mask=in_v)
                if BETA == 2:
                    tl.store(dbeta + at_v, (y * e).to(dbeta.dtype.element_ty), mask=in_v)
                else:
                    share += tl.sum(y * e, 1)
            if BETA == 1:
                tl.store(dbeta + at, share.to(dbeta.dtype.element_ty), mask=rows < L)
    tl.store(dg + at_k, bdg.to(dg.dtype.element_ty), mask=in_k)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def gradients(
    q, r, w, k, v, do, beta, g, errors, adjoint, kept, dkept, dq, dr, dw, dk, dv, dbeta, dg, ranges,
    owner, first, cu, T, PER, N, HV, COUNT, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    BETA: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr, SLOW: tl.constexpr, SPLIT: tl.constexpr,
    RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """``gradients_of`` for every tile. ``SLOW`` programs look for chunks that decay by ``2^RANGE``; the others leave those."""
    pid = tl.program_id(0)
    NK: tl.constexpr = (K + BK - 1) // BK
    if SLOW:
        if strongest(ranges, pid, COUNT, 1, NK) > -RANGE:
            return
        for item in range(pid, COUNT, tl.num_programs(0)):
            wanted = tl.load(ranges + item // NK) <= -RANGE
            if PACKED:
                wanted = wanted & (tl.load(owner + item // (NK * HV)) < N)
            if wanted:
                gradients_of(
                    item, q, r, w, k, v, do, beta, g, errors, adjoint, kept, dkept, dq, dr, dw, dk, dv, dbeta, dg, owner, first,
                    cu, T, PER, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh, vb, vt, vh,
                    ob, ot, oh, K, V, C, BK, BV, GROUP, BETA, DPLR, PACKED, SLOW, SPLIT, RANGE, PREC, DT, ST
                )  # fmt: skip
    else:
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if tl.load(owner + pid // (NK * HV)) >= N:
                return
        if tl.load(ranges + pid // NK) <= -RANGE:
            return
        gradients_of(
            pid, q, r, w, k, v, do, beta, g, errors, adjoint, kept, dkept, dq, dr, dw, dk, dv, dbeta, dg, owner, first,
            cu, T, PER, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh, rb, rt, rh, wb, wt, wh, vb, vt, vh,
            ob, ot, oh, K, V, C, BK, BV, GROUP, BETA, DPLR, PACKED, SLOW, SPLIT, RANGE, PREC, DT, ST
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def values(
    do, adjoint, A2, L2, write2, dkept, dv, owner, first, cu, T, PER, N, HV, ob, ot, oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """``dv = A'ᵀ do - L'ᵀ y + (k ∘ e^{G_C - G}) dS'`` of ``dplr``, one chunk and ``BV`` channels."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_v = iv * BV + tl.arange(0, BV)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    here = i.to(tl.int64) * HV + hv
    head = (b * T + bos) * HV + hv
    square = here * (C * C) + s * C + t
    bdo = load_tile(do + b * ob + bos * ot + hv.to(tl.int64) * oh, rows, ot, columns_v, L, V, BV)
    by = load_tile(adjoint + head * V, rows, HV * V, columns_v, L, V, BV)
    acc = times(tl.load(A2 + square), bdo.to(DT), PREC)
    acc -= times(tl.load(L2 + square).to(ST), by, PREC)
    for ik in range((K + BK - 1) // BK):
        columns_k = ik * BK + tl.arange(0, BK)
        bw = load_tile(write2 + head * K, rows, HV * K, columns_k, L, K, BK)
        tile = here * (K * V) + columns_k[:, None] * V + columns_v[None, :]
        bdS = tl.load(dkept + tile, mask=(columns_k < K)[:, None] & (columns_v < V)[None, :], other=0.0)
        acc = product(bw.to(ST), bdS, acc, PREC)
    at_v = (head + rows * HV)[:, None] * V + columns_v[None, :]
    tl.store(dv + at_v, acc.to(dv.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])
