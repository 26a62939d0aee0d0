"""Chunk kernels of a gate per key channel: ``gla`` and ``rwkv6``. The gate is applied once; the scan of states has none left.

In chunks of ``C`` tokens, with ``S`` the state before a chunk and ``dS'`` the gradient of the state after it::

    scores   A_ts = scale Σ_k q_t k_s e^{G_t - G_s}, s ≤ t      read = scale q ∘ e^G      write = k ∘ e^{G_C - G}
    states   S' = Diag(e^{G_C}) S + writeᵀ v                    reverse  dS = Diag(e^{G_C}) dS' + readᵀ do
    scan     o  = A v + read S                                  reverse  dv = Aᵀ do + write dS'
    inter    dA = scale do vᵀ     scale do Sᵀ     v dS'ᵀ        Σ_v S ∘ dS'
    intra    dq_t = Σ_{s≤t} dA_ts k_s e^{G_t - G_s} + e^{G_t} scale do_t Sᵀ
             dk_s = Σ_{t≥s} dA_ts q_t e^{G_t - G_s} + e^{G_C - G_s} v_s dS'ᵀ
             dg_j = Σ_{s<j≤t} q_t dA_ts k_s e^{G_t - G_s} + Σ_{t≥j} q dq_inter + Σ_{t<j} k dk_inter + e^{G_C} Σ_v S ∘ dS'

In a block of tokens that decays by less than ``2^RANGE``, all decays are measured from half of its own: ``A`` is one product
``(q e^{G-c}) (k e^{c-G})ᵀ``. Where a chunk decays by more, the pairs on two sides of its middle are measured from there, where
both exponents are sums of gates, so ``≤ 0``; and its halves are the next blocks. Every gate down to ``-inf`` is exact, and what
strong gates cost is three to six products of ``[C, K]`` tiles in place of one. Sums over tokens are products with matrices of
ones and zeros (``masks``): a sum of its own for each use has no cancellation, so a reset leaves the others exact.

RWKV-6 reads ``S⁻``: ``G_{t-1}`` replaces ``G_t`` on the query's side (``EXCLUSIVE``) and ``u`` weighs the diagonal of ``A``.
"""

import triton
import triton.language as tl

from ..lib.gates import BLOCK, LOG2E, load_gate
from ..lib.indexing import (
    chunk_at,
    head_pointer,
    items_there,
    load_state,
    locate_segment,
    locate_sequence,
    state_offsets,
)
from ..lib.tiles import INTERPRETED, dot, dot_add, load_tile, smallest
from .gate import AFTER, BEFORE, BLOCKS, FROM, LEVELS, UNTIL, load_chunk_decay

__all__ = [
    "diagonal_vector_inter_bwd",
    "diagonal_vector_intra_bwd",
    "diagonal_vector_outputs",
    "diagonal_vector_scan",
    "diagonal_vector_scores_fwd",
    "two_sided_products",
]


@triton.jit
def token_sum(masks, place, x, C: tl.constexpr, SPLIT: tl.constexpr):
    """One of ``masks`` times ``x``. float32 goes in ``SPLIT`` bfloat16 terms, which is exact for three."""
    return accumulate_sum(tl.zeros(x.shape, tl.float32), masks, place, x, C, SPLIT)


