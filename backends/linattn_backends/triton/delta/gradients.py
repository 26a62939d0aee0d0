"""Gradients of operands and gates, chunk by chunk, from the states before and the state gradients after each chunk.

With ``x = beta ∘ e`` what a token writes, ``y`` its adjoint and ``dv = beta ∘ y`` (:mod:`.state`), and, for at most a scalar
gate, ``D_ts = e^{G_t - G_s}``::

    scores     dA = scale do xᵀ, s ≤ t                                dL = -dv xᵀ, s < t
    queries    dq = scale e^G ∘ (do Sᵀ) + (dA ∘ D) k
    keys       dk = -e^G ∘ (dv Sᵀ) + e^{G_C - G} ∘ (x dS'ᵀ) + (dA ∘ D)ᵀ q + (dL ∘ D) k + (dL ∘ D)ᵀ k
    beta       dbeta = Σ_v y ∘ e
    gate       dg_j sums what crosses token j: scores of pairs s < j ≤ t, reads from t ≥ j, writes from t < j, γ Σ S ∘ dS'

``delta_gradients_bwd`` makes all of them at once. With a vector gate, ``delta_scores_bwd`` makes those of scores first, and
:mod:`.vector` the rest.
"""

import triton
import triton.language as tl

from ..lib.gates import decay_matrix, excess, load_scalar_gate, suffix_sum, sum_where
from ..lib.indexing import locate_sequence
from ..lib.tiles import accumulate, dot, dot_add, load_tile, to_operand, total
from .loads import load_beta_tile, load_keys, load_two_lengths


