"""The state of the delta families, carried across chunks, and its gradient.

In chunks of ``C`` tokens, ``S`` the state before a chunk, ``G`` the running sum of the gates inside it, ``γ = e^{G_C}``, and
``A, M`` its scores (:mod:`.scores`). The *error* ``e`` of a token is what its value lacks, ``x = beta ∘ e`` what is written::

    errors     r = v - (k ∘ e^G) S      (I + L beta) e = r            e = r - M (beta ∘ r)
    forward    o = scale (q ∘ e^G) S + A x                            S' = γ S + (k ∘ e^{G_C - G})ᵀ x
    adjoint    dx = Aᵀ do + (k ∘ e^{G_C - G}) dS'                     y = dx - Mᵀ (beta ∘ dx),  dv = beta ∘ y
               dS = γ dS' + scale (q ∘ e^G)ᵀ do - (k ∘ e^G)ᵀ dv

``dplr`` is the same with ``-a`` for the key that reads, ``b`` for the key that writes and no ``beta``; ``k, v`` are written
besides, and read by ``a``. With a ``beta`` a value channel ``M`` holds ``L``, and every channel's system is solved by
substitution.

A program goes through the chunks of a sequence with a tile of the state in registers, transposed, ``[BV, K]``, so that the left
operand of every product comes from registers (:mod:`.parts`). For few heads a sequence is cut into segments, walked at once.
What a segment does to the state before it is affine: ``S' = P S + local``, with ``local`` its walk from zero and ``P [K, K]``,
its transition, its walk from the identity without values (``IDENTITY``). ``delta_state_carry`` chains the segments; backwards,
by ``Pᵀ``.
"""

import triton
import triton.language as tl

from ..lib.indexing import load_state, locate_sequence
from ..lib.tiles import dot, dot_add, load_tile
from .loads import load_beta_tile, load_tile_transposed
from .parts import add_rows, add_state, begin_parts, decayed, load_decay, load_rows, store_parts, times_both, times_rows


