"""Outputs divided by the sums of their weights, and what that adds to gradients (Katharopoulos et al. 2020, eqs. 18-20).

With ``n_t`` the outputs of the family itself, and ``z`` a state that is a vector, whose gate ``a_t = e^{g_t}`` is 1, a number,
or one a key channel::

    z_t = a_t ∘ z_{t-1} + k_t          d_t = scale q_t·z_t         o_t = n_t / d_t, zero where d_t is
    dn_t = do_t / d_t                  e_t = -scale dn_t·o_t
    y_t = a_{t+1} ∘ y_{t+1} + e_t q_t  (the gradient of z_t)
    dq_t += e_t z_t                    dk_t += y_t                 dg_t += (z_t - k_t) ∘ y_t

Sums take three launches: of each chunk of ``C`` tokens from zero, over the chunks, and in each chunk from what comes before. A
tile is ``[C, BK]``; inside it factors, or whole steps ``(a, x)``, are composed in a scan: none is above 1 or divided by.
"""

import triton
import triton.language as tl

from ..lib.gates import LOG2E
from ..lib.indexing import head_pointer, locate_sequence
from ..lib.tiles import load_tile

__all__ = [
    "normalizer_carries", "normalizer_gradients_bwd", "normalizer_outputs_fwd", "normalizer_quotients_bwd", "normalizer_sums",
]  # fmt: skip

# Gates, as kernels are compiled for them (``GATE``).
NONE = tl.constexpr(0)
SCALAR = tl.constexpr(1)
VECTOR = tl.constexpr(2)


@triton.jit
def composed(a, x, b, y):
    """Two steps ``z ← a z + x`` and ``z ← b z + y`` as one."""
    return a * b, x * b + y


@triton.jit
def walked(a, x, GATE: tl.constexpr, REVERSE: tl.constexpr):
    """All steps up to each row's as one: factors, and sums from zero."""
    if GATE == NONE:
        x = tl.cumsum(x, 0, reverse=REVERSE)
    else:
        a, x = tl.associative_scan((tl.broadcast_to(a, x.shape), x), 0, composed, reverse=REVERSE)
    return a, x


@triton.jit
def multiplied(a, C: tl.constexpr, BK: tl.constexpr, REVERSE: tl.constexpr):
    """All factors up to each row's as one. Triton 3.6 compiles no scan of a single column."""
    return tl.cumprod(tl.broadcast_to(a, (C, BK)), 0, reverse=REVERSE)


@triton.jit
def row_of(x, rows, row):
    """One row of a tile."""
    return tl.sum(tl.where((rows == row)[:, None], x, 0.0), 0)


@triton.jit
def load_factors(g, rows, stride, columns, inside, K: tl.constexpr, GATE: tl.constexpr):
    """``e^g`` of the rows ``inside``, elsewhere 1: a tile, or one column for all."""
    if GATE == NONE:
        a = tl.full(rows.shape, 1.0, tl.float32)[:, None]
    elif GATE == SCALAR:
        one = tl.load(g + rows.to(tl.int64) * stride, mask=inside, other=0.0)
        a = tl.exp2(one.to(tl.float32) * LOG2E)[:, None]
    else:
        at = g + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        a = tl.exp2(tl.load(at, mask=inside[:, None] & (columns < K)[None, :], other=0.0).to(tl.float32) * LOG2E)
    return a


@triton.jit
def divided(x, d):
    """``x / d``, zero where ``d`` is."""
    zero = d == 0.0
    return tl.where(zero, 0.0, x / tl.where(zero, 1.0, d))


