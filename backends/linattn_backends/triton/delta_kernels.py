"""Chunk kernels of the families that correct what they write: ``delta_rule``, ``gated_delta_rule``, ``kda``, ``dplr``.

In chunks of ``C`` tokens, ``S`` the state before a chunk, ``G`` the running sum of the gates inside it, ``γ = e^{G_C}``. The
*error* ``e`` of a token is what its value lacks, ``x = beta ∘ e`` what is written::

    scores     A_ts = scale Σ_k q_t k_s e^{G_t - G_s}, s ≤ t          L_ts = Σ_k k_t k_s e^{G_t - G_s}, s < t
    errors     r = v - (k ∘ e^G) S      (I + L beta) e = r            e = r - M (beta ∘ r),  M = (I + L beta)⁻¹ L
    forward    o = scale (q ∘ e^G) S + A x                            S' = γ S + (k ∘ e^{G_C - G})ᵀ x
    adjoint    dx = Aᵀ do + (k ∘ e^{G_C - G}) dS'                     y = dx - Mᵀ (beta ∘ dx),  dv = beta ∘ y
               dS = γ dS' + scale (q ∘ e^G)ᵀ do - (k ∘ e^G)ᵀ dv

``M`` serves both systems, is strictly lower triangular, and stays finite where ``beta`` is zero. ``dplr`` is the same with
``-a`` for the key that reads, ``b`` for the key that writes and no ``beta``; ``k, v`` are written besides, and read by ``a``.
With a ``beta`` a value channel every channel has a system of its own, solved by substitution: ``M`` then holds ``L``.

``prepare`` (here for at most a scalar gate, in :mod:`.delta_vector` for a vector) makes ``A`` and ``M`` of every chunk at once,
``forwards`` and ``backwards`` walk the chunks with a tile of the state in registers, ``gradients`` does each chunk's share of
``dq, dk, dv, dbeta, dg``. None adds to shared memory locations, waits for another or asks the host for a size.

For few heads the walk is cut into segments. What a segment does to the state before it is affine: ``S' = P S + local``, with
``local`` its walk from zero and ``P [K, K]`` its walk from the identity without values (``IDENTITY``). ``carry`` chains them;
backwards, ``Pᵀ``.
"""

import triton
import triton.language as tl

from .kernels import sequence_of
from .tiles import LOG2E, decay_matrix, load_tile, prefix, product, row_gate, suffix, times, total

__all__ = ["backwards", "carry", "forwards", "gradients", "prepare", "solved"]


@triton.jit
def strength(p, rows, stride, columns_v, L, V: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr):
    """``beta`` of a chunk's tokens, float32: ``[C, 1]`` if ``BETA`` is 1, ``[C, BV]`` if it is 2."""
    if BETA == 2:
        beta = load_tile(p, rows, stride, columns_v, L, V, BV).to(tl.float32)
    else:
        beta = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)[:, None]
    return beta