@triton.jit
def score_gradients(
    do, ot, beta, bt, errors, rt, adjoint, et, dv, dbeta, rows, L, scale, own,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients ``dA, dL`` of one chunk's scores, both lower triangular; if ``own``, ``dv`` and ``dbeta`` are stored too."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    bdA = tl.zeros((C, C), tl.float32)
    bdL = tl.zeros((C, C), tl.float32)
    share = tl.zeros((C,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        at_v = rows.to(tl.int64)[:, None] * et + columns_v[None, :]
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        x = load_tile(errors, rows, rt, columns_v, L, V, BV)
        y = load_tile(adjoint, rows, et, columns_v, L, V, BV)
        if BETA > 0:
            in_v = (rows < L)[:, None] & (columns_v < V)[None, :] & own
            bbeta = tl.trans(load_beta_tile(beta, rows, bt, columns_v, L, V, BV, BETA))
            e = x.to(tl.float32)
            y = y.to(tl.float32)
            if BETA == 2:
                tl.store(dbeta + at_v, (y * e).to(dbeta.dtype.element_ty), mask=in_v)
            else:
                share += tl.sum(y * e, 1)
            x = (e * bbeta).to(DT)
            y = y * bbeta
            tl.store(dv + at_v, y.to(dv.dtype.element_ty), mask=in_v)
            y = y.to(DT)
        bdA = dot_add(bdo.to(DT), tl.trans(x.to(DT)), bdA, PREC)
        bdL = dot_add(y.to(DT), tl.trans(x.to(DT)), bdL, PREC)
    if BETA == 1:
        tl.store(dbeta + rows.to(tl.int64) * (et // V), share.to(dbeta.dtype.element_ty), mask=(rows < L) & own)
    return tl.where(s <= t, bdA * scale, 0.0), tl.where(s < t, -bdL, 0.0)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def delta_scores_bwd(
    do, beta, v, errors, adjoint, log_decays, dA, dL, dA2, dL2, ranges, dv, dbeta, owner, first, cu, T, PER, N, HV, scale,
    ob, ot, oh, bb, bt, bh, vb, vt, vh,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr,
    PACKED: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk's scores, ``dv`` and ``dbeta``, for a vector gate. ``DPLR``: ``v`` as second ``x``, no ``dv``.

    ``ranges`` are the ``log_decays``, or further from zero where those gradients are so large that a chunk which decays less
    than another is too strong for plain products with them.
    """
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
    do += b * ob + bos * ot + hv.to(tl.int64) * oh
    head = (b * T + bos) * HV + hv
    errors += head * V
    adjoint += head * V
    if BETA > 0:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
        dv += head * V
    if BETA == 1:
        dbeta += head
    elif BETA == 2:
        dbeta += head * V
    bdA, bdL = score_gradients(
        do, ot, beta, bt, errors, HV * V, adjoint, HV * V, dv, dbeta, rows, L, scale, True, V, C, BV, BETA, PREC, DT
    )  # fmt: skip
    here = i.to(tl.int64) * HV + hv
    square = here * (C * C) + t * C + s
    tl.store(dA + square, to_operand(bdA, DT, PREC))
    tl.store(dL + square, bdL.to(dL.dtype.element_ty))
    beyond = tl.maximum(excess(bdA, RANGE), excess(bdL, RANGE))
    if DPLR:
        bdA, bdL = score_gradients(
            do, ot, beta, bt, v + b * vb + bos * vt + hv.to(tl.int64) * vh, vt, adjoint, HV * V, dv, dbeta, rows, L, scale,
            True, V, C, BV, BETA, PREC, DT
        )  # fmt: skip
        tl.store(dA2 + square, to_operand(bdA, DT, PREC))
        tl.store(dL2 + square, bdL.to(dL.dtype.element_ty))
        beyond = tl.maximum(beyond, tl.maximum(excess(bdA, RANGE), excess(bdL, RANGE)))
    tl.store(ranges + here, tl.load(log_decays + here) - 2.0 * beyond)


@triton.jit
def state_product(
    a, at, beta, bt, states, others, rows, columns_k, L, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BETA: tl.constexpr, OVERLAP: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Product of rows with a state, ``(beta ∘ a) Sᵀ [C, BK]``, and, if ``OVERLAP``, ``Σ_v S ∘ S' [BK]`` with another state."""
    X = tl.zeros((C, BK), tl.float32)
    overlap = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        x = load_tile(a, rows, at, columns_v, L, V, BV)
        if BETA == 2:
            x = x.to(tl.float32) * tl.trans(load_beta_tile(beta, rows, bt, columns_v, L, V, BV, BETA))
        inside = (columns_v < V)[:, None] & (columns_k < K)[None, :]
        tile = columns_v[:, None] * K + columns_k[None, :]
        bS = tl.load(states + tile, mask=inside, other=0.0)
        X = dot_add(x.to(DT), bS, X, PREC)
        if OVERLAP:
            overlap += tl.sum(bS.to(tl.float32) * tl.load(others + tile, mask=inside, other=0.0).to(tl.float32), 0)
    if BETA == 1:
        X = X * tl.trans(load_beta_tile(beta, rows, bt, columns_k, L, V, BV, BETA))
    return X, overlap


@triton.jit
def state_products(
    do, ot, beta, bt, errors, adjoint, et, states, dstates, rows, columns_k, L, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, OVERLAP: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Products with states, each read once: ``do Sᵀ, dv Sᵀ, x dS'ᵀ [C, BK]`` and, if ``OVERLAP``, ``Σ_v S ∘ dS' [BK]``."""
    read = tl.zeros((C, BK), tl.float32)
    compared = tl.zeros((C, BK), tl.float32)
    wrote = tl.zeros((C, BK), tl.float32)
    overlap = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        be = load_tile(errors, rows, et, columns_v, L, V, BV)
        by = load_tile(adjoint, rows, et, columns_v, L, V, BV)
        if BETA == 2:
            bbeta = tl.trans(load_beta_tile(beta, rows, bt, columns_v, L, V, BV, BETA))
            be = (be.to(tl.float32) * bbeta).to(DT)
            by = (by.to(tl.float32) * bbeta).to(DT)
        inside = (columns_v < V)[:, None] & (columns_k < K)[None, :]
        tile = columns_v[:, None] * K + columns_k[None, :]
        bS = tl.load(states + tile, mask=inside, other=0.0)
        bdS = tl.load(dstates + tile, mask=inside, other=0.0)
        read = dot_add(bdo.to(DT), bS, read, PREC)
        compared = dot_add(by, bS, compared, PREC)
        wrote = dot_add(be, bdS, wrote, PREC)
        if OVERLAP:
            overlap += tl.sum(bS.to(tl.float32) * bdS.to(tl.float32), 0)
    if BETA == 1:
        bbeta = tl.trans(load_beta_tile(beta, rows, bt, columns_k, L, V, BV, BETA))
        compared = compared * bbeta
        wrote = wrote * bbeta
    return read, compared, wrote, overlap


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "tiles_stride"])
def delta_gradients_bwd(
    q, k, uq, uk, do, g, beta, errors, adjoint, rates, states, dstates, dq, dk, dv, dg, dbeta,
    owner, first, cu, T, PER, N, HV, TURN, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    TURNS: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Gradients ``dq, dk [C, BK]`` and a tile's part of ``dg`` of one chunk; in the first of its programs, ``dv, dbeta`` too.

    Where ``TURNS`` value heads share ``dq, dk``, they take turns: this is the ``TURN``-th of each. If ``UNIT``, those are
    gradients of rows times their reciprocal lengths ``uq, uk``, from which the rows' own follow.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    heads = HV // TURNS
    hv = pid // NK % heads * TURNS + TURN
    i = pid // (NK * heads)
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    token = tl.arange(0, C)
    rows = piece * C + token
    columns_k = ik * BK + tl.arange(0, BK)
    t = token[:, None]
    s = token[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    do += b * ob + bos * ot + hv.to(tl.int64) * oh
    head = (b * T + bos) * HV + hv
    errors += head * V
    adjoint += head * V
    here = i.to(tl.int64) * HV + hv
    states += here * (K * V)
    dstates += here * (K * V)
    beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    at = head + rows * HV
    in_k = (rows < L)[:, None] & (columns_k < K)[None, :]
    at_k = ((b * T + bos + rows) * heads + hv // TURNS)[:, None] * K + columns_k[None, :]
    bdA, bdL = score_gradients(
        do, ot, beta, bt, errors, HV * V, adjoint, HV * V, dv + head * V, dbeta + head * (V if BETA == 2 else 1), rows, L,
        scale, ik == 0, V, C, BV, BETA, PREC, DT
    )  # fmt: skip
    if GATE == 1:
        bg = load_scalar_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, L)
        D = decay_matrix(bg, C, False, SPLIT)
        bdA = bdA * D
        bdL = bdL * D
    bdA = to_operand(bdA, DT, PREC)
    bdL = to_operand(bdL, DT, PREC)
    acc, compared, wrote, overlap = state_products(
        do, ot, beta, bt, errors, adjoint, HV * V, states, dstates, rows, columns_k, L, K, V, C, BK, BV, BETA, GATE == 1, PREC,
        DT
    )  # fmt: skip
    acc = acc * scale
    if GATE == 1:
        rates += here * ((6 if UNIT else 3) * C)
        rate = tl.load(rates + token)[:, None]
        acc = acc * rate
        compared = compared * rate
        wrote = wrote * tl.load(rates + C + token)[:, None]
        through = tl.sum(overlap, 0) * tl.load(rates + C - 1)

    lq, lk = load_two_lengths(uq, uk, (b * T + bos) * (HV // GROUP) + hv // GROUP, rows, L, HV // GROUP, UNIT)

    # The query's side.
    bq = load_keys(q, rows, qt, columns_k, L, K, BK, lq, UNIT)
    bk = load_keys(k, rows, kt, columns_k, L, K, BK, lk, UNIT)
    if GATE == 1 and SPLIT == 3:
        read = tl.sum(bq.to(tl.float32) * acc, 1)
        crossing = tl.where(s < t, bdA * dot(bq, tl.trans(bk), PREC), 0.0)
    acc = dot_add(bdA, bk.to(DT), acc, PREC)
    accumulate(dq + at_k, acc, in_k, TURN, TURNS)
    if GATE == 1 and SPLIT < 3:
        read = tl.sum(bq.to(tl.float32) * acc, 1)

    # The key that is written, then the key that reads.
    bk = load_keys(k, rows, kt, columns_k, L, K, BK, lk, UNIT)
    if GATE == 1:
        late = tl.sum(bk.to(tl.float32) * wrote, 1)
    bq = load_keys(q, rows, qt, columns_k, L, K, BK, lq, UNIT)
    wrote = dot_add(tl.trans(bdA), bq.to(DT), wrote, PREC)
    wrote = dot_add(tl.trans(bdL), bk.to(DT), wrote, PREC)
    compared = -compared
    if GATE == 1 and SPLIT == 3:
        read += tl.sum(bk.to(tl.float32) * compared, 1)
        crossing += bdL * dot(bk, tl.trans(bk), PREC)
    compared = dot_add(bdL, bk.to(DT), compared, PREC)
    accumulate(dk + at_k, wrote + compared, in_k, TURN, TURNS)
    if GATE == 1:
        if SPLIT == 3:  # the sums that define dg, with no cancellation
            across = tl.sum(tl.where(s < t, sum_where(s >= t, crossing, SPLIT), 0.0), 1) + through
            across += tl.sum(tl.where(s >= t, read[None, :], 0.0), 1) + tl.sum(tl.where(s < t, late[None, :], 0.0), 1)
        else:
            across = read + tl.sum(bk.to(tl.float32) * (compared - wrote), 1)
            across += suffix_sum(across, C, SPLIT) + total(late) + through
            across = tl.where(bg > -87.0, across, 0.0)  # e^g is zero, and so is its gradient
        tl.store(dg + ik * tiles_stride + at, across, mask=rows < L)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "tiles_stride"])
def delta_gate_bwd(
    partial_dg, g, dg, owner, first, cu, T, PER, N, HV, tiles_stride, gb, gt, gh,
    C: tl.constexpr, TILES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradient ``dg`` of one chunk with a scalar gate: the sum over ``partial_dg [TILES, 2, C]``, which tiles of keys left.

    A tile has two numbers a token: what its gate and all before it in the chunk get, and what every gate of the chunk gets.
    """
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    t = tl.arange(0, C)
    rows = piece * C + t
    bg = load_scalar_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, L)
    partial_dg += pid.to(tl.int64) * (2 * C) + t
    across = tl.load(partial_dg)
    whole = tl.load(partial_dg + C)
    for tile in tl.static_range(1, TILES):
        across += tl.load(partial_dg + tile * tiles_stride)
        whole += tl.load(partial_dg + tile * tiles_stride + C)
    across += suffix_sum(across, C, 1) + tl.sum(whole, 0)
    across = tl.where(bg > -87.0, across, 0.0)  # e^g is zero, and so is its gradient
    tl.store(dg + (b * T + bos + rows) * HV + hv, across, mask=rows < L)
