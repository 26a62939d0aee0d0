"""One pass over a sequence with the state in registers: no gate or a scalar one, 16-bit operands.

With ``D_ts = e^{G_t - G_s}``, and the scale on every product of three::

    forwards   out_t = Σ_{s≤t} D_ts (a_t·b_s) y_s + e^{G_t} a_t S           S' = e^{G_C} S + Σ_s e^{G_C - G_s} b_sᵀ y_s
    backwards  out_s = Σ_{t≥s} D_ts (a_s·b_t) y_t + e^{G_C - G_s} a_s S     S' = e^{G_C} S + Σ_t e^{G_t} b_tᵀ y_t

    o  = forwards(q, k, v)         dq = forwards(do, v, k), with the state transposed
    dv = backwards(k, q, do)       dk = backwards(v, do, q), with the state's gradient transposed

A program holds a ``[W, BV]`` tile of the state for all ``W`` channels of ``a`` and ``b``: no state is written or read. For the
gate's gradient, the walks of ``dk`` and ``dq`` also sum ``k_t·dk_t`` and ``q_t·dq_t``, and ``dk`` leaves the state's gradient
at the end of every ``SPAN`` chunks, for ``dq`` to meet with the state there: :mod:`.gates` has the rest.
"""

import triton
import triton.language as tl

from .kernels import at_head, span_of, state_tile
from .tiles import decay_between, load_tile, product, row_decays, times

__all__ = ["fused"]


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "SPANS"])
def fused(
    a, b, y, x, G, start, out, end, dots, met, kept,
    owner, first, span_first, cu, T, PER, SEGMENT, N, HV, SPANS, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, xb, xt, xh, gb, gt, gh,
    W: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, Y_GROUP: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
    PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr, END: tl.constexpr, DOTS: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Walk one segment of one head. ``start`` holds a state a segment, ``end`` one a sequence."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    n, bos, L, row, low, high = span_of(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    a = at_head(a, row, bos, hv, ab, at, ah, GROUP)
    b = at_head(b, row, bos, hv, eb, et, eh, GROUP)
    y = at_head(y, row, bos, hv, yb, yt, yh, Y_GROUP)
    out += ((row * T + bos) * HV + hv) * V
    if GATE > 0:
        G = at_head(G, row, bos, hv, gb, gt, gh, 1)
    if DOTS:  # laid out as G is
        x = at_head(x, row, bos, hv, xb, xt, xh, Y_GROUP)
        dots = at_head(dots, row, bos, iv * HV + hv, gb, gt, gh, 1)
        if PACKED:
            span0 = tl.load(span_first + n).to(tl.int64)
        else:
            span0 = n * ((T + C * SPAN - 1) // (C * SPAN))
        last_chunk = (L + C - 1) // C - 1
        corner = tl.arange(0, BK)[:, None] * BV + tl.arange(0, BV)[None, :]
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    tile, inside = state_tile(columns_k, columns_v, W, V)
    if TRANSPOSED:
        tile = columns_v[None, :] * W + columns_k[:, None]
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        at_start = (i.to(tl.int64) * HV + hv) * (W * V)
        S += tl.load(start + at_start + tile, mask=inside, other=0.0).to(tl.float32)
    for step in range(low, high):
        chunk = step
        if REVERSE:
            chunk = low + high - 1 - step
        rows = chunk * C + tl.arange(0, C)
        ba = load_tile(a, rows, at, columns_k, L, W, BK)
        bb = load_tile(b, rows, et, columns_k, L, W, BK)
        by = load_tile(y, rows, yt, columns_v, L, V, BV)
        if DOTS:
            span_ends = ((chunk + 1) % SPAN == 0) | (chunk == last_chunk)
            p = kept + (((span0 + chunk // SPAN) * HV + hv) * NV + iv) * (BK * BV) + corner
            if REVERSE:
                if span_ends:
                    tl.store(p, S.to(kept.dtype.element_ty))
        A = times(ba, tl.trans(bb), PREC) * scale
        if ba.dtype == tl.float16:  # it has not the range of a state
            acc = times(ba.to(tl.float32), S, PREC)
        else:
            acc = times(ba, S.to(ba.dtype), PREC)
        if not REVERSE:
            acc = acc * scale
        if GATE == 0:
            if REVERSE:
                A = tl.where(t <= s, A, 0.0)
                later = (by.to(tl.float32) * scale).to(by.dtype)
            else:
                A = tl.where(s <= t, A, 0.0)
                later = by
        else:
            to_start, to_end, all = row_decays(G, rows, chunk * C + C - 1, gt, L)
            A = A * decay_between(G, rows, gt, L, REVERSE)
            S = S * tl.exp2(all)
            if REVERSE:
                acc = acc * to_end[:, None]
                later = (by.to(tl.float32) * (to_start * scale)[:, None]).to(by.dtype)
            else:
                acc = acc * to_start[:, None]
                later = (by.to(tl.float32) * to_end[:, None]).to(by.dtype)
        S = product(tl.trans(bb), later, S, PREC)
        acc = product(A.to(by.dtype), by, acc, PREC)
        tl.store(
            out + rows.to(tl.int64)[:, None] * HV * V + columns_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=(rows < L)[:, None] & (columns_v < V)[None, :],
        )
        if DOTS:
            bx = load_tile(x, rows, xt, columns_v, L, V, BV)
            tl.store(dots + rows.to(tl.int64) * gt, tl.sum(acc * bx.to(tl.float32), 1), mask=rows < L)
            if not REVERSE:
                if span_ends:
                    meeting = tl.sum(tl.sum(S * tl.load(p).to(tl.float32), 1), 0)
                    tl.store(met + (iv.to(tl.int64) * SPANS + span0 + chunk // SPAN) * HV + hv, meeting)
    if END:
        tl.store(end + (n * HV + hv) * (W * V) + tile, S, mask=inside)