@triton.jit
def accumulate_sum(acc, masks, place, x, C: tl.constexpr, SPLIT: tl.constexpr):
    """``acc`` and that."""
    ones = tl.load(masks + place * C * C + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])
    if INTERPRETED:
        acc += tl.dot(ones.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    elif x.dtype == tl.bfloat16:
        acc = tl.dot(ones, x, acc)
    elif x.dtype == tl.float16:
        acc = tl.dot(ones.to(tl.float16), x, acc)
    else:
        part = x.to(tl.bfloat16)
        acc = tl.dot(ones, part, acc)
        if SPLIT > 1:
            rest = x - part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            acc = tl.dot(ones, part, acc)
        if SPLIT > 2:
            part = (rest - part.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(ones, part, acc)
    return acc


@triton.jit
def level_rows(q, k, upper, rows, q_stride, k_stride, columns, L, K: tl.constexpr, BK: tl.constexpr):
    """Queries above the middle of a block and keys below it."""
    bq = load_tile(q, rows, q_stride, columns, L, K, BK)
    return tl.where(upper, bq, load_tile(k, rows, k_stride, columns, L, K, BK)).to(tl.float32)


@triton.jit
def plain_block_half(masks, g, C: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr):
    """Half of the longest block, of ``BLOCK`` or of 4 tokens, that never decays by ``2^RANGE``; 0 if there is none.

    Not for short blocks and ``EXCLUSIVE``: most of such a block's pairs have no gate between them, and the gate's gradient
    would be the difference of their sums.
    """
    stop = 0
    if smallest(tl.min(token_sum(masks, BLOCKS, g, C, SPLIT), 1)) * LOG2E > -RANGE:
        stop = BLOCK // 2
    elif not EXCLUSIVE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if smallest(tl.min(token_sum(masks, BLOCKS + 3, g, C, SPLIT), 1)) * LOG2E > -RANGE:
            stop = 2
    return stop


@triton.jit
def block_decays(masks, stop, g, C: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr):
    """Log2 decays inside each block of ``2·stop`` tokens, measured from half of its own: the query's side and the key's."""
    place = BLOCKS
    if stop == 2:
        place += 3
    c = token_sum(masks, place, g, C, SPLIT) * 0.5
    Gq = (token_sum(masks, place + 1, g, C, SPLIT) - c) * LOG2E
    G = Gq
    if EXCLUSIVE:
        G = Gq + g.to(tl.float32) * LOG2E
    return Gq, G


@triton.jit
def chunk_scores(
    i, hv, piece, b, bos, L, q, k, g, u, masks, A, read, write, decay, stops, T, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, STRONG: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """What ``diagonal_vector_scores_fwd`` makes of one chunk; unless ``STRONG``, only of the channels that one product does."""
    NK: tl.constexpr = (K + BK - 1) // BK
    OWN: tl.constexpr = STRONG or EXCLUSIVE  # a diagonal that is none of the product's
    rows = piece * C + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
    at = i.to(tl.int64) * HV + hv
    acc = tl.zeros((C, C), tl.float32)
    own = tl.zeros((C,), tl.float32)
    for ik in range(NK):
        columns = ik * BK + tl.arange(0, BK)
        p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
        keep = (rows < L)[:, None] & (columns < K)[None, :]
        bg = load_gate(g, rows, gt, columns, L, K, BK)
        bq = load_tile(q, rows, qt, columns, L, K, BK)
        bk = load_tile(k, rows, kt, columns, L, K, BK)
        if OWN:
            both = bq.to(tl.float32) * bk.to(tl.float32)
            if EXCLUSIVE:
                both = both * tl.load(u + hv * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
            own += tl.sum(both, 1)
        Gq = token_sum(masks, UNTIL, bg, C, SPLIT) * LOG2E
        if STRONG or EXCLUSIVE:
            whole = tl.sum(bg.to(tl.float32), 0) * LOG2E
        else:  # the last row, which lies as the product does
            whole = tl.sum(tl.where(t == C - 1, Gq, 0.0), 0)
        tl.store(decay + at * K + columns, whole, mask=columns < K)
        stop = 0
        if smallest(whole) > -RANGE:
            stop = C // 2
            c = whole * 0.5
            x = bq.to(tl.float32) * tl.exp2(Gq - c[None, :])
            tl.store(read + p, (x * (tl.exp2(c) * scale)[None, :]).to(read.dtype.element_ty), mask=keep)
            left = x.to(DT)
            if EXCLUSIVE:
                Gq += bg.to(tl.float32) * LOG2E
            x = bk.to(tl.float32) * tl.exp2(c[None, :] - Gq)
            tl.store(write + p, (x * tl.exp2(c)[None, :]).to(write.dtype.element_ty), mask=keep)
            acc = dot_add(left, tl.trans(x.to(DT)), acc, PREC)
        elif STRONG:
            tl.store(read + p, (bq.to(tl.float32) * (tl.exp2(Gq) * scale)).to(read.dtype.element_ty), mask=keep)
            x = bk.to(tl.float32) * tl.exp2(token_sum(masks, AFTER, bg, C, SPLIT) * LOG2E)
            tl.store(write + p, x.to(write.dtype.element_ty), mask=keep)
            stop = plain_block_half(masks, bg, C, EXCLUSIVE, SPLIT, RANGE)
            half = C // 2
            place = LEVELS
            while half > stop:
                e = tl.exp2(token_sum(masks, place, bg, C, SPLIT) * LOG2E)
                x = level_rows(q, k, (t & half) != 0, rows, qt, kt, columns, L, K, BK) * e
                apart = (t ^ s) + half * 0
                acc += tl.where((apart < 2 * half) & (apart >= half), dot(x.to(DT), tl.trans(x.to(DT)), PREC), 0.0)
                half = half // 2
                place += 2
            if stop > 0:
                Gq, G = block_decays(masks, stop, bg, C, EXCLUSIVE, SPLIT)
                left = (load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32) * tl.exp2(Gq)).to(DT)
                x = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32) * tl.exp2(-G)
                acc += tl.where((t ^ s) < 2 * stop, dot(left, tl.trans(x.to(DT)), PREC), 0.0)
        tl.store(stops + at * NK + ik, stop)
    if OWN:
        acc = tl.where(s < t, acc, 0.0) + tl.where(s == t, own[:, None], 0.0)
    else:
        acc = tl.where(s <= t, acc, 0.0)
    tl.store(A + at * (C * C) + t * C + s, (acc * scale).to(A.dtype.element_ty))


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def diagonal_vector_scores_fwd(
    q, k, g, u, masks, A, read, write, decay, stops, owner, first, cu, T, PER, N, HV, COUNT, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, STRONG: tl.constexpr,
    PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``A [C, C]``, ``read, write [C, K]`` and ``G_C [K]``, base 2, of every chunk, and half the length of its plain blocks.

    First one program a chunk, of ``COUNT``, which marks the chunks with channels that one product does not do: 0. Then, with
    ``STRONG``, a few programs look for those and do them.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    if STRONG:
        COUNT = items_there(COUNT, first, N, HV, PACKED)
        jump = tl.num_programs(0)
        least = C // 2
        for base in range(pid, COUNT, jump * 64):
            items = base + tl.arange(0, 64) * jump
            for part in tl.static_range(NK):
                found = tl.load(stops + items * NK + part, mask=items < COUNT, other=C // 2)
                least = tl.minimum(least, tl.min(found, 0))
        if least == C // 2:
            return
        for item in range(pid, COUNT, jump):
            least = C // 2
            for part in tl.static_range(NK):
                least = tl.minimum(least, tl.load(stops + item * NK + part))
            if least < C // 2:
                i = item // HV
                _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
                chunk_scores(
                    i, item % HV, piece, b, bos, L, q, k, g, u, masks, A, read, write, decay, stops, T, HV, scale,
                    qb, qt, qh, kb, kt, kh, gb, gt, gh, K, C, BK, GROUP, GATE_GROUP, EXCLUSIVE, SPLIT, RANGE, True, PREC, DT,
                )  # fmt: skip
    else:
        i = pid // HV
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if tl.load(owner + i) >= N:
                return
        _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
        chunk_scores(
            i, pid % HV, piece, b, bos, L, q, k, g, u, masks, A, read, write, decay, stops, T, HV, scale,
            qb, qt, qh, kb, kt, kh, gb, gt, gh, K, C, BK, GROUP, GATE_GROUP, EXCLUSIVE, SPLIT, RANGE, False, PREC, DT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def diagonal_vector_scan(
    A, a, b, y, decay, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, yb, yt, yh,
    sn, sh, sk, sv,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr, END: tl.constexpr, KEEP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Scan the chunks of a segment with a ``[K, BV]`` tile of the state in registers, and write a column of ``o`` or ``dv``.

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
    n, bos, L, row, low, high = locate_segment(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
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
    y = head_pointer(y, row, bos, hv, yb, yt, yh, 1)
    tile, inside = state_offsets(columns_k, columns_v, K, V)
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        S += load_state(start, i, hv, columns_k[:, None], columns_v[None, :], inside, sn, sh, sk, sv)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    later = load_chunk_decay(decay, chunk0, chunk_at(low, low, high, REVERSE), hv, HV, columns_k, low < high, K)
    for step in range(low, high):
        chunk = chunk_at(step, low, high, REVERSE)
        rows = chunk * C + tl.arange(0, C)
        at = (chunk0 + chunk) * HV + hv
        rate = tl.exp2(later)
        if KEEP:
            tl.store(kept + at * (K * V) + tile, S.to(kept.dtype.element_ty), mask=inside)
        bA = tl.load(A + at * (C * C) + t * C + s)
        ba = load_tile(a, rows, HV * K, columns_k, L, K, BK)
        bb = load_tile(b, rows, HV * K, columns_k, L, K, BK)
        by = load_tile(y, rows, yt, columns_v, L, V, BV)
        later = load_chunk_decay(decay, chunk0, chunk_at(step + 1, low, high, REVERSE), hv, HV, columns_k, step + 1 < high, K)
        if ba.dtype == tl.float16:  # it has not the range of a state
            acc = dot(ba.to(tl.float32), S, PREC)
        else:
            acc = dot(ba, S.to(ba.dtype), PREC)
        if REVERSE:
            acc = dot_add(tl.trans(bA), by.to(bA.dtype), acc, PREC)
        else:
            acc = dot_add(bA, by.to(bA.dtype), acc, PREC)
        S = dot_add(tl.trans(bb), by, S * rate[:, None], PREC)
        p = out + rows.to(tl.int64)[:, None] * HV * V + columns_v[None, :]
        tl.store(p, acc.to(out.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])
    if END:
        tl.store(end + (n * HV + hv) * (K * V) + tile, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def diagonal_vector_outputs(
    A, a, y, kept, out, owner, first, cu, T, PER, N, HV, yb, yt, yh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """What ``diagonal_vector_scan`` writes, from states in memory: a ``[C, BV]`` tile of one chunk."""
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
    at = i.to(tl.int64) * HV + hv
    head = (b * T + bos) * HV + hv
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    acc = tl.zeros((C, BV), tl.float32)
    for ik in range(NK):
        columns_k = ik * BK + tl.arange(0, BK)
        tile, inside = state_offsets(columns_k, columns_v, K, V)
        ba = load_tile(a + head * K, rows, HV * K, columns_k, L, K, BK)
        bS = tl.load(kept + at * (K * V) + tile, mask=inside, other=0.0)
        acc = dot_add(ba.to(bS.dtype), bS, acc, PREC)
    bA = tl.load(A + at * (C * C) + t * C + s)
    by = load_tile(head_pointer(y, b, bos, hv, yb, yt, yh, 1), rows, yt, columns_v, L, V, BV).to(DT)
    if REVERSE:
        acc = dot_add(tl.trans(bA), by, acc, PREC)
    else:
        acc = dot_add(bA, by, acc, PREC)
    p = out + head * V + rows.to(tl.int64)[:, None] * HV * V + columns_v[None, :]
    tl.store(p, acc.to(out.dtype.element_ty), mask=(rows < L)[:, None] & (columns_v < V)[None, :])


@triton.jit
def two_sided_products(
    do, ot, v, vt, kept, dkept, rows, columns_k, L,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``do vᵀ``, its transpose, ``do Sᵀ``, ``v dS'ᵀ`` and ``Σ_v S ∘ dS'``."""
    below = tl.zeros((C, C), tl.float32)
    above = tl.zeros((C, C), tl.float32)
    bq = tl.zeros((C, BK), tl.float32)
    bk = tl.zeros((C, BK), tl.float32)
    both = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        tile, inside = state_offsets(columns_k, columns_v, K, V)
        bo = load_tile(do, rows, ot, columns_v, L, V, BV)
        bv = load_tile(v, rows, vt, columns_v, L, V, BV)
        bS = tl.load(kept + tile, mask=inside, other=0.0)
        bD = tl.load(dkept + tile, mask=inside, other=0.0)
        bq = dot_add(bo.to(bS.dtype), tl.trans(bS), bq, PREC)
        bk = dot_add(bv.to(bS.dtype), tl.trans(bD), bk, PREC)
        below = dot_add(bo, tl.trans(bv), below, PREC)
        above = dot_add(bv, tl.trans(bo), above, PREC)
        both += tl.sum(bS.to(tl.float32) * bD.to(tl.float32), 1)
    return below, above, bq, bk, both


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def diagonal_vector_inter_bwd(
    do, v, kept, dkept, dA, own, dq, dk, met, owner, first, cu, T, PER, N, HV, scale, ob, ot, oh, vb, vt, vh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """One chunk of ``scale do Sᵀ`` and ``v dS'ᵀ [C, BK]``, of ``Σ_v S ∘ dS' [BK]`` and of ``dA``.

    ``dA`` is two matrices ``[C, C]``: what is below its diagonal, and the transpose of that. ``own`` is the diagonal.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    columns_k = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    do = head_pointer(do, b, bos, hv, ob, ot, oh, 1)
    v = head_pointer(v, b, bos, hv, vb, vt, vh, 1)
    at = i.to(tl.int64) * HV + hv
    below, above, bq, bk, both = two_sided_products(
        do, ot, v, vt, kept + at * (K * V), dkept + at * (K * V), rows, columns_k, L, K, V, C, BK, BV, PREC
    )
    p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns_k[None, :]
    keep = (rows < L)[:, None] & (columns_k < K)[None, :]
    tl.store(dq + p, (bq * scale).to(dq.dtype.element_ty), mask=keep)
    tl.store(dk + p, bk.to(dk.dtype.element_ty), mask=keep)
    tl.store(met + at * K + columns_k, both, mask=columns_k < K)
    if ik == 0:
        square = dA + at * (2 * C * C) + t * C + s
        tl.store(square, tl.where(s < t, below * scale, 0.0).to(dA.dtype.element_ty))
        tl.store(square + C * C, tl.where(s > t, above * scale, 0.0).to(dA.dtype.element_ty))
        tl.store(own + at * C + tl.arange(0, C), tl.sum(tl.where(s == t, below, 0.0), 1) * scale)


@triton.jit
def intra_plain(
    i, hv, ik, rows, keep, p, b, bos, L, q, k, g, u, masks, dA, own, met, decay, dq, dk, dg, du, HV, qb, qt, qh, kb, kt, kh,
    gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """A tile of ``dq, dk, dg`` where one product does the chunk. Every operand is loaded once, where it is needed first."""
    columns = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    at = i.to(tl.int64) * HV + hv
    square = dA + at * (2 * C * C) + t * C + s
    there = L > 0
    weight = tl.load(own + at * C + tl.arange(0, C), mask=there, other=0.0)[:, None]
    bg = load_gate(head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP), rows, gt, columns, L, K, BK)
    whole = tl.load(decay + at * K + columns, mask=(columns < K) & there, other=0.0)
    c = tl.exp2(whole * 0.5)[None, :]
    through = tl.load(met + at * K + columns, mask=(columns < K) & there, other=0.0) * tl.exp2(whole)
    Gq = token_sum(masks, UNTIL, bg, C, SPLIT) * LOG2E - (whole * 0.5)[None, :]
    G = Gq
    if EXCLUSIVE:
        G = Gq + bg.to(tl.float32) * LOG2E
    bk = load_tile(head_pointer(k, b, bos, hv, kb, kt, kh, GROUP), rows, kt, columns, L, K, BK)
    x = bk.to(tl.float32) * tl.exp2(-G)
    Z = tl.load(dq + p, mask=keep, other=0.0).to(tl.float32) * c
    e = tl.exp2(Gq)
    Z = dot_add(tl.load(square, mask=there, other=0.0), x.to(DT), Z, PREC) * e
    bq = load_tile(head_pointer(q, b, bos, hv, qb, qt, qh, GROUP), rows, qt, columns, L, K, BK)
    if EXCLUSIVE:
        both = bq.to(tl.float32) * bk.to(tl.float32)
        tl.store(du + at * K + columns, tl.sum(weight * both, 0), mask=(columns < K) & there)
        weight = weight * tl.load(u + hv * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    tl.store(dq + p, (Z + weight * bk.to(tl.float32)).to(dq.dtype.element_ty), mask=keep)
    bdg = bq.to(tl.float32) * Z
    Z = tl.load(dk + p, mask=keep, other=0.0).to(tl.float32) * c
    through += tl.sum(x * Z, 0)
    x = bq.to(tl.float32) * e
    Z = dot_add(tl.load(square + C * C, mask=there, other=0.0), x.to(DT), Z, PREC) * tl.exp2(-G)
    tl.store(dk + p, (Z + weight * bq.to(tl.float32)).to(dk.dtype.element_ty), mask=keep)
    x = bk.to(tl.float32) * Z
    bdg = token_sum(masks, FROM, bdg - x, C, SPLIT)
    if EXCLUSIVE:
        bdg -= x
    tl.store(dg + p, (bdg + through[None, :]).to(dg.dtype.element_ty), mask=keep)


@triton.jit
def intra_levels(
    i, hv, ik, rows, keep, p, b, bos, L, stop, q, k, g, u, masks, dA, own, met, decay, dq, dk, dg, du, HV,
    qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, TERMS: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """A tile of ``dq, dk, dg`` under strong gates. Operands are loaded again where they are needed: registers are short."""
    columns = ik * BK + tl.arange(0, BK)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    square = t * C + s
    at = i.to(tl.int64) * HV + hv
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
    dA += at * (2 * C * C)
    weight = tl.load(own + at * C + tl.arange(0, C))[:, None]
    if EXCLUSIVE:
        both = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32) * load_tile(k, rows, kt, columns, L, K, BK).to(
            tl.float32
        )
        tl.store(du + at * K + columns, tl.sum(weight * both, 0), mask=columns < K)
        weight = weight * tl.load(u + hv * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    bg = load_gate(g, rows, gt, columns, L, K, BK)
    whole = tl.load(decay + at * K + columns, mask=columns < K, other=0.0)
    through = tl.load(met + at * K + columns, mask=columns < K, other=0.0) * tl.exp2(whole)
    Gq = token_sum(masks, UNTIL, bg, C, SPLIT) * LOG2E
    bdq = tl.load(dq + p, mask=keep, other=0.0).to(tl.float32) * tl.exp2(Gq)
    x = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32) * bdq
    bdg = token_sum(masks, FROM, x, C, TERMS)
    bdk = tl.load(dk + p, mask=keep, other=0.0).to(tl.float32) * tl.exp2(token_sum(masks, AFTER, bg, C, SPLIT) * LOG2E)
    x = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32) * bdk
    bdg = accumulate_sum(bdg, masks, BEFORE, x, C, TERMS)
    half = C // 2
    place = LEVELS
    while half > stop:
        upper = (t & half) != 0
        e = tl.exp2(token_sum(masks, place, bg, C, SPLIT) * LOG2E)
        x = level_rows(q, k, upper, rows, qt, kt, columns, L, K, BK) * e
        pairs = tl.load(dA + square) + tl.load(dA + C * C + square)
        apart = (t ^ s) + half * 0
        pairs = tl.where((apart < 2 * half) & (apart >= half), pairs, 0.0).to(DT)
        Z = dot(pairs, x.to(DT), PREC) * e
        bdq += tl.where(upper, Z, 0.0)
        bdk += tl.where(upper, 0.0, Z)
        x = level_rows(q, k, upper, rows, qt, kt, columns, L, K, BK) * Z
        bdg = accumulate_sum(bdg, masks, place + 1, x, C, TERMS)
        half = half // 2
        place += 2
    if stop > 0:
        near = (t ^ s) < 2 * stop
        bg = load_gate(g, rows, gt, columns, L, K, BK)
        Gq, G = block_decays(masks, stop, bg, C, EXCLUSIVE, SPLIT)
        x = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32) * tl.exp2(-G)
        Z = dot(tl.where(near, tl.load(dA + square), 0.0).to(DT), x.to(DT), PREC)
        e = tl.exp2(Gq)
        Z = Z * e
        bdq += Z
        x = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
        Z = Z * x
        x = x * e
        Y = dot(tl.where(near, tl.load(dA + C * C + square), 0.0).to(DT), x.to(DT), PREC) * tl.exp2(-G)
        bdk += Y
        x = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32) * Y
        place = BLOCKS + 2
        if stop == 2:
            place += 3
        bdg = accumulate_sum(bdg, masks, place, Z - x, C, SPLIT)
        if EXCLUSIVE:
            bdg -= x
    x = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32)
    tl.store(dq + p, (bdq + weight * x).to(dq.dtype.element_ty), mask=keep)
    x = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
    tl.store(dk + p, (bdk + weight * x).to(dk.dtype.element_ty), mask=keep)
    tl.store(dg + p, (bdg + through[None, :]).to(dg.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def diagonal_vector_intra_bwd(
    q, k, g, u, masks, dA, own, met, decay, stops, dq, dk, dg, du, owner, first, cu, T, PER, N, HV, COUNT,
    qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr,
    EXCLUSIVE: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, TERMS: tl.constexpr, STRONG: tl.constexpr,
    STAGES: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """``dq, dk, dg [C, BK]`` of the chunks that are ``STRONG``, or of the others; ``COUNT`` tiles in all.

    ``dq, dk`` hold what ``diagonal_vector_inter_bwd`` wrote. ``TERMS`` do for sums without cancellation.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    jump = tl.num_programs(0)
    COUNT = items_there(COUNT, first, N, NK * HV, PACKED)
    theirs = 0
    for base in range(pid, COUNT, jump * 64):
        items = base + tl.arange(0, 64) * jump
        found = tl.load(stops + items, mask=items < COUNT, other=-1)
        theirs += tl.sum(((found >= 0) & ((found < C // 2) == STRONG)).to(tl.int32), 0)
    if theirs == 0:
        return
    for item in tl.range(pid, COUNT, jump, num_stages=STAGES):
        ik = item % NK
        hv = item // NK % HV
        i = item // (NK * HV)
        stop = tl.load(stops + item)
        _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
        rows = piece * C + tl.arange(0, C)
        columns = ik * BK + tl.arange(0, BK)
        p = ((b * T + bos + rows) * HV + hv)[:, None] * K + columns[None, :]
        if STRONG:
            if stop < C // 2:
                keep = (rows < L)[:, None] & (columns < K)[None, :]
                intra_levels(
                    i, hv, ik, rows, keep, p, b, bos, L, stop, q, k, g, u, masks, dA, own, met, decay, dq, dk, dg, du, HV,
                    qb, qt, qh, kb, kt, kh, gb, gt, gh, K, C, BK, GROUP, GATE_GROUP, EXCLUSIVE, SPLIT, TERMS, PREC, DT,
                )  # fmt: skip
        else:
            L = tl.where(stop == C // 2, L, 0)
            keep = (rows < L)[:, None] & (columns < K)[None, :]
            intra_plain(
                i, hv, ik, rows, keep, p, b, bos, L, q, k, g, u, masks, dA, own, met, decay, dq, dk, dg, du, HV,
                qb, qt, qh, kb, kt, kh, gb, gt, gh, K, C, BK, GROUP, GATE_GROUP, EXCLUSIVE, SPLIT, PREC, DT,
            )  # fmt: skip
