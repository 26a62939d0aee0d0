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

``prepare`` (here for at most a scalar gate, in :mod:`.vector` for a vector) makes ``A`` and ``L`` of every chunk at once,
``solve`` makes ``M`` of ``L``, ``forwards`` and ``backwards`` walk the chunks with a tile of the state in registers,
``gradients`` makes those of scores and operands; with a vector gate ``pairs`` makes those of scores first. No two programs of a
launch add to one place, and none waits for another or asks the host for a size. The walks hold, and keep, the state transposed,
``[V, K]``: so the left operand of every product comes from registers.

For few heads the walk is cut into segments. What a segment does to the state before it is affine: ``S' = P S + local``, with
``local`` its walk from zero and ``P [K, K]`` its walk from the identity without values (``IDENTITY``). ``carry`` chains them;
backwards, ``Pᵀ``.
"""

import triton
import triton.language as tl

from ..lib.indexing import sequence_of
from ..lib.tiles import BLOCK, LOG2E, decay_matrix, load_tile, prefix, product, row_gate, suffix, taken, times, total

__all__ = ["backwards", "carry", "forwards", "gate_gradients", "gradients", "pairs", "prepare", "solve"]


@triton.jit
def load_transposed(p, rows, stride, columns, L, W: tl.constexpr, BW: tl.constexpr):
    """``load_tile``, transposed on its way: ``[BW, C]``."""
    keep = (rows < L)[None, :]
    if W % BW != 0:
        keep = keep & (columns < W)[:, None]
    return tl.load(p + rows.to(tl.int64)[None, :] * stride + columns[:, None], mask=keep, other=0.0)


@triton.jit
def strength(p, rows, stride, columns_v, L, V: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr):
    """``beta`` of a chunk's tokens, float32: ``[1, C]`` if ``BETA`` is 1, ``[BV, C]`` if it is 2."""
    if BETA == 2:
        beta = tl.trans(load_tile(p, rows, stride, columns_v, L, V, BV)).to(tl.float32)
    else:
        beta = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)[None, :]
    return beta


@triton.jit
def block(L, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr):
    """Where block ``i, j`` of a ``[C, C]`` matrix is."""
    t = tl.arange(0, BLOCK)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    return L + (i * BLOCK + t) * C + j * BLOCK + s


@triton.jit
def minus(x, y, beta, z, PREC: tl.constexpr):
    """``x - y (beta z)``."""
    return x - times(y * beta[None, :], z, PREC)