@triton.jit
def substitute(x, beta, L, C: tl.constexpr, REVERSE: tl.constexpr):
    """Substitution token by token, ``e = x - L (beta ∘ e)``, or by ``Lᵀ``, of ``x, beta [BV, C]`` with ``L`` in memory."""
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
def chunk_range(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr):
    """Place of sequence or segment ``i``: batch row, first token, length, its sequence's first chunk, chunks from, to, and of a
    packed sequence that was to be cut and is one segment all the same, its number, else one below 0.
    """
    alone = i.to(tl.int64) * 0 - 1
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
        n, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    if PACKED:
        chunk0 = tl.load(chunk_first + n).to(tl.int64)
    else:
        chunk0 = n * ((T + C - 1) // C)
    low = piece * SEGMENT
    chunks = ((L + C - 1) // C).to(tl.int32)
    high = tl.minimum(low + SEGMENT, chunks)
    if PACKED and not WHOLE:
        one = tl.load(first + n + 1) - tl.load(first + n) == 1
        alone = tl.where(one, n, -1)
        high = tl.where(one, chunks, high)
    return b, bos, L, chunk0, low, high, alone


@triton.jit
def load_range(p, low, high):
    """Of the chunks ``low … high`` those of a range."""
    return tl.maximum(low, tl.load(p)), tl.minimum(high, tl.load(p + 1))


@triton.jit
def load_rates(rates, here, C: tl.constexpr, GATE: tl.constexpr, UNIT: tl.constexpr):
    """What a chunk's products are multiplied by, of :class:`.call.Scores`: with queries, with keys that read and with keys that
    are written, a number a token; and the whole chunk's decay.
    """
    t = tl.arange(0, C)
    if UNIT:
        p = rates + here * (6 * C)
        asked = tl.load(p + 3 * C + t)
        rate = tl.load(p + 4 * C + t)
        later = tl.load(p + 5 * C + t)
    else:
        p = rates + here * (3 * C)
        rate = tl.load(p + t)
        asked = rate
        later = tl.load(p + C + t)
    decay = 1.0
    if GATE == 1:
        decay = tl.load(p + C - 1)
    return asked, rate, later, decay


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def delta_state_fwd(
    q, k, v, beta, write, write2, A, M, A2, L2, rates, start, end, states, errors, out,
    ranges, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, bb, bt, bh, sn, sh, sk, sv,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
    START: tl.constexpr, END: tl.constexpr, KEEP: tl.constexpr, OUT: tl.constexpr, IDENTITY: tl.constexpr,
    RANGED: tl.constexpr, MANY: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One ``[BV, K]`` tile of the state, through the chunks of a sequence or segment.

    ``END`` of 1 writes the state after the last chunk; that of segments serves other segments, so one that is a whole sequence
    has none. ``END`` of 2 writes, by sequence, that of those alone.
    ``OUT`` writes outputs, ``KEEP`` the state before every chunk and the errors. ``RANGED`` sequences, not
    packed, have the chunks of ``ranges`` alone. With a vector gate ``q, k, write`` are decayed
    already: ``q ∘ e^G``, ``k ∘ e^G``, ``k ∘ e^{G_C - G}``, and ``rates [K]`` of a chunk is ``e^{G_C}``. ``DPLR`` has ``-a`` and
    ``b`` for ``k``, no ``beta``, and ``k`` in ``write2, A2, L2``. ``UNIT`` has ``rates`` with the lengths of ``q`` and ``k``.
    """
    tl.static_assert(not MANY)
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high, alone = chunk_range(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    if PACKED and not WHOLE and END == 1:  # noqa: SIM102
        if alone >= 0:
            return
    if RANGED:
        low, high = load_range(ranges + 2 * (b * HV + hv), low, high)
    columns_v = iv * BV + tl.arange(0, BV)
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
    S = begin_parts(columns_v, K, BK, IDENTITY)
    if START:
        S = add_state(S, start, i, hv, columns_v, sn, sh, sk, sv, K, V, BK)
    for chunk in range(low, high):
        rows = chunk * C + tl.arange(0, C)
        here = (chunk0 + chunk) * HV + hv
        # What no product prefetches comes first, so that its latency is the first product's.
        if GATE == 1 or UNIT:
            asked, rate, later, decay = load_rates(rates, here, C, GATE, UNIT)
        if GATE == 2:
            decay = load_decay(rates + here * K, K, BK)
        if BETA > 0:
            bbeta = load_beta_tile(beta, rows, bt, columns_v, L, V, BV, BETA)
        if KEEP:
            store_parts(states + here * (K * V), S, columns_v, 1, K, K, V, BK)
        bk = load_rows(k, rows, kt, L, K, BK)
        if OUT:
            r, acc = times_both(S, bk, q, rows, qt, L, K, BK, DT, PREC)
            acc = acc * scale
        else:
            r = times_rows(S, bk, DT, PREC)
        r = -r
        if GATE == 1 or UNIT:
            r = r * rate[None, :]
        if not IDENTITY:
            bv = load_tile_transposed(v, rows, vt, columns_v, L, V, BV)
            if DPLR:
                r -= dot(bv.to(DT), tl.trans(tl.load(L2 + here * (C * C) + t * C + s).to(DT)), PREC)
            else:
                r += bv.to(tl.float32)
        if BETA == 2:
            e = substitute(r, bbeta, M + here * (C * C), C, False)
        else:
            bM = tl.trans(tl.load(M + here * (C * C) + t * C + s))
            if BETA == 1:
                e = r - dot((r * bbeta).to(DT), bM, PREC)
            else:
                e = r - dot(r.to(DT), bM, PREC)
        x = e
        if BETA > 0:
            x = e * bbeta
        at_v = ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
        stored = (rows < L)[:, None] & (columns_v < V)[None, :]
        if KEEP:
            tl.store(errors + at_v, tl.trans(e.to(errors.dtype.element_ty)), mask=stored)
        if OUT:
            if GATE == 1 or UNIT:
                acc = acc * asked[None, :]
            bA = tl.load(A + here * (C * C) + t * C + s)
            acc = dot_add(x.to(DT), tl.trans(bA), acc, PREC)
            if DPLR:
                acc = dot_add(bv.to(DT), tl.trans(tl.load(A2 + here * (C * C) + t * C + s)), acc, PREC)
            tl.store(out + at_v, tl.trans(acc.to(out.dtype.element_ty)), mask=stored)
        if GATE == 1 or UNIT:
            x = x * later[None, :]
        if GATE > 0:
            S = decayed(S, decay, GATE)
        if GATE == 2:
            bk = load_rows(write, rows, kt, L, K, BK)
        S = add_rows(S, x, bk, DT, PREC)
        if DPLR and not IDENTITY:
            S = add_rows(S, bv, load_rows(write2, rows, kt, L, K, BK), DT, PREC)
    if END == 1:
        store_parts(end + at, S, columns_v, V, 1, K, V, BK)
    if END == 2:  # noqa: SIM102
        if alone >= 0:
            store_parts(end + (alone * HV + hv) * (K * V), S, columns_v, V, 1, K, V, BK)


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def delta_state_bwd(
    q, k, do, beta, write, write2, A, M, A2, L2, rates, start, end, states, adjoint, out,
    ranges, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh, sn, sh, sk, sv,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BETA: tl.constexpr, DPLR: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
    START: tl.constexpr, END: tl.constexpr, KEEP: tl.constexpr, OUT: tl.constexpr, IDENTITY: tl.constexpr,
    RANGED: tl.constexpr, MANY: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One ``[BV, K]`` tile of the state's gradient, through the chunks of a sequence or segment from the last.

    ``KEEP`` writes the gradient of the state after every chunk, and the adjoint ``y``. With a vector gate ``q, k, write`` are
    decayed already, as ``delta_state_fwd`` takes them.
    """
    tl.static_assert(not MANY)
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high, alone = chunk_range(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    if PACKED and not WHOLE and END == 1:  # noqa: SIM102
        if alone >= 0:
            return
    if RANGED:
        low, high = load_range(ranges + 2 * (b * HV + hv), low, high)
    columns_v = iv * BV + tl.arange(0, BV)
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
    dS = begin_parts(columns_v, K, BK, False)
    if START:
        dS = add_state(dS, start, i, hv, columns_v, sn, sh, sk, sv, K, V, BK)
    for step in range(low, high):
        chunk = low + high - 1 - step
        rows = chunk * C + tl.arange(0, C)
        here = (chunk0 + chunk) * HV + hv
        if GATE == 1 or UNIT:
            asked, rate, later, decay = load_rates(rates, here, C, GATE, UNIT)
        if GATE == 2:
            decay = load_decay(rates + here * K, K, BK)
        if BETA > 0:
            bbeta = load_beta_tile(beta, rows, bt, columns_v, L, V, BV, BETA)
        if KEEP:
            store_parts(states + here * (K * V), dS, columns_v, 1, K, K, V, BK)
        bk = load_rows(k, rows, kt, L, K, BK)
        if GATE == 2:
            dx = times_rows(dS, load_rows(write, rows, kt, L, K, BK), DT, PREC)
        else:
            dx = times_rows(dS, bk, DT, PREC)
        bdo = load_tile(do, rows, ot, columns_v, L, V, BV)
        do_read = tl.trans(bdo).to(tl.float32) * scale
        if GATE == 1 or UNIT:
            do_read = do_read * asked[None, :]
            dx = dx * later[None, :]
        if GATE > 0:
            dS = decayed(dS, decay, GATE)
        dS = add_rows(dS, do_read, load_rows(q, rows, qt, L, K, BK), DT, PREC)
        bA = tl.load(A + here * (C * C) + t * C + s)
        dx = dot_add(tl.trans(bdo.to(DT)), bA, dx, PREC)
        if BETA == 2:
            y = substitute(dx, bbeta, M + here * (C * C), C, True)
        else:
            bM = tl.load(M + here * (C * C) + t * C + s)
            if BETA == 1:
                y = dx - dot((dx * bbeta).to(DT), bM, PREC)
            else:
                y = dx - dot(dx.to(DT), bM, PREC)
        dr = -y
        if BETA > 0:
            dr = dr * bbeta
        if KEEP:
            at_v = ((b * T + bos + rows)[:, None] * HV + hv) * V + columns_v[None, :]
            stored = (rows < L)[:, None] & (columns_v < V)[None, :]
            tl.store(adjoint + at_v, tl.trans(y.to(adjoint.dtype.element_ty)), mask=stored)
        if GATE == 1 or UNIT:
            dr = dr * rate[None, :]
        dS = add_rows(dS, dr, bk, DT, PREC)
    if END == 1:
        store_parts(end + at, dS, columns_v, V, 1, K, V, BK)
    if END == 2:  # noqa: SIM102
        if alone >= 0:
            store_parts(end + (alone * HV + hv) * (K * V), dS, columns_v, V, 1, K, V, BK)


@triton.jit
def load_square(p, rows, columns, K: tl.constexpr):
    """A tile of a matrix ``[K, K]``, zeros past ``K``."""
    return tl.load(p + rows[:, None] * K + columns[None, :], mask=(rows < K)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit(do_not_specialize=["PER", "HV"])
def delta_state_carry(
    local, transitions, start, end, first, PER, HV, sn, sh, sk, sv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """States before each segment, in the place of ``local``, and after the last: ``S' = P S + local``; of a packed sequence
    that is one segment, the state before it alone.

    ``transitions`` are each segment's ``P [K, K]``, or in ``REVERSE``, for gradients from the last segment on, ``Pᵀ``. A wide
    ``P``, for which no block has room, is multiplied ``COLUMNS`` at a time with rows of ``S``, read where they were stored.
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
        S += load_state(start, n, hv, columns_k[:, None], columns_v[None, :], inside, sn, sh, sk, sv)
    if PACKED:  # noqa: SIM102
        if high == low + 1:
            tl.store(local + (low.to(tl.int64) * HV + hv) * (K * V) + tile, S, mask=inside)
            return
    for step in range(low, high):
        i = step
        if REVERSE:
            i = low + high - 1 - step
        head = i.to(tl.int64) * HV + hv
        P = transitions + head * (K * K)
        p = local + head * (K * V)
        own = tl.load(p + tile, mask=inside, other=0.0)
        if COLUMNS == BK:
            whole = load_square(P, columns_k, columns_k, K)
            tl.store(p + tile, S, mask=inside)
            S = own + dot(whole, S, PREC)
        else:
            tl.store(p + tile, S, mask=inside)
            tl.debug_barrier()  # a thread reads what others stored
            S = own
            for some in range(0, K, COLUMNS):
                read = some + tl.arange(0, COLUMNS)
                rows = p + read[:, None] * V + columns_v[None, :]
                before = tl.load(rows, mask=(read < K)[:, None] & (columns_v < V)[None, :], other=0.0)
                S = dot_add(load_square(P, columns_k, read, K), before, S, PREC)
    tl.store(end + at + tile, S, mask=inside)