@triton.jit
def solved(L, beta, C: tl.constexpr, PREC: tl.constexpr):
    """``(I + L beta)⁻¹ L`` for a strictly lower triangular ``L [C, C]`` and ``beta [C]``, blocks merged from two tokens up.

    With ``M₁, M₂`` of two neighbours and ``L₂₁`` between them, ``M₂₁ = (I - M₂ beta) L₂₁ (I - beta M₁)``.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    M = tl.where(((t ^ s) < 2) & (s < t), L, 0.0)
    half = 2
    while half < C:
        between = tl.where(((t ^ s) < 2 * half) & ((t & half) != 0) & ((s & half) == 0), L, 0.0)
        Y = between - times(M * beta[None, :], between, PREC)
        M += Y - times(Y * beta[None, :], M, PREC)
        half = half * 2
    return M


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def prepare(
    q, k, g, beta, A, M, rates, owner, first, cu, T, PER, N, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``A, M [C, C]`` of one chunk and, for a scalar gate, ``rates [2, C]``: ``e^G`` and ``e^{G_C - G}``."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    at = i.to(tl.int64) * HV + hv
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    for ik in range((K + BK - 1) // BK):
        columns = ik * BK + tl.arange(0, BK)
        bq = load_tile(q, rows, qt, columns, L, K, BK)
        bk = load_tile(k, rows, kt, columns, L, K, BK)
        qk = product(bq, tl.trans(bk), qk, PREC)
        kk = product(bk, tl.trans(bk), kk, PREC)
    qk = tl.where(s <= t, qk * scale, 0.0)
    kk = tl.where(s < t, kk, 0.0)
    if GATE == 1:
        bg = row_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, L)
        D = decay_matrix(bg, C, False, SPLIT)
        qk = tl.where(s <= t, qk * D, 0.0)
        kk = tl.where(s < t, kk * D, 0.0)
        p = rates + at * (2 * C) + tl.arange(0, C)
        tl.store(p, tl.exp2(prefix(bg, C, SPLIT) * LOG2E))
        tl.store(p + C, tl.exp2(suffix(bg, C, SPLIT) * LOG2E))
    square = at * (C * C) + t * C + s
    tl.store(A + square, qk.to(A.dtype.element_ty))
    if BETA < 2:
        bbeta = tl.load(
            beta + b * bb + (bos + rows) * bt + hv.to(tl.int64) * bh, mask=rows < L, other=0.0
        ).to(tl.float32)  # fmt: skip
        kk = solved(kk, bbeta, C, PREC)
    tl.store(M + square, kk.to(M.dtype.element_ty))


@triton.jit
def substituted(x, beta, L, C: tl.constexpr, REVERSE: tl.constexpr):
    """``e = x - L (beta ∘ e)`` token by token, or ``y = x - Lᵀ (beta ∘ y)``, for ``x, beta [C, BV]`` and ``L`` in memory."""
    t = tl.arange(0, C)
    for step in range(C - 1):
        j = step
        p = L + t * C + j
        if REVERSE:
            j = C - 1 - step
            p = L + j * C + t
        row = tl.sum(tl.where(t[:, None] == j, x * beta, 0.0), 0)
        x -= tl.load(p).to(tl.float32)[:, None] * row[None, :]
    return x


@triton.jit
def span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr):
    """Of a sequence or segment ``i``: batch row, first token, length, number of the sequence's first chunk, chunks from, to."""
    if WHOLE and PACKED:
        n = i.to(tl.int64)
        piece = 0
        bos = tl.load(cu + n).to(tl.int64)
        L = tl.load(cu + n + 1).to(tl.int64) - bos
        b = n * 0
    elif WHOLE:
        n = i.to(tl.int64)
        piece = 0
        bos = n * 0
        L = n * 0 + T
        b = n
    else:
        n, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    if PACKED:
        chunk0 = tl.load(chunk_first + n).to(tl.int64)
    else:
        chunk0 = n * ((T + C - 1) // C)
    low = piece * SEGMENT
    high = tl.minimum(low + SEGMENT, ((L + C - 1) // C).to(tl.int32))
    return b, bos, L, chunk0, low, high


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def forwards(
    q, k, v, beta, write, write2, A, M, A2, L2, rates, start, end, kept, errors, out,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, bb, bt, bh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr,
    END: tl.constexpr, KEEP: tl.constexpr, OUT: tl.constexpr, IDENTITY: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """Walk the chunks of a sequence or segment with a ``[K, BV]`` tile of the state.

    ``OUT`` writes outputs, ``KEEP`` the state before every chunk and the errors. With a vector gate ``q, k, write`` are decayed
    already: ``q ∘ e^G``, ``k ∘ e^G``, ``k ∘ e^{G_C - G}``, and ``rates [K]`` of a chunk is ``e^{G_C}``. ``DPLR`` has ``-a`` and
    ``b`` for ``k``, no ``beta``, and ``k`` in ``write2, A2, L2``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high = span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
    tile = columns_k[:, None] * V + columns_v[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    if GATE == 2:
        write += b * kb + bos * kt + hv.to(tl.int64) * kh
    if DPLR:
        write2 += b * kb + bos * kt + hv.to(tl.int64) * kh
    if not IDENTITY:
        v += b * vb + bos * vt + hv.to(tl.int64) * vh
    if BETA > 0:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    at = (i.to(tl.int64) * HV + hv) * (K * V)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    S = tl.zeros((BK, BV), tl.float32)
    if IDENTITY:
        S += tl.where(columns_k[:, None] == columns_v[None, :], 1.0, 0.0)
    if START:
        S += tl.load(start + at + tile, mask=inside, other=0.0).to(tl.float32)
    for chunk in range(low, high):
        rows = chunk * C + tl.arange(0, C)
        here = (chunk0 + chunk) * HV + hv
        if KEEP:
            tl.store(kept + here * (K * V) + tile, S.to(kept.dtype.element_ty), mask=inside)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        r = -times(bk.to(ST), S.to(ST), PREC)
        if GATE == 1:
            rate = tl.load(rates + here * (2 * C) + tl.arange(0, C))
            later = tl.load(rates + here * (2 * C) + C + tl.arange(0, C))
            r = r * rate[:, None]
        if not IDENTITY:
            bv = load_tile(v, rows, vt, columns_v, L, V, BV)
            if DPLR:
                r -= times(tl.load(L2 + here * (C * C) + t * C + s).to(ST), bv.to(ST), PREC)
            else:
                r += bv.to(tl.float32)
        if BETA > 0:
            bbeta = strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        if BETA == 2:
            e = substituted(r, bbeta, M + here * (C * C), C, False)
            x = e * bbeta
        elif BETA == 1:
            bM = tl.load(M + here * (C * C) + t * C + s)
            e = r - times(bM, (r * bbeta).to(ST), PREC)
            x = e * bbeta
        else:
            bM = tl.load(M + here * (C * C) + t * C + s)
            e = r - times(bM, r.to(ST), PREC)
            x = e
        at_v = ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
        stored = (rows < L)[:, None] & (columns_v < V)[None, :]
        if KEEP:
            tl.store(errors + at_v, e.to(errors.dtype.element_ty), mask=stored)
        if OUT:
            bq = load_tile(q, rows, qt, columns_k, L, K, BK)
            acc = times(bq.to(ST), S.to(ST), PREC) * scale
            if GATE == 1:
                acc = acc * rate[:, None]
            bA = tl.load(A + here * (C * C) + t * C + s)
            acc = product(bA, x.to(DT), acc, PREC)
            if DPLR:
                acc = product(tl.load(A2 + here * (C * C) + t * C + s), bv.to(DT), acc, PREC)
            tl.store(out + at_v, acc.to(out.dtype.element_ty), mask=stored)
        if GATE == 1:
            x = x * later[:, None]
            S = S * tl.load(rates + here * (2 * C) + C - 1)
        if GATE == 2:
            S = S * tl.load(rates + here * K + columns_k, mask=columns_k < K, other=0.0)[:, None]
            bk = load_tile(write, rows, kt, columns_k, L, K, BK)
        S = product(tl.trans(bk.to(ST)), x.to(ST), S, PREC)
        if DPLR and not IDENTITY:
            bk = load_tile(write2, rows, kt, columns_k, L, K, BK)
            S = product(tl.trans(bk.to(ST)), bv.to(ST), S, PREC)
    if END:
        tl.store(end + at + tile, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def backwards(
    q, k, do, beta, write, A, M, rates, start, end, kept, adjoint,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr,
    END: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """Walk the chunks from the last with a ``[K, BV]`` tile of the state's gradient.

    ``KEEP`` writes the gradient of the state after every chunk, and ``y``. Otherwise as ``forwards``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high = span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
    tile = columns_k[:, None] * V + columns_v[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    if GATE == 2:
        write += b * kb + bos * kt + hv.to(tl.int64) * kh
    do += b * ob + bos * ot + hv.to(tl.int64) * oh
    if BETA > 0:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    at = (i.to(tl.int64) * HV + hv) * (K * V)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    dS = tl.zeros((BK, BV), tl.float32)
    if START:
        dS += tl.load(start + at + tile, mask=inside, other=0.0).to(tl.float32)
    for step in range(low, high):
        chunk = low + high - 1 - step
        rows = chunk * C + tl.arange(0, C)
        here = (chunk0 + chunk) * HV + hv
        if KEEP:
            tl.store(kept + here * (K * V) + tile, dS.to(kept.dtype.element_ty), mask=inside)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        if GATE == 2:
            bke = load_tile(write, rows, kt, columns_k, L, K, BK)
            dx = times(bke.to(ST), dS.to(ST), PREC)
        else:
            dx = times(bk.to(ST), dS.to(ST), PREC)
        if GATE == 1:
            rate = tl.load(rates + here * (2 * C) + tl.arange(0, C))
            later = tl.load(rates + here * (2 * C) + C + tl.arange(0, C))
            dx = dx * later[:, None]
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        bA = tl.load(A + here * (C * C) + s * C + t)
        dx = product(bA, bdo.to(DT), dx, PREC)
        if BETA > 0:
            bbeta = strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        if BETA == 2:
            y = substituted(dx, bbeta, M + here * (C * C), C, True)
            dr = -y * bbeta
        elif BETA == 1:
            bM = tl.load(M + here * (C * C) + s * C + t)
            y = dx - times(bM, (dx * bbeta).to(ST), PREC)
            dr = -y * bbeta
        else:
            bM = tl.load(M + here * (C * C) + s * C + t)
            y = dx - times(bM, dx.to(ST), PREC)
            dr = -y
        if KEEP:
            at_v = ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
            tl.store(adjoint + at_v, y.to(adjoint.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])
        do_read = bdo.to(tl.float32) * scale
        if GATE == 1:
            dr = dr * rate[:, None]
            do_read = do_read * rate[:, None]
            dS = dS * tl.load(rates + here * (2 * C) + C - 1)
        if GATE == 2:
            dS = dS * tl.load(rates + here * K + columns_k, mask=columns_k < K, other=0.0)[:, None]
        bq = load_tile(q, rows, qt, columns_k, L, K, BK)
        dS = product(tl.trans(bq.to(ST)), do_read.to(ST), dS, PREC)
        dS = product(tl.trans(bk.to(ST)), dr.to(ST), dS, PREC)
    if END:
        tl.store(end + at + tile, dS, mask=inside)


@triton.jit(do_not_specialize=["PER", "HV"])
def carry(
    local, through, start, end, first, PER, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The state before each segment (in place in ``local``) and after the last, from what segments make of zero and identity.

    ``through [K, K]``; in reverse gradients, and its transpose.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    n = (pid // (NV * HV)).to(tl.int64)
    if PACKED:
        low = tl.load(first + n).to(tl.int32)
        high = tl.load(first + n + 1).to(tl.int32)
    else:
        low = n.to(tl.int32) * PER
        high = low + PER
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
    tile = columns_k[:, None] * V + columns_v[None, :]
    at = (n * HV + hv) * (K * V)
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        S += tl.load(start + at + tile, mask=inside, other=0.0).to(tl.float32)
    if REVERSE:
        square = columns_k[None, :] * K + columns_k[:, None]
    else:
        square = columns_k[:, None] * K + columns_k[None, :]
    both = (columns_k < K)[:, None] & (columns_k < K)[None, :]
    for step in range(low, high):
        i = step
        if REVERSE:
            i = low + high - 1 - step
        head = i.to(tl.int64) * HV + hv
        p = local + head * (K * V) + tile
        own = tl.load(p, mask=inside, other=0.0)
        P = tl.load(through + head * (K * K) + square, mask=both, other=0.0)
        tl.store(p, S, mask=inside)
        S = own + times(P, S, PREC)
    tl.store(end + at + tile, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "tiles_stride"])
def gradients(
    q, k, do, beta, g, errors, adjoint, rates, kept, dkept, dq, dk, dv, dbeta, dg,
    owner, first, cu, T, PER, N, HV, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh, gb, gt, gh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk [C, BK]``, ``dv``, ``dbeta`` and ``dg``, for at most a scalar gate.

    ``dA = scale do xᵀ``, ``dL = -dv xᵀ``; ``dg_j`` sums what crosses token ``j``: scores of pairs ``s < j ≤ t``, reads from
    ``t ≥ j``, writes from ``t < j``, and the state itself.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_k = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    do += b * ob + bos * ot + hv.to(tl.int64) * oh
    beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    here = i.to(tl.int64) * HV + hv
    kept += here * (K * V)
    dkept += here * (K * V)
    head_v = ((b * T + bos) * HV + hv) * V
    errors += head_v
    adjoint += head_v
    at = (b * T + bos + rows) * HV + hv
    in_k = (rows < L)[:, None] & (columns_k < K)[None, :]
    at_k = at[:, None] * K + columns_k[None, :]
    if GATE == 1:
        g += b * gb + bos * gt + hv.to(tl.int64) * gh
        rates += here * (2 * C)
        last = tl.load(rates + C - 1)

    # The query's side: dA [C, C] and dq [C, BK].
    dA = tl.zeros((C, C), tl.float32)
    bdq = tl.zeros((C, BK), tl.float32)
    for iv in range(NV):
        columns_v = iv * BV + tl.arange(0, BV)
        x = load_tile(errors, rows, HV * V, columns_v, L, V, BV).to(tl.float32)
        x = x * strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        tile = columns_k[:, None] * V + columns_v[None, :]
        bS = tl.load(kept + tile, mask=(columns_k < K)[:, None] & (columns_v < V)[None, :], other=0.0)
        dA = product(bdo.to(DT), tl.trans(x.to(DT)), dA, PREC)
        bdq = product(bdo.to(ST), tl.trans(bS), bdq, PREC)
    bdq = bdq * scale
    dA = tl.where(s <= t, dA * scale, 0.0)
    bq = load_tile(q, rows, qt, columns_k, L, K, BK)
    bk = load_tile(k, rows, kt, columns_k, L, K, BK)
    if GATE == 1:
        bdq = bdq * tl.load(rates + tl.arange(0, C))[:, None]
        dA = dA * decay_matrix(row_gate(g, rows, gt, L), C, False, SPLIT)
        if SPLIT == 3:
            pairs = tl.where(s < t, dA * times(bq, tl.trans(bk), PREC), 0.0)
            read = tl.sum(bq.to(tl.float32) * bdq, 1)
    bdq = product(dA.to(DT), bk, bdq, PREC)
    tl.store(dq + at_k, bdq.to(dq.dtype.element_ty), mask=in_k)
    if GATE == 1 and SPLIT < 3:
        read = tl.sum(bq.to(tl.float32) * bdq, 1)

    # The key that is written: dA transposed, and its part of dk [C, BK].
    dAT = tl.zeros((C, C), tl.float32)
    wrote = tl.zeros((C, BK), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range(NV):
        columns_v = iv * BV + tl.arange(0, BV)
        x = load_tile(errors, rows, HV * V, columns_v, L, V, BV).to(tl.float32)
        x = x * strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        tile = columns_k[:, None] * V + columns_v[None, :]
        inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
        bdS = tl.load(dkept + tile, mask=inside, other=0.0)
        dAT = product(x.to(DT), tl.trans(bdo.to(DT)), dAT, PREC)
        wrote = product(x.to(ST), tl.trans(bdS), wrote, PREC)
        if GATE == 1:
            bS = tl.load(kept + tile, mask=inside, other=0.0)
            met += tl.sum(bS.to(tl.float32) * bdS.to(tl.float32), 1)
    dAT = tl.where(t <= s, dAT * scale, 0.0)
    if GATE == 1:
        wrote = wrote * tl.load(rates + C + tl.arange(0, C))[:, None]
        dAT = dAT * decay_matrix(row_gate(g, rows, gt, L), C, True, SPLIT)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        late = tl.sum(bk.to(tl.float32) * wrote, 1)
    bq = load_tile(q, rows, qt, columns_k, L, K, BK)
    wrote = product(dAT.to(DT), bq, wrote, PREC)

    # The key that reads: dL [C, C], its transpose, and the rest of dk; dv and dbeta on the way.
    dL = tl.zeros((C, C), tl.float32)
    dLT = tl.zeros((C, C), tl.float32)
    compared = tl.zeros((C, BK), tl.float32)
    share = tl.zeros((C,), tl.float32)
    for iv in range(NV):
        columns_v = iv * BV + tl.arange(0, BV)
        bbeta = strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        e = load_tile(errors, rows, HV * V, columns_v, L, V, BV).to(tl.float32)
        y = load_tile(adjoint, rows, HV * V, columns_v, L, V, BV).to(tl.float32)
        bdv = y * bbeta
        if ik == 0:
            at_v = at[:, None] * V + columns_v[None, :]
            in_v = (rows < L)[:, None] & (columns_v < V)[None, :]
            tl.store(dv + at_v, bdv.to(dv.dtype.element_ty), mask=in_v)
            if BETA == 2:
                tl.store(dbeta + at_v, (y * e).to(dbeta.dtype.element_ty), mask=in_v)
            else:
                share += tl.sum(y * e, 1)
        x = (e * bbeta).to(ST)
        bdv = (-bdv).to(ST)
        tile = columns_k[:, None] * V + columns_v[None, :]
        bS = tl.load(kept + tile, mask=(columns_k < K)[:, None] & (columns_v < V)[None, :], other=0.0)
        dL = product(bdv, tl.trans(x), dL, PREC)
        dLT = product(x, tl.trans(bdv), dLT, PREC)
        compared = product(bdv, tl.trans(bS), compared, PREC)
    if BETA < 2:  # noqa: SIM102
        if ik == 0:
            tl.store(dbeta + at, share.to(dbeta.dtype.element_ty), mask=rows < L)
    dL = tl.where(s < t, dL, 0.0)
    dLT = tl.where(t < s, dLT, 0.0)
    bk = load_tile(k, rows, kt, columns_k, L, K, BK)
    if GATE == 1:
        bg = row_gate(g, rows, gt, L)
        compared = compared * tl.load(rates + tl.arange(0, C))[:, None]
        dL = dL * decay_matrix(bg, C, False, SPLIT)
        dLT = dLT * decay_matrix(bg, C, True, SPLIT)
        if SPLIT == 3:
            pairs += dL * times(bk, tl.trans(bk), PREC)
            read += tl.sum(bk.to(tl.float32) * compared, 1)
        compared = product(dL.to(DT), bk, compared, PREC)
        wrote = product(dLT.to(DT), bk, wrote, PREC)
        if SPLIT == 3:  # the sums that define dg, with no cancellation
            across = tl.sum(tl.where(s < t, total(s >= t, pairs, SPLIT), 0.0), 1) + tl.sum(met, 0) * last
            across += tl.sum(tl.where(s >= t, read[None, :], 0.0), 1) + tl.sum(tl.where(s < t, late[None, :], 0.0), 1)
        else:
            across = read + tl.sum(bk.to(tl.float32) * (compared - wrote), 1)
            across += suffix(across, C, SPLIT) + tl.sum(late, 0) + tl.sum(met, 0) * last
            across = tl.where(bg > -87.0, across, 0.0)  # e^g is zero, and so is its gradient
        tl.store(dg + ik * tiles_stride + at, across, mask=rows < L)
    else:
        compared = product((dL + dLT).to(DT), bk, compared, PREC)
    tl.store(dk + at_k, (compared + wrote).to(dk.dtype.element_ty), mask=in_k)
