"""Chunk kernels of a vector gate: ``gla`` and ``rwkv6``. What a gate does is done here once, and the state's walk has none left.

In chunks of ``C`` tokens, with ``S`` the state before a chunk and ``dS'`` the gradient of the state after it::

    scores   A_ts = scale Σ_k q_t k_s e^{G_t - G_s}, s ≤ t      read = scale q ∘ e^G      write = k ∘ e^{G_C - G}
    states   S' = Diag(e^{G_C}) S + writeᵀ v                    reverse  dS = Diag(e^{G_C}) dS' + readᵀ do
    walk     o  = A v + read S                                  reverse  dv = Aᵀ do + write dS'
    inter    dA = scale do vᵀ     scale do Sᵀ     v dS'ᵀ        Σ_v S ∘ dS'
    intra    dq_t = Σ_{s≤t} dA_ts k_s e^{G_t - G_s} + e^{G_t} scale do_t Sᵀ
             dk_s = Σ_{t≥s} dA_ts q_t e^{G_t - G_s} + e^{G_C - G_s} v_s dS'ᵀ
             dg_j = Σ_{s<j≤t} q_t dA_ts k_s e^{G_t - G_s} + Σ_{t≥j} q dq_inter + Σ_{t<j} k dk_inter + e^{G_C} Σ_v S ∘ dS'

``G`` arrives as running sums, base 2 (:mod:`.gates`). A chunk is a block. In a block, decays are measured from ``c``, the sum at its
middle. If no channel is further than ``2^RANGE`` from there, one product ``(q e^{G-c}) (k e^{c-G})ᵀ`` does the block; else one
does the pairs on two sides of the middle, where both exponents are ``≤ 0``, and the halves are the next blocks. So every gate
down to ``-inf`` is exact, and what strong gates cost is two to six products of ``[C, K]`` tiles in place of one.

RWKV-6 reads ``S⁻``: ``G_{t-1}`` replaces ``G_t`` on the query's side (``EXCLUSIVE``) and ``u`` weighs the diagonal of ``A``.
"""

import triton
import triton.language as tl

from .kernels import at_head, sequence_of, span_of, state_tile
from .tiles import INTERPRETED, load_tile, product, times

__all__ = ["inter", "intra", "outputs", "scores", "walk"]


@triton.jit
def sums_at(G, rows, stride, columns, L, K: tl.constexpr):
    """Running sums at ``rows``; past the end, the last ones."""
    p = G + tl.minimum(rows.to(tl.int64), L - 1)[:, None] * stride + columns[None, :]
    return tl.load(p, mask=(columns < K)[None, :], other=0.0)


