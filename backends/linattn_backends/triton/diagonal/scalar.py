"""Gradients of a scalar gate's chunk, of 16-bit operands: both sides from one pass over the value channels.

The equations are those of :mod:`.memory`. ``dg_j`` is the sum over ``t ≥ j`` of ``q·dq - k·dk``, and all that passes through
the chunk; what both have, ``dA_tt q_t·k_t``, is in float32 on either side.
"""

import triton
import triton.language as tl

from ..lib.indexing import at_head, sequence_of, state_tile
from ..lib.tiles import decay_between, load_tile, product, resets, row_decays, taken
from .memory import end_of

__all__ = ["scalar_gradients"]


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "tiles_stride"])
def scalar_gradients(
    q, k, v, do, G, kept, dkept, dq, dk, dg, owner, first, cu, T, PER, N, HV, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ob, ot, oh, gb, gt, gh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """One chunk of ``dq, dk [C, BK]``, and these channels' part of ``dg``. ``G`` are running sums."""
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
    q = at_head(q, b, bos, hv, qb, qt, qh, GROUP)
    k = at_head(k, b, bos, hv, kb, kt, kh, GROUP)
    v = at_head(v, b, bos, hv, vb, vt, vh, 1)
    do = at_head(do, b, bos, hv, ob, ot, oh, 1)
    G = at_head(G, b, bos, hv, gb, gt, gh, 1)
    bk = load_tile(k, rows, kt, columns, L, K, BK)
    bq = load_tile(q, rows, qt, columns, L, K, BK)
    to_start, to_end, all = row_decays(G, rows, end_of(G, piece, L, gt, True, C), gt, L)
    here = (i.to(tl.int64) * HV + hv) * (K * V)
    below = tl.zeros((C, C), tl.float32)
    bdq = tl.zeros((C, BK), tl.float32)
    bdk = tl.zeros((C, BK), tl.float32)
    met = tl.zeros((BK,), tl.float32)
    for iv in range((V + BV - 1) // BV):
        columns_v = iv * BV + tl.arange(0, BV)
        tile, inside = state_tile(columns, columns_v, K, V)
        bo = load_tile(do, rows, ot, columns_v, L, V, BV)
        bv = load_tile(v, rows, vt, columns_v, L, V, BV)
        bS = tl.load(kept + here + tile, mask=inside, other=0.0)
        bD = tl.load(dkept + here + tile, mask=inside, other=0.0)
        bdq = product(bo.to(bS.dtype), tl.trans(bS), bdq, PREC)
        bdk = product(bv.to(bS.dtype), tl.trans(bD), bdk, PREC)
        below = product(bo, tl.trans(bv), below, PREC)
        met += tl.sum(bS.to(tl.float32) * bD.to(tl.float32), 1)
    keep = (rows < L)[:, None] & (columns < K)[None, :]
    at = (b * T + bos + rows) * HV + hv
    p = at[:, None] * K + columns[None, :]
    bdk = bdk * to_end[:, None]
    through = tl.sum(met, 0) * tl.exp2(all) + tl.sum(tl.sum(bk.to(tl.float32) * bdk, 1), 0)
    pairs = taken(below * scale * decay_between(G, rows, gt, L, False), DT, PREC)
    bdq = product(pairs, bk.to(DT), bdq * (to_start * scale)[:, None], PREC)
    across = tl.sum(bq.to(tl.float32) * bdq, 1)
    tl.store(dq + p, bdq.to(dq.dtype.element_ty), mask=keep)
    bdk = product(tl.trans(pairs), bq.to(DT), bdk, PREC)
    across -= tl.sum(bk.to(tl.float32) * bdk, 1)
    tl.store(dk + p, bdk.to(dk.dtype.element_ty), mask=keep)
    across = tl.cumsum(across, 0, reverse=True) + through
    across = tl.where(resets(G, rows, gt, L, C), 0.0, across)
    tl.store(dg + ik * tiles_stride + at, across, mask=rows < L)