@triton.jit
def add(p, at, x, inside):
    """Add to what lies there."""
    tl.store(p + at, (tl.load(p + at, mask=inside, other=0.0).to(tl.float32) + x).to(p.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def normalizer_sums(
    x, e, g, sums, decays, owner, first, cu, T, PER, N, HV, xb, xt, xh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, GATE: tl.constexpr,
    REVERSE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """What one chunk of a value head leaves of ``k`` from zero, ``[chunks, HV, K]``, and its decay; in reverse of ``e q``."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    own = tl.arange(0, C)
    rows = piece * C + own
    columns = ik * BK + tl.arange(0, BK)
    bx = load_tile(head_pointer(x, b, bos, hv, xb, xt, xh, GROUP), rows, xt, columns, L, K, BK).to(tl.float32)
    at = (i.to(tl.int64) * HV + hv) * K + columns
    if REVERSE:
        bx *= tl.load(e + (b * T + bos + rows) * HV + hv, mask=rows < L, other=0.0)[:, None]
    if GATE != NONE:
        g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
        a = load_factors(g, rows, gt, columns, rows < L, K, GATE)
        if REVERSE:  # up to the start of the chunk, of which a row's own factor is a part
            bx *= multiplied(a, C, BK, False)
        else:
            later = load_factors(g, rows + 1, gt, columns, (own < C - 1) & (rows + 1 < L), K, GATE)
            later = multiplied(later, C, BK, True)
            bx *= later
            tl.store(decays + at, row_of(a * later, own, 0), mask=columns < K)
    tl.store(sums + at, tl.sum(bx, 0), mask=columns < K)


@triton.jit(do_not_specialize=["PER", "HV"])
def normalizer_carries(
    sums, decays, start, before, end, first, PER, HV, sn, sh, sk,
    K: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr, PACKED: tl.constexpr,
    START: tl.constexpr,
):  # fmt: skip
    """The sum ``before`` each chunk of a sequence, in reverse behind it, and at its ``end [N, HV, K]``; ``P`` chunks a step."""
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    hv = pid // NK % HV
    n = pid // (NK * HV)
    columns = pid % NK * BK + tl.arange(0, BK)
    inside = columns < K
    low = n * PER
    count = PER
    if PACKED:
        low = tl.load(first + n)
        count = tl.load(first + n + 1) - low
    z = tl.zeros((BK,), tl.float32)
    if START:
        start += n.to(tl.int64) * sn + hv.to(tl.int64) * sh
        z += tl.load(start + columns.to(tl.int64) * sk, mask=inside, other=0.0).to(tl.float32)
    own = tl.arange(0, P)
    for done in range(0, count, P):
        steps = done + own
        chunks = low + steps
        ahead = chunks + 1
        if REVERSE:
            chunks = low + count - 1 - steps
            ahead = chunks - 1
        there = (steps < count)[:, None] & inside[None, :]
        at = (chunks.to(tl.int64)[:, None] * HV + hv) * K + columns[None, :]
        x = tl.load(sums + at, mask=there, other=0.0)
        a = tl.full((P, BK), 1.0, tl.float32)
        if GATE != NONE:
            a = tl.load(decays + at, mask=there, other=1.0)
        tl.store(before + at, tl.broadcast_to(z[None, :], (P, BK)), mask=there & (steps == 0)[:, None])
        factors, sum = walked(a, x, GATE, False)
        sum += factors * z[None, :]
        at = (ahead.to(tl.int64)[:, None] * HV + hv) * K + columns[None, :]
        tl.store(before + at, sum, mask=there & (steps + 1 < count)[:, None])
        z = row_of(sum, own, P - 1)
    if end is not None:
        tl.store(end + (n.to(tl.int64) * HV + hv) * K + columns, z, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def normalizer_outputs_fwd(
    q, k, g, before, n, o, d, owner, first, cu, T, PER, N, HV, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    GATE_GROUP: tl.constexpr, GATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``d`` of one chunk of a value head, and ``o``, which may lie where ``n`` does."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    if GATE != NONE:
        g = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
    head = (b * T + bos + rows) * HV + hv
    sum = tl.zeros((C,), tl.float32)
    for low in tl.static_range(0, K, BK):
        columns = low + tl.arange(0, BK)
        a = load_factors(g, rows, gt, columns, rows < L, K, GATE)
        bk = load_tile(k, rows, kt, columns, L, K, BK).to(tl.float32)
        bq = load_tile(q, rows, qt, columns, L, K, BK).to(tl.float32)
        z = tl.load(before + (i.to(tl.int64) * HV + hv) * K + columns, mask=columns < K, other=0.0)
        factors, own = walked(a, bk, GATE, False)
        sum += tl.sum(bq * (own + factors * z[None, :]), 1)
    sum *= scale
    tl.store(d + head, sum, mask=rows < L)
    for low in tl.static_range(0, V, BV):
        columns = low + tl.arange(0, BV)
        at = head[:, None] * V + columns[None, :]
        inside = (rows < L)[:, None] & (columns < V)[None, :]
        x = tl.load(n + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(o + at, divided(x, sum[:, None]).to(o.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def normalizer_quotients_bwd(
    do, o, d, dn, e, owner, first, cu, T, PER, N, HV, scale, ob, ot, oh,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``dn`` and ``e`` of one chunk of a value head; both are of what ``dn`` is rounded to, for they are to cancel."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    do = head_pointer(do, b, bos, hv, ob, ot, oh, 1)
    head = (b * T + bos + rows) * HV + hv
    sum = tl.load(d + head, mask=rows < L, other=0.0)
    met = tl.zeros((C,), tl.float32)
    for low in tl.static_range(0, V, BV):
        columns = low + tl.arange(0, BV)
        at = head[:, None] * V + columns[None, :]
        inside = (rows < L)[:, None] & (columns < V)[None, :]
        bd = divided(load_tile(do, rows, ot, columns, L, V, BV).to(tl.float32), sum[:, None]).to(dn.dtype.element_ty)
        met += tl.sum(bd.to(tl.float32) * tl.load(o + at, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(dn + at, bd, mask=inside)
    tl.store(e + head, -scale * met, mask=rows < L)


@triton.jit(do_not_specialize=["T", "PER", "N", "H", "tiles_stride"])
def normalizer_gradients_bwd(
    q, k, g, e, before, behind, dq, dk, dg, owner, first, cu, T, PER, N, H, tiles_stride,
    qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, GATE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Add to ``dq``, ``dk`` and a vector gate's ``dg`` of one chunk and query/key head; of a scalar one, these channels' part.

    All are dense. ``GATE_GROUP`` is how many value heads share a head of ``g``: one, or all of a group.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    ik = pid % NK
    h = pid // NK % H
    i = pid // (NK * H)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    HV = H * GROUP
    own = tl.arange(0, C)
    rows = piece * C + own
    columns = ik * BK + tl.arange(0, BK)
    inside = (rows < L)[:, None] & (columns < K)[None, :]
    bq = load_tile(head_pointer(q, b, bos, h, qb, qt, qh, 1), rows, qt, columns, L, K, BK).to(tl.float32)
    bk = load_tile(head_pointer(k, b, bos, h, kb, kt, kh, 1), rows, kt, columns, L, K, BK).to(tl.float32)
    by_q = tl.zeros((C, BK), tl.float32)
    by_k = tl.zeros((C, BK), tl.float32)
    by_g = tl.zeros((C, BK), tl.float32)
    token = b * T + bos + rows
    for j in range(GROUP):
        hv = h * GROUP + j
        at = (i.to(tl.int64) * HV + hv) * K + columns
        z = tl.load(before + at, mask=columns < K, other=0.0)
        y = tl.load(behind + at, mask=columns < K, other=0.0)
        be = tl.load(e + token * HV + hv, mask=rows < L, other=0.0)[:, None]
        p = g
        if GATE != NONE:
            p = head_pointer(g, b, bos, hv, gb, gt, gh, GATE_GROUP)
        a = load_factors(p, rows, gt, columns, rows < L, K, GATE)
        later = load_factors(p, rows + 1, gt, columns, (own < C - 1) & (rows + 1 < L), K, GATE)
        factors, sum = walked(a, bk, GATE, False)
        sum += factors * z[None, :]
        factors, dsum = walked(later, be * bq, GATE, True)
        dsum += factors * y[None, :]
        by_q += be * sum
        by_k += dsum
        if GATE == SCALAR:
            part = tl.sum((sum - bk) * dsum, 1)
            tl.store(dg + ik.to(tl.int64) * tiles_stride + token * HV + hv, part, mask=rows < L)
        if GATE == VECTOR:
            by_g += (sum - bk) * dsum
            if GATE_GROUP == 1:
                add(dg, (token * HV + hv)[:, None] * K + columns[None, :], by_g, inside)
                by_g = tl.zeros((C, BK), tl.float32)
    at = (token * H + h)[:, None] * K + columns[None, :]
    if GATE == VECTOR and GATE_GROUP > 1:
        add(dg, at, by_g, inside)
    add(dq, at, by_q, inside)
    add(dk, at, by_k, inside)