@triton.jit
def sums_before(G, rows, stride, columns, L, K: tl.constexpr, C: tl.constexpr):
    """Running sums without the row's own gate."""
    p = G + tl.minimum(rows.to(tl.int64), L)[:, None] * stride - stride + columns[None, :]
    return tl.load(p, mask=(rows % C > 0)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def distances(G, rows, half, stride, columns, L, K: tl.constexpr, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Sums at ``rows`` from those at the last row below the middle of each block of ``2·half``: the query's and the key's."""
    c = sums_at(G, rows // (2 * half) * (2 * half) + half - 1, stride, columns, L, K)
    of_k = (sums_at(G, rows, stride, columns, L, K) - c).to(tl.float32)
    of_q = of_k
    if EXCLUSIVE:
        of_q = (sums_before(G, rows, stride, columns, L, K, C) - c).to(tl.float32)
    return of_q, of_k


@triton.jit
def added(ones, x, SPLIT: tl.constexpr):
    """``ones @ x`` for a matrix of ones and zeros, ``x`` in ``SPLIT`` bfloat16 terms."""
    if INTERPRETED:
        result = tl.dot(ones.to(tl.float32), x, input_precision="ieee")
    else:
        part = x.to(tl.bfloat16)
        result = tl.dot(ones, part)
        if SPLIT > 1:
            rest = x - part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            result = tl.dot(ones, part, result)
        if SPLIT > 2:
            part = (rest - part.to(tl.float32)).to(tl.bfloat16)
            result = tl.dot(ones, part, result)
    return result


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def scores(
    q, k, G, u, A, read, write, decay, owner, first, cu, T, PER, N, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PACKED: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of ``A [C, C]``, ``read, write [C, K]`` and ``G_C [K]``."""
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
    q = at_head(q, b, bos, hv, qb, qt, qh, GROUP)
    k = at_head(k, b, bos, hv, kb, kt, kh, GROUP)
    G = at_head(G, b, bos, hv, gb, gt, gh, GATE_GROUP)
    at = i.to(tl.int64) * HV + hv
    acc = tl.zeros((C, C), tl.float32)
    for ik in range((K + BK - 1) // BK):
        columns = ik * BK + tl.arange(0, BK)
        bq = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
        bk = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32)
        bG = sums_at(G, rows, gt, columns, L, K)
        if EXCLUSIVE:
            Gq = sums_before(G, rows, gt, columns, L, K, C)
        else:
            Gq = bG
        last = G + tl.minimum(piece * C + C - 1, L - 1) * gt + columns
        end = tl.load(last, mask=columns < K, other=0.0)
        tl.store(decay + at * K + columns, end.to(tl.float32), mask=columns < K)
        p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
        keep = (rows < L)[:, None] & (columns < K)[None, :]
        bx = bq * (tl.exp2(Gq.to(tl.float32)) * scale)
        tl.store(read + p, bx.to(read.dtype.element_ty), mask=keep)
        bx = bk * tl.exp2((end[None, :] - bG).to(tl.float32))
        tl.store(write + p, bx.to(write.dtype.element_ty), mask=keep)
        own = bq * bk
        if EXCLUSIVE:
            own = own * tl.load(u + hv * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
        acc += tl.where(t == s, tl.sum(own, 1)[:, None], 0.0)
        half = C // 2
        while half > 0:
            from_q, from_k = distances(G, rows, half, gt, columns, L, K, C, EXCLUSIVE)
            if plain(from_k, half, EXCLUSIVE, RANGE):
                left = (load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32) * tl.exp2(from_q)).to(DT)
                right = (load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32) * tl.exp2(-from_k)).to(DT)
                acc += tl.where((s < t) & ((t ^ s) < 2 * half), times(left, tl.trans(right), PREC), 0.0)
                half = 0
            else:
                upper = (t & half) != 0
                X = side(q, k, upper, rows, qt, kt, columns, L, K, BK) * tl.exp2(-tl.abs(tl.where(upper, from_q, from_k)))
                X = X.to(DT)
                acc += tl.where((s < t) & ((t ^ s) < 2 * half) & ((t ^ s) >= half), times(X, tl.trans(X), PREC), 0.0)
                half = half // 2
    tl.store(A + at * (C * C) + t * C + s, (acc * scale).to(A.dtype.element_ty))


@triton.jit
def plain(distance, half, EXCLUSIVE: tl.constexpr, RANGE: tl.constexpr):
    """Whether one product does blocks of ``2·half`` tokens, which decay by ``distance`` from their middles.

    Not for short blocks and ``EXCLUSIVE``: most of such a block's pairs have no gate between them, and the gate's gradient
    would be the difference of their sums.
    """
    enough = tl.max(tl.max(tl.abs(distance), 1), 0) < RANGE
    if EXCLUSIVE:
        enough = enough & (half >= 8)
    return enough


@triton.jit
def side(q, k, upper, rows, q_stride, k_stride, columns, L, K: tl.constexpr, BK: tl.constexpr):
    """Queries above the middle of a block and keys below it."""
    bq = load_tile(q, rows, q_stride, columns, L, K, BK)
    return tl.where(upper, bq, load_tile(k, rows, k_stride, columns, L, K, BK)).to(tl.float32)


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def walk(
    A, a, b, y, decay, start, out, end, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, yb, yt, yh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr, END: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Walk the chunks of a segment with a ``[K, BV]`` tile of the state in registers, and write a column of ``o`` or ``dv``.

    ``a, b`` meet the state and make it: ``read, write``, in reverse ``write, read``. ``y`` is ``v`` or ``do``.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    n, bos, L, row, low, high = span_of(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    if PACKED:
        chunk0 = tl.load(chunk_first + n).to(tl.int64)
    else:
        chunk0 = n * ((T + C - 1) // C)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    head = (row * T + bos) * HV + hv
    a += head * K
    b += head * K
    out += head * V
    y = at_head(y, row, bos, hv, yb, yt, yh, 1)
    tile, inside = state_tile(columns_k, columns_v, K, V)
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        S += tl.load(start + (i.to(tl.int64) * HV + hv) * (K * V) + tile, mask=inside, other=0.0).to(tl.float32)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    for step in range(low, high):
        chunk = step
        if REVERSE:
            chunk = low + high - 1 - step
        rows = chunk * C + tl.arange(0, C)
        at = (chunk0 + chunk) * HV + hv
        bA = tl.load(A + at * (C * C) + t * C + s)
        ba = load_tile(a, rows, HV * K, columns_k, L, K, BK)
        bb = load_tile(b, rows, HV * K, columns_k, L, K, BK)
        by = load_tile(y, rows, yt, columns_v, L, V, BV)
        rate = tl.exp2(tl.load(decay + at * K + columns_k, mask=columns_k < K, other=0.0))
        if ba.dtype == tl.float16:  # it has not the range of a state
            acc = times(ba.to(tl.float32), S, PREC)
        else:
            acc = times(ba, S.to(ba.dtype), PREC)
        if REVERSE:
            acc = product(tl.trans(bA), by, acc, PREC)
        else:
            acc = product(bA, by, acc, PREC)
        S = product(tl.trans(bb), by, S * rate[:, None], PREC)
        p = out + rows.to(tl.int64)[:, None] * HV * V + columns_v[None, :]
        tl.store(p, acc.to(out.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])
    if END:
        tl.store(end + (n * HV + hv) * (K * V) + tile, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def outputs(
    A, a, y, kept, out, owner, first, cu, T, PER, N, HV, yb, yt, yh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """What ``walk`` writes, from states in memory: a ``[C, BV]`` tile of one chunk."""
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_v = iv * BV + tl.arange(0, BV)
    at = i.to(tl.int64) * HV + hv
    head = (b * T + bos) * HV + hv
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    acc = tl.zeros((C, BV), tl.float32)
    for ik in range(NK):
        columns_k = ik * BK + tl.arange(0, BK)
        tile, inside = state_tile(columns_k, columns_v, K, V)
        ba = load_tile(a + head * K, rows, HV * K, columns_k, L, K, BK)
        bS = tl.load(kept + at * (K * V) + tile, mask=inside, other=0.0)
        acc = product(ba.to(bS.dtype), bS, acc, PREC)
    bA = tl.load(A + at * (C * C) + t * C + s)
    by = load_tile(at_head(y, b, bos, hv, yb, yt, yh, 1), rows, yt, columns_v, L, V, BV).to(DT)
    if REVERSE:
        acc = product(tl.trans(bA), by, acc, PREC)
    else:
        acc = product(bA, by, acc, PREC)
    p = out + head * V + rows.to(tl.int64)[:, None] * HV * V + columns_v[None, :]
    tl.store(p, acc.to(out.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def inter(
    do, v, kept, dkept, dA, dq, dk, met, owner, first, cu, T, PER, N, HV, scale, ob, ot, oh, vb, vt, vh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk of ``scale do Sᵀ`` and ``v dS'ᵀ [C, BK]``, of ``Σ_v S ∘ dS' [BK]`` and of ``dA [C, C]``.

    ``dA`` is written as a symmetric matrix: above its diagonal stands the transpose of what is below.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_k = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    do = at_head(do, b, bos, hv, ob, ot, oh, 1)
    v = at_head(v, b, bos, hv, vb, vt, vh, 1)
    at = i.to(tl.int64) * HV + hv
    below = tl.zeros((C, C), tl.float32)
    above = tl.zeros((C, C), tl.float32)
    bq = tl.zeros((C, BK), tl.float32)
    bk = tl.zeros((C, BK), tl.float32)
    both = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        tile, inside = state_tile(columns_k, columns_v, K, V)
        bo = load_tile(do, rows, ot, columns_v, L, V, BV)
        bv = load_tile(v, rows, vt, columns_v, L, V, BV)
        bS = tl.load(kept + at * (K * V) + tile, mask=inside, other=0.0)
        bD = tl.load(dkept + at * (K * V) + tile, mask=inside, other=0.0)
        bq = product(bo.to(bS.dtype), tl.trans(bS), bq, PREC)
        bk = product(bv.to(bS.dtype), tl.trans(bD), bk, PREC)
        below = product(bo, tl.trans(bv), below, PREC)
        above = product(bv, tl.trans(bo), above, PREC)
        both += tl.sum(bS.to(tl.float32) * bD.to(tl.float32), 1)
    p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns_k[None, :]
    keep = (rows < L)[:, None] & (columns_k < K)[None, :]
    tl.store(dq + p, (bq * scale).to(dq.dtype.element_ty), mask=keep)
    tl.store(dk + p, bk.to(dk.dtype.element_ty), mask=keep)
    tl.store(met + at * K + columns_k, both, mask=columns_k < K)
    if ik == 0:
        square = tl.where(s <= t, below, above) * scale
        tl.store(dA + at * (C * C) + t * C + s, square.to(dA.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def intra(
    q, k, G, u, dA, met, ones, dq, dk, dg, du, owner, first, cu, T, PER, N, HV, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, TERMS: tl.constexpr, RANGE: tl.constexpr,
    PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk, dg [C, BK]``. ``dq, dk`` hold what ``inter`` wrote.

    Sums over tokens are products with ``ones``; ``TERMS`` bfloat16 terms do for those that do not cancel.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    square = t * C + s
    at = i.to(tl.int64) * HV + hv
    p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
    keep = (rows < L)[:, None] & (columns < K)[None, :]
    q = at_head(q, b, bos, hv, qb, qt, qh, GROUP)
    k = at_head(k, b, bos, hv, kb, kt, kh, GROUP)
    bq = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
    bk = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32)
    G = at_head(G, b, bos, hv, gb, gt, gh, GATE_GROUP)
    bG = sums_at(G, rows, gt, columns, L, K)
    if EXCLUSIVE:
        Gq = sums_before(G, rows, gt, columns, L, K, C)
    else:
        Gq = bG
    end = tl.load(G + tl.minimum(piece * C + C - 1, L - 1) * gt + columns, mask=columns < K, other=0.0)
    dA += at * (C * C)
    bdq = tl.load(dq + p, mask=keep, other=0.0).to(tl.float32) * tl.exp2(Gq.to(tl.float32))
    bdg = added(tl.load(ones + square), bq * bdq, TERMS)
    bdk = tl.load(dk + p, mask=keep, other=0.0).to(tl.float32) * tl.exp2((end[None, :] - bG).to(tl.float32))
    bdg += added(tl.load(ones + C * C + square), bk * bdk, TERMS)
    through = tl.load(met + at * K + columns, mask=columns < K, other=0.0) * tl.exp2(end.to(tl.float32))
    bdg += through[None, :]
    ones += 2 * C * C
    half = C // 2
    while half > 0:  # operands are loaded again where they are needed: registers are what is short here
        from_q, from_k = distances(G, rows, half, gt, columns, L, K, C, EXCLUSIVE)
        pairs = tl.load(dA + square)
        apart = t ^ s
        if plain(from_k, half, EXCLUSIVE, RANGE):
            x = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32) * tl.exp2(-from_k)
            Z = times(tl.where((apart < 2 * half) & (s < t), pairs, 0.0).to(DT), x.to(DT), PREC)
            from_q, from_k = distances(G, rows, half, gt, columns, L, K, C, EXCLUSIVE)
            Z = Z * tl.exp2(from_q)
            bdq += Z
            x = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
            Z = Z * x
            pairs = tl.load(dA + square)
            x = x * tl.exp2(from_q)
            Y = times(tl.where((apart < 2 * half) & (s > t), pairs, 0.0).to(DT), x.to(DT), PREC)
            from_q, from_k = distances(G, rows, half, gt, columns, L, K, C, EXCLUSIVE)
            Y = Y * tl.exp2(-from_k)
            bdk += Y
            Y = Y * load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32)
            bdg += added(tl.load(ones + square), Z - Y, SPLIT)
            if EXCLUSIVE:
                bdg -= Y
            half = 0
        else:
            upper = (t & half) != 0
            e = tl.exp2(-tl.abs(tl.where(upper, from_q, from_k)))
            x = side(q, k, upper, rows, qt, kt, columns, L, K, BK)
            Z = e * times(tl.where((apart < 2 * half) & (apart >= half), pairs, 0.0).to(DT), (x * e).to(DT), PREC)
            bdq += tl.where(upper, Z, 0.0)
            bdk += tl.where(upper, 0.0, Z)
            x = side(q, k, upper, rows, qt, kt, columns, L, K, BK)
            bdg += added(tl.load(ones + C * C + square), x * Z, TERMS)
            half = half // 2
            ones += 2 * C * C
    bq = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
    bk = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32)
    weight = tl.load(dA + tl.arange(0, C) * (C + 1)).to(tl.float32)[:, None]
    if EXCLUSIVE:
        tl.store(du + at * K + columns, tl.sum(weight * bq * bk, 0), mask=columns < K)
        weight = weight * tl.load(u + hv * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    tl.store(dq + p, (bdq + weight * bk).to(dq.dtype.element_ty), mask=keep)
    tl.store(dk + p, (bdk + weight * bq).to(dk.dtype.element_ty), mask=keep)
    tl.store(dg + p, bdg.to(dg.dtype.element_ty), mask=keep)