@triton.jit
def weights(beta, rows, L, stride, BETA: tl.constexpr):
    """``beta`` of tokens, float32; ones if there is none."""
    if BETA == 1:
        return tl.load(beta + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)
    return tl.full(rows.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def solve(
    L, M, beta, owner, first, cu, T, PER, N, HV, bb, bt, bh,
    C: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``M = (I + L beta)⁻¹ L`` of one chunk, in blocks of 16 merged to 32 and 64. ``L`` is overwritten.

    With ``M₁, M₂`` of two neighbours and ``L₂₁`` between them, ``M₂₁ = (I - M₂ beta) L₂₁ (I - beta M₁)``.
    """
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, length, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    at = (i.to(tl.int64) * HV + hv) * (C * C)
    L += at
    M += at
    rows = piece * C + tl.arange(0, BLOCK)
    if BETA == 1:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    b0 = weights(beta, rows, length, bt, BETA)
    b1 = weights(beta, rows + BLOCK, length, bt, BETA)
    b2 = weights(beta, rows + 2 * BLOCK, length, bt, BETA)
    b3 = weights(beta, rows + 3 * BLOCK, length, bt, BETA)
    type = M.dtype.element_ty

    # Everything is asked for at once. Then the blocks on the diagonal, row after row: a column is a lane's, and so are its rows
    # above; the factors, which all lanes of a block share, come from the cache.
    column = tl.arange(0, C)
    top = column // BLOCK * BLOCK
    p = L + top * C + top
    given = ()
    strengths = ()
    for t in tl.static_range(BLOCK):
        given = given + (tl.load(p + t * C + column % BLOCK),)  # noqa: RUF005
        strengths = strengths + (weights(beta, piece * C + top + t, length, bt, BETA),)  # noqa: RUF005
    if C > BLOCK:
        L10 = tl.load(block(L, 1, 0, C))
    if C > 2 * BLOCK:
        L32 = tl.load(block(L, 3, 2, C))
        L20 = tl.load(block(L, 2, 0, C))
        L30 = tl.load(block(L, 3, 0, C))
        L21 = tl.load(block(L, 2, 1, C))
        L31 = tl.load(block(L, 3, 1, C))
    solved = (given[0],)
    scaled = (given[0] * strengths[0],)
    for t in tl.static_range(1, BLOCK):
        x = given[t]
        for s in tl.static_range(t):
            x -= tl.load(p + t * C + s) * scaled[s]
        solved = solved + (x,)  # noqa: RUF005
        scaled = scaled + (x * strengths[t],)  # noqa: RUF005
    tl.debug_barrier()
    for t in tl.static_range(1, BLOCK):
        tl.store(p + t * C + column % BLOCK, solved[t])
    tl.debug_barrier()
    M00 = tl.load(block(L, 0, 0, C))
    if C > BLOCK:
        M11 = tl.load(block(L, 1, 1, C))
    if C > 2 * BLOCK:
        M22 = tl.load(block(L, 2, 2, C))
        M33 = tl.load(block(L, 3, 3, C))
    tl.store(block(M, 0, 0, C), M00.to(type))
    if C > BLOCK:
        zero = tl.zeros((BLOCK, BLOCK), type)
        Y = minus(L10, M11, b1, L10, PREC)
        M10 = minus(Y, Y, b0, M00, PREC)
        tl.store(block(M, 1, 1, C), M11.to(type))
        tl.store(block(M, 1, 0, C), M10.to(type))
        tl.store(block(M, 0, 1, C), zero)
    if C > 2 * BLOCK:
        Y = minus(L32, M33, b3, L32, PREC)
        M32 = minus(Y, Y, b2, M22, PREC)
        tl.store(block(M, 2, 2, C), M22.to(type))
        tl.store(block(M, 3, 3, C), M33.to(type))
        tl.store(block(M, 3, 2, C), M32.to(type))
        Y20 = minus(L20, M22, b2, L20, PREC)
        Y21 = minus(L21, M22, b2, L21, PREC)
        Y30 = minus(minus(L30, M33, b3, L30, PREC), M32, b2, L20, PREC)
        Y31 = minus(minus(L31, M33, b3, L31, PREC), M32, b2, L21, PREC)
        M20 = minus(minus(Y20, Y20, b0, M00, PREC), Y21, b1, M10, PREC)
        M30 = minus(minus(Y30, Y30, b0, M00, PREC), Y31, b1, M10, PREC)
        tl.store(block(M, 2, 0, C), M20.to(type))
        tl.store(block(M, 3, 0, C), M30.to(type))
        tl.store(block(M, 2, 1, C), minus(Y21, Y21, b1, M11, PREC).to(type))
        tl.store(block(M, 3, 1, C), minus(Y31, Y31, b1, M11, PREC).to(type))
        tl.store(block(M, 0, 2, C), zero)
        tl.store(block(M, 0, 3, C), zero)
        tl.store(block(M, 1, 2, C), zero)
        tl.store(block(M, 1, 3, C), zero)
        tl.store(block(M, 2, 3, C), zero)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def prepare(
    q, k, g, A, L, rates, owner, first, cu, T, PER, N, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``A, L [C, C]`` of one chunk and, for a scalar gate, ``rates [2, C]``: ``e^G`` and ``e^{G_C - G}``."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, length, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
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
        bq = load_tile(q, rows, qt, columns, length, K, BK)
        bk = load_tile(k, rows, kt, columns, length, K, BK)
        qk = product(bq, tl.trans(bk), qk, PREC)
        kk = product(bk, tl.trans(bk), kk, PREC)
    qk = tl.where(s <= t, qk * scale, 0.0)
    kk = tl.where(s < t, kk, 0.0)
    if GATE == 1:
        bg = row_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, length)
        D = decay_matrix(bg, C, False, SPLIT)
        qk = tl.where(s <= t, qk * D, 0.0)
        kk = tl.where(s < t, kk * D, 0.0)
        p = rates + at * (3 * C) + tl.arange(0, C)
        G = prefix(bg, C, SPLIT) * LOG2E
        tl.store(p, tl.exp2(G))
        tl.store(p + C, tl.exp2(suffix(bg, C, SPLIT) * LOG2E))
        tl.store(p + 2 * C, G)
    square = at * (C * C) + t * C + s
    tl.store(A + square, qk.to(A.dtype.element_ty))
    if BETA == 2:
        tl.store(L + square, kk)
    else:  # solve reads no block above the diagonal
        tl.store(L + square, kk, mask=s // BLOCK <= t // BLOCK)


@triton.jit
def substituted(x, beta, L, C: tl.constexpr, REVERSE: tl.constexpr):
    """``e = x - L (beta ∘ e)`` token by token, or ``y = x - Lᵀ (beta ∘ y)``, for ``x, beta [BV, C]`` and ``L`` in memory."""
    t = tl.arange(0, C)
    for step in range(C - 1):
        j = step
        p = L + t * C + j
        if REVERSE:
            j = C - 1 - step
            p = L + j * C + t
        row = tl.sum(tl.where(t[None, :] == j, x * beta, 0.0), 1)
        x -= row[:, None] * tl.load(p).to(tl.float32)[None, :]
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
    """Walk the chunks of a sequence or segment with a ``[BV, K]`` tile of the state.

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
    inside = (columns_v < V)[:, None] & (columns_k < K)[None, :]
    tile = columns_v[:, None] * K + columns_k[None, :]
    there = columns_k[None, :] * V + columns_v[:, None]
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
    S = tl.zeros((BV, BK), tl.float32)
    if IDENTITY:
        S += tl.where(columns_k[None, :] == columns_v[:, None], 1.0, 0.0)
    if START:
        S += tl.load(start + at + there, mask=inside, other=0.0).to(tl.float32)
    for chunk in range(low, high):
        rows = chunk * C + tl.arange(0, C)
        here = (chunk0 + chunk) * HV + hv
        # What no product prefetches comes first, so that its latency is the first product's.
        if GATE == 1:
            rate = tl.load(rates + here * (3 * C) + tl.arange(0, C))
            later = tl.load(rates + here * (3 * C) + C + tl.arange(0, C))
            decay = tl.load(rates + here * (3 * C) + C - 1)
        if GATE == 2:
            decay = tl.load(rates + here * K + columns_k, mask=columns_k < K, other=0.0)[None, :]
        if BETA > 0:
            bbeta = strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        if KEEP:
            tl.store(kept + here * (K * V) + tile, S.to(kept.dtype.element_ty), mask=inside)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        old = S.to(ST)
        r = -times(old, tl.trans(bk.to(ST)), PREC)
        if OUT:
            bq = load_tile(q, rows, qt, columns_k, L, K, BK)
            acc = times(old, tl.trans(bq.to(ST)), PREC) * scale
        if GATE == 1:
            r = r * rate[None, :]
        if not IDENTITY:
            bv = load_transposed(v, rows, vt, columns_v, L, V, BV)
            if DPLR:
                r -= times(bv.to(ST), tl.trans(tl.load(L2 + here * (C * C) + t * C + s).to(ST)), PREC)
            else:
                r += bv.to(tl.float32)
        if BETA == 2:
            e = substituted(r, bbeta, M + here * (C * C), C, False)
        else:
            bM = tl.trans(tl.load(M + here * (C * C) + t * C + s))
            if BETA == 1:
                e = r - times((r * bbeta).to(ST), bM, PREC)
            else:
                e = r - times(r.to(ST), bM, PREC)
        x = e
        if BETA > 0:
            x = e * bbeta
        at_v = ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
        stored = (rows < L)[:, None] & (columns_v < V)[None, :]
        if KEEP:
            tl.store(errors + at_v, tl.trans(e.to(errors.dtype.element_ty)), mask=stored)
        if OUT:
            if GATE == 1:
                acc = acc * rate[None, :]
            bA = tl.load(A + here * (C * C) + t * C + s)
            acc = product(x.to(DT), tl.trans(bA), acc, PREC)
            if DPLR:
                acc = product(bv.to(DT), tl.trans(tl.load(A2 + here * (C * C) + t * C + s)), acc, PREC)
            tl.store(out + at_v, tl.trans(acc.to(out.dtype.element_ty)), mask=stored)
        if GATE == 1:
            x = x * later[None, :]
            S = S * decay
        if GATE == 2:
            S = S * decay
            bk = load_tile(write, rows, kt, columns_k, L, K, BK)
        S = product(x.to(ST), bk.to(ST), S, PREC)
        if DPLR and not IDENTITY:
            bk = load_tile(write2, rows, kt, columns_k, L, K, BK)
            S = product(bv.to(ST), bk.to(ST), S, PREC)
    if END:
        tl.store(end + at + there, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def backwards(
    q, k, do, beta, write, A, M, rates, start, end, kept, adjoint,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr,
    END: tl.constexpr, KEEP: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """Walk the chunks from the last with a ``[BV, K]`` tile of the state's gradient.

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
    inside = (columns_v < V)[:, None] & (columns_k < K)[None, :]
    tile = columns_v[:, None] * K + columns_k[None, :]
    there = columns_k[None, :] * V + columns_v[:, None]
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
    dS = tl.zeros((BV, BK), tl.float32)
    if START:
        dS += tl.load(start + at + there, mask=inside, other=0.0).to(tl.float32)
    for step in range(low, high):
        chunk = low + high - 1 - step
        rows = chunk * C + tl.arange(0, C)
        here = (chunk0 + chunk) * HV + hv
        if GATE == 1:
            rate = tl.load(rates + here * (3 * C) + tl.arange(0, C))
            later = tl.load(rates + here * (3 * C) + C + tl.arange(0, C))
            decay = tl.load(rates + here * (3 * C) + C - 1)
        if GATE == 2:
            decay = tl.load(rates + here * K + columns_k, mask=columns_k < K, other=0.0)[None, :]
        if BETA > 0:
            bbeta = strength(beta, rows, bt, columns_v, L, V, BV, BETA)
        if KEEP:
            tl.store(kept + here * (K * V) + tile, dS.to(kept.dtype.element_ty), mask=inside)
        bk = load_tile(k, rows, kt, columns_k, L, K, BK)
        if GATE == 2:
            bke = load_tile(write, rows, kt, columns_k, L, K, BK)
            dx = times(dS.to(ST), tl.trans(bke.to(ST)), PREC)
        else:
            dx = times(dS.to(ST), tl.trans(bk.to(ST)), PREC)
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        do_read = tl.trans(bdo).to(tl.float32) * scale
        if GATE == 1:
            do_read = do_read * rate[None, :]
            dx = dx * later[None, :]
        if GATE > 0:
            dS = dS * decay
        bq = load_tile(q, rows, qt, columns_k, L, K, BK)
        dS = product(do_read.to(ST), bq.to(ST), dS, PREC)
        bA = tl.load(A + here * (C * C) + t * C + s)
        dx = product(tl.trans(bdo.to(DT)), bA, dx, PREC)
        if BETA == 2:
            y = substituted(dx, bbeta, M + here * (C * C), C, True)
        else:
            bM = tl.load(M + here * (C * C) + t * C + s)
            if BETA == 1:
                y = dx - times((dx * bbeta).to(ST), bM, PREC)
            else:
                y = dx - times(dx.to(ST), bM, PREC)
        dr = -y
        if BETA > 0:
            dr = dr * bbeta
        if KEEP:
            at_v = ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
            stored = (rows < L)[:, None] & (columns_v < V)[None, :]
            tl.store(adjoint + at_v, tl.trans(y.to(adjoint.dtype.element_ty)), mask=stored)
        if GATE == 1:
            dr = dr * rate[None, :]
        dS = product(dr.to(ST), bk.to(ST), dS, PREC)
    if END:
        tl.store(end + at + there, dS, mask=inside)


@triton.jit(do_not_specialize=["PER", "HV"])
def carry(
    local, through, start, end, first, PER, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The state before each segment (in place in ``local``) and after the last, from what segments make of zero and identity.

    ``through [K, K]``, its transpose for gradients in reverse.
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


@triton.jit
def inner_gradients(
    do, ot, beta, bt, errors, rt, adjoint, et, dv, dbeta, rows, L, scale, own,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
    ST: tl.constexpr,
):  # fmt: skip
    """``dA = scale do xᵀ`` and ``dL = -dv xᵀ``, both lower triangular, of one chunk; if ``own``, ``dv`` and ``dbeta`` too."""
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
            bbeta = tl.trans(strength(beta, rows, bt, columns_v, L, V, BV, BETA))
            e = x.to(tl.float32)
            y = y.to(tl.float32)
            if BETA == 2:
                tl.store(dbeta + at_v, (y * e).to(dbeta.dtype.element_ty), mask=in_v)
            else:
                share += tl.sum(y * e, 1)
            x = (e * bbeta).to(ST)
            y = y * bbeta
            tl.store(dv + at_v, y.to(dv.dtype.element_ty), mask=in_v)
            y = y.to(ST)
        bdA = product(bdo.to(DT), tl.trans(x.to(DT)), bdA, PREC)
        bdL = product(y.to(ST), tl.trans(x.to(ST)), bdL, PREC)
    if BETA == 1:
        tl.store(dbeta + rows.to(tl.int64) * (et // V), share.to(dbeta.dtype.element_ty), mask=(rows < L) & own)
    return tl.where(s <= t, bdA * scale, 0.0), tl.where(s < t, -bdL, 0.0)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def pairs(
    do, beta, v, errors, adjoint, dA, dL, dA2, dL2, dv, dbeta, owner, first, cu, T, PER, N, HV, scale,
    ob, ot, oh, bb, bt, bh, vb, vt, vh,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr,
    PACKED: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """``inner_gradients`` of one chunk for a vector gate. ``DPLR``: ``v`` as a second ``x``, no ``dv``."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
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
    bdA, bdL = inner_gradients(
        do, ot, beta, bt, errors, HV * V, adjoint, HV * V, dv, dbeta, rows, L, scale, True, V, C, BV, BETA, PREC, DT, ST
    )  # fmt: skip
    square = (i.to(tl.int64) * HV + hv) * (C * C) + t * C + s
    tl.store(dA + square, taken(bdA, DT, PREC))
    tl.store(dL + square, bdL.to(dL.dtype.element_ty))
    if DPLR:
        bdA, bdL = inner_gradients(
            do, ot, beta, bt, v + b * vb + bos * vt + hv.to(tl.int64) * vh, vt, adjoint, HV * V, dv, dbeta, rows, L, scale,
            True, V, C, BV, BETA, PREC, DT, ST
        )  # fmt: skip
        tl.store(dA2 + square, taken(bdA, DT, PREC))
        tl.store(dL2 + square, bdL.to(dL.dtype.element_ty))


@triton.jit
def facing(
    a, at, beta, bt, states, others, rows, columns_k, L, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BETA: tl.constexpr, MEET: tl.constexpr, PREC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """``(beta ∘ a) Sᵀ [C, BK]`` and, if ``MEET``, what ``states`` and ``others`` have in common: ``Σ_v S ∘ S' [BK]``."""
    X = tl.zeros((C, BK), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        x = load_tile(a, rows, at, columns_v, L, V, BV)
        if BETA == 2:
            x = x.to(tl.float32) * tl.trans(strength(beta, rows, bt, columns_v, L, V, BV, BETA))
        inside = (columns_v < V)[:, None] & (columns_k < K)[None, :]
        tile = columns_v[:, None] * K + columns_k[None, :]
        bS = tl.load(states + tile, mask=inside, other=0.0)
        X = product(x.to(ST), bS, X, PREC)
        if MEET:
            met += tl.sum(bS.to(tl.float32) * tl.load(others + tile, mask=inside, other=0.0).to(tl.float32), 0)
    if BETA == 1:
        X = X * tl.trans(strength(beta, rows, bt, columns_k, L, V, BV, BETA))
    return X, met


@triton.jit
def exchanges(
    do, ot, beta, bt, errors, adjoint, et, kept, dkept, rows, columns_k, L, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr, MEET: tl.constexpr, PREC: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """With the states, each read once: ``do Sᵀ``, ``dv Sᵀ``, ``x dS'ᵀ [C, BK]`` and, if ``MEET``, ``Σ_v S ∘ dS' [BK]``."""
    read = tl.zeros((C, BK), tl.float32)
    compared = tl.zeros((C, BK), tl.float32)
    wrote = tl.zeros((C, BK), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        be = load_tile(errors, rows, et, columns_v, L, V, BV)
        by = load_tile(adjoint, rows, et, columns_v, L, V, BV)
        if BETA == 2:
            bbeta = tl.trans(strength(beta, rows, bt, columns_v, L, V, BV, BETA))
            be = (be.to(tl.float32) * bbeta).to(ST)
            by = (by.to(tl.float32) * bbeta).to(ST)
        inside = (columns_v < V)[:, None] & (columns_k < K)[None, :]
        tile = columns_v[:, None] * K + columns_k[None, :]
        bS = tl.load(kept + tile, mask=inside, other=0.0)
        bdS = tl.load(dkept + tile, mask=inside, other=0.0)
        read = product(bdo.to(ST), bS, read, PREC)
        compared = product(by, bS, compared, PREC)
        wrote = product(be, bdS, wrote, PREC)
        if MEET:
            met += tl.sum(bS.to(tl.float32) * bdS.to(tl.float32), 0)
    if BETA == 1:
        bbeta = tl.trans(strength(beta, rows, bt, columns_k, L, V, BV, BETA))
        compared = compared * bbeta
        wrote = wrote * bbeta
    return read, compared, wrote, met


@triton.jit
def put_sum(p, x, keep, TURN, PART: tl.constexpr):
    """Store ``x``; where ``PART`` heads take turns, added to the sum of those before."""
    if PART > 1:
        x += tl.load(p, mask=keep & (TURN > 0), other=0.0)
    tl.store(p, x.to(p.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "tiles_stride"])
def gradients(
    q, k, do, g, beta, errors, adjoint, rates, kept, dkept, dq, dk, dv, dg, dbeta,
    owner, first, cu, T, PER, N, HV, TURN, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    PART: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
    DT: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk [C, BK]``, ``dg`` and, in the first of its programs, ``dv, dbeta``: for at most a scalar gate.

    ``dg_j`` sums what crosses token ``j``: scores of pairs ``s < j ≤ t``, reads from ``t ≥ j``, writes from ``t < j``, and the
    state itself. Where ``PART`` value heads share ``dq, dk``, they take turns: this is the ``TURN``-th of each.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    heads = HV // PART
    hv = pid // NK % heads * PART + TURN
    i = pid // (NK * heads)
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
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
    kept += here * (K * V)
    dkept += here * (K * V)
    beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    at = head + rows * HV
    in_k = (rows < L)[:, None] & (columns_k < K)[None, :]
    at_k = ((b * T + bos + rows) * heads + hv // PART)[:, None] * K + columns_k[None, :]
    bdA, bdL = inner_gradients(
        do, ot, beta, bt, errors, HV * V, adjoint, HV * V, dv + head * V, dbeta + head * (V if BETA == 2 else 1), rows, L,
        scale, ik == 0, V, C, BV, BETA, PREC, DT, ST
    )  # fmt: skip
    if GATE == 1:
        bg = row_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, L)
        D = decay_matrix(bg, C, False, SPLIT)
        bdA = bdA * D
        bdL = bdL * D
    bdA = taken(bdA, DT, PREC)
    bdL = taken(bdL, DT, PREC)
    acc, compared, wrote, met = exchanges(
        do, ot, beta, bt, errors, adjoint, HV * V, kept, dkept, rows, columns_k, L, K, V, C, BK, BV, BETA, GATE == 1, PREC, ST
    )  # fmt: skip
    acc = acc * scale
    if GATE == 1:
        rates += here * (3 * C)
        rate = tl.load(rates + token)[:, None]
        acc = acc * rate
        compared = compared * rate
        wrote = wrote * tl.load(rates + C + token)[:, None]
        through = tl.sum(met, 0) * tl.load(rates + C - 1)

    # The query's side.
    bq = load_tile(q, rows, qt, columns_k, L, K, BK)
    bk = load_tile(k, rows, kt, columns_k, L, K, BK)
    if GATE == 1 and SPLIT == 3:
        read = tl.sum(bq.to(tl.float32) * acc, 1)
        crossing = tl.where(s < t, bdA * times(bq, tl.trans(bk), PREC), 0.0)
    acc = product(bdA, bk.to(DT), acc, PREC)
    put_sum(dq + at_k, acc, in_k, TURN, PART)
    if GATE == 1 and SPLIT < 3:
        read = tl.sum(bq.to(tl.float32) * acc, 1)

    # The key that is written, then the key that reads.
    bk = load_tile(k, rows, kt, columns_k, L, K, BK)
    if GATE == 1:
        late = tl.sum(bk.to(tl.float32) * wrote, 1)
    bq = load_tile(q, rows, qt, columns_k, L, K, BK)
    wrote = product(tl.trans(bdA), bq.to(DT), wrote, PREC)
    wrote = product(tl.trans(bdL), bk.to(DT), wrote, PREC)
    compared = -compared
    if GATE == 1 and SPLIT == 3:
        read += tl.sum(bk.to(tl.float32) * compared, 1)
        crossing += bdL * times(bk, tl.trans(bk), PREC)
    compared = product(bdL, bk.to(DT), compared, PREC)
    put_sum(dk + at_k, wrote + compared, in_k, TURN, PART)
    if GATE == 1:
        if SPLIT == 3:  # the sums that define dg, with no cancellation
            across = tl.sum(tl.where(s < t, total(s >= t, crossing, SPLIT), 0.0), 1) + through
            across += tl.sum(tl.where(s >= t, read[None, :], 0.0), 1) + tl.sum(tl.where(s < t, late[None, :], 0.0), 1)
        else:
            across = read + tl.sum(bk.to(tl.float32) * (compared - wrote), 1)
            across += suffix(across, C, SPLIT) + tl.sum(late, 0) + through
            across = tl.where(bg > -87.0, across, 0.0)  # e^g is zero, and so is its gradient
        tl.store(dg + ik * tiles_stride + at, across, mask=rows < L)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "tiles_stride"])
def gate_gradients(
    shares, g, dg, owner, first, cu, T, PER, N, HV, tiles_stride, gb, gt, gh,
    C: tl.constexpr, TILES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``dg`` of one chunk with a scalar gate, of the sums over ``TILES`` tiles of keys that its gradients left.

    A tile's are two numbers a token: what its gate and all before it in the chunk get, and what every gate of the chunk gets.
    """
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    t = tl.arange(0, C)
    rows = piece * C + t
    bg = row_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, L)
    shares += pid.to(tl.int64) * (2 * C) + t
    across = tl.load(shares)
    whole = tl.load(shares + C)
    for tile in tl.static_range(1, TILES):
        across += tl.load(shares + tile * tiles_stride)
        whole += tl.load(shares + tile * tiles_stride + C)
    across += suffix(across, C, 1) + tl.sum(whole, 0)
    across = tl.where(bg > -87.0, across, 0.0)  # e^g is zero, and so is its gradient
    tl.store(dg + (b * T + bos + rows) * HV + hv, across, mask=rows < L)
