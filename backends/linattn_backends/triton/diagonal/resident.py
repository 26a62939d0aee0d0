"""One pass over a sequence with the state in registers: no gate or a scalar one, 16-bit operands.

With ``D_ts = e^{G_t - G_s}``::

    forwards   out_t = scale (Σ_{s≤t} D_ts (a_t·b_s) y_s + e^{G_t} a_t S)
               S' = e^{G_C} S + Σ_s e^{G_C - G_s} b_sᵀ y_s
    backwards  out_s = scale (Σ_{t≥s} D_ts (a_s·b_t) y_t + e^{G_C - G_s} a_s R)
               R' = e^{G_C} R + Σ_t e^{G_t} b_tᵀ y_t

    o  = forwards(q, k, v)         dq = forwards(do, v, k), with the state transposed
    dv = backwards(k, q, do)       dk = backwards(v, do, q), with the state transposed

Values may have weights, and skip the state: forwards ``m_s y_s`` stands for ``y_s`` above, and ``D y_t`` is added to what comes
out. Backwards ``m_s`` is a factor on what comes out, to which ``D y_s`` is added.

Backwards, ``scale R`` is the state's gradient. A program holds a ``[W, BV]`` tile of ``S`` or ``R`` for all ``W`` channels of
``a`` and ``b``: no state is read, and none written but those that a gate's gradient needs.

If no chunk decays by ``2^RANGE``, both sides of a product are measured from ``c = G_C / 2``: ``out_t = scale e^{G_t - c}
(Σ (a_t·b_s) y'_s + a_t e^c S)`` with ``y' = e^{c - G} y``, so the gate costs a factor on ``y``, ``S`` and ``out``; backwards
with the signs of ``G - c`` changed. Otherwise (``STRONG``), and in float16, the whole scan takes ``D`` itself. With a gate,
what ``dq`` and ``dk`` have in common must cancel in the gate's gradient to more than 16 bits, which these products do not give:
they are :func:`.memory.scalar_gradients`'s.
"""

import triton
import triton.language as tl

from ..lib.gates import decay_from_sums
from ..lib.indexing import chunk_at, head_pointer, load_state, locate_segment, state_offsets
from ..lib.tiles import dot, dot_add, load_tile
from .gate import NONE, SCALAR, load_chunk_sum, load_numbers

__all__ = ["diagonal_scan"]


@triton.jit
def strongest_decay(G, low, high, L, stride, C: tl.constexpr):
    """The least ``G_C`` of the chunks ``low … high``."""
    least = 0.0
    for base in range(low, high, 64):
        chunks = base + tl.arange(0, 64)
        last = tl.minimum(chunks.to(tl.int64) * C + C, L) - 1
        least = tl.minimum(least, tl.min(tl.load(G + last * stride, mask=chunks < high, other=0.0), 0))
    return least


@triton.jit
def load_sums(G, chunk, L, stride, there, C: tl.constexpr):
    """A scalar gate's running sums of one chunk, if it is ``there``."""
    rows = chunk * C + tl.arange(0, C)
    return tl.load(G + rows.to(tl.int64) * stride, mask=(rows < L) & there, other=0.0)


@triton.jit
def prefetch_sums(G, step, low, high, L, stride, C: tl.constexpr, REVERSE: tl.constexpr):
    """``G_C`` and the running sums of the chunk after this step's; of its own, if it is the last."""
    chunk = chunk_at(tl.minimum(step + 1, high - 1), low, high, REVERSE)
    return load_chunk_sum(G, chunk, L, stride, True, C), load_sums(G, chunk, L, stride, True, C)


@triton.jit
def scan_chunks(
    S, a, b, y, G, weight, factor, out, kept, chunk0, low, high, L, HV, scale, at, bt, yt, gt, mt, columns_k, columns_v,
    W: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GATE: tl.constexpr, STRONG: tl.constexpr, REVERSE: tl.constexpr, WEIGHTED: tl.constexpr, SKIP: tl.constexpr,
    KEEP: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scan the chunks ``low … high`` of one head, from ``S`` to the state returned; ``factor`` is that of the skip.

    The head's states go to ``kept``, where ``chunk0`` is the sequence's first chunk.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    c = 0.0  # base 2: by which S is still to decay
    if GATE == SCALAR:  # loaded a chunk ahead: too small for the compiler's pipeline
        coming = chunk_at(low, low, high, REVERSE)
        coming_end = load_chunk_sum(G, coming, L, gt, low < high, C)
        coming_sums = load_sums(G, coming, L, gt, low < high, C)
    for step in range(low, high):
        chunk = chunk_at(step, low, high, REVERSE)
        rows = chunk * C + tl.arange(0, C)
        if GATE == SCALAR:
            G_C = coming_end
            bG = coming_sums
            if REVERSE:
                coming_end, coming_sums = prefetch_sums(G, step, low, high, L, gt, C, REVERSE)
        if KEEP:
            tile, inside = state_offsets(columns_k, columns_v, W, V)
            held = S * (scale * tl.exp2(c))
            tl.store(kept + (chunk0 + chunk) * HV * (W * V) + tile, held.to(kept.dtype.element_ty), mask=inside)
        ba = load_tile(a, rows, at, columns_k, L, W, BK)
        bb = load_tile(b, rows, bt, columns_k, L, W, BK)
        by = load_tile(y, rows, yt, columns_v, L, V, BV)
        later = by
        near = by
        m = tl.full((C,), 1.0, tl.float32)
        if WEIGHTED:
            m = load_numbers(weight, rows, mt, L)
        if GATE == SCALAR:
            if not REVERSE:  # which order is faster was measured
                coming_end, coming_sums = prefetch_sums(G, step, low, high, L, gt, C, REVERSE)
            to_start = bG
            to_end = tl.minimum(G_C - bG, 0.0)
            if REVERSE:
                to_start, to_end = to_end, to_start
            if STRONG:
                rate = tl.exp2(to_end)
            else:
                shift = bG - 0.5 * G_C
                if REVERSE:
                    shift = 0.5 * G_C - bG
                rate = tl.exp2(-shift)
            if WEIGHTED and not REVERSE:
                rate *= m
            later = (by.to(tl.float32) * rate[:, None]).to(by.dtype)
            if not STRONG:
                near = later
                S = S * tl.exp2(c + 0.5 * G_C)
                c = 0.5 * G_C
        A = dot(ba, tl.trans(bb), PREC)
        if ba.dtype == tl.float16:  # it has the range neither of a state nor of scores
            acc = dot(ba.to(tl.float32), S, PREC)
        else:
            acc = dot(ba, S.to(ba.dtype), PREC)
        if GATE == SCALAR and STRONG:
            A = A * decay_from_sums(G, rows, gt, L, REVERSE)
            if WEIGHTED and not REVERSE:
                A = A * m[None, :]
            acc = acc * tl.exp2(to_start)[:, None]
            S = S * tl.exp2(G_C)
        elif REVERSE:
            A = tl.where(t <= s, A, 0.0)
        else:
            A = tl.where(s <= t, A, 0.0)
        S = dot_add(tl.trans(bb), later, S, PREC)
        if ba.dtype == tl.float16:
            acc = dot_add(A, near.to(tl.float32), acc, PREC)
        else:
            acc = dot_add(A.to(by.dtype), near, acc, PREC)
        if GATE == SCALAR and not STRONG:
            acc = acc * (tl.exp2(shift) * scale)[:, None]
        else:
            acc = acc * scale
        if WEIGHTED and REVERSE:
            acc = acc * m[:, None]
        if SKIP:
            acc += factor * by.to(tl.float32)
        tl.store(
            out + rows.to(tl.int64)[:, None] * HV * V + columns_v[None, :],
            acc.to(out.dtype.element_ty),
            mask=(rows < L)[:, None] & (columns_v < V)[None, :],
        )
    return S * tl.exp2(c)


@triton.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def diagonal_scan(
    a, b, y, G, weight, skip, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, gb, gt, gh, mb, mt, mh, sn, sh, sk, sv,
    W: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, Y_GROUP: tl.constexpr, GATE: tl.constexpr, REVERSE: tl.constexpr, TRANSPOSED: tl.constexpr,
    WEIGHTED: tl.constexpr, SKIP: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr, START: tl.constexpr,
    END: tl.constexpr, KEEP: tl.constexpr, RANGE: tl.constexpr, PREC: tl.constexpr, SHARE: tl.constexpr, MANY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Scan one segment of one head. ``start`` holds a state a segment, ``end`` one a sequence, ``kept`` one a chunk.

    ``STEP``, ``SHARE``, ``MANY`` and ``STAGES`` are for the kernels of Hopper, which take the same arguments.
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
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    a = head_pointer(a, row, bos, hv, ab, at, ah, GROUP)
    b = head_pointer(b, row, bos, hv, eb, et, eh, GROUP)
    y = head_pointer(y, row, bos, hv, yb, yt, yh, Y_GROUP)
    out += ((row * T + bos) * HV + hv) * V
    if GATE != NONE:
        G = head_pointer(G, row, bos, hv, gb, gt, gh, 1)
    factor = 0.0
    if WEIGHTED:
        weight = head_pointer(weight, row, bos, hv, mb, mt, mh, 1)
    if SKIP:
        factor = tl.load(skip + hv).to(tl.float32)
    tile, inside = state_offsets(columns_k, columns_v, W, V)
    if TRANSPOSED:
        tile = columns_v[None, :] * W + columns_k[:, None]
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        S += load_state(start, i, hv, columns_k[:, None], columns_v[None, :], inside, sn, sh, sk, sv)
        if REVERSE:
            S = S / scale
    chunk0 = n * 0
    if KEEP:
        if PACKED:
            chunk0 = tl.load(chunk_first + n).to(tl.int64)
        else:
            chunk0 = n * ((T + C - 1) // C)
        kept += hv.to(tl.int64) * (W * V)
    strong = False
    if GATE == SCALAR:
        if y.dtype.element_ty == tl.float16:  # half a chunk's decay up or down is most of its range
            strong = True
        else:
            strong = strongest_decay(G, low, high, L, gt, C) <= -RANGE
    if strong:
        S = scan_chunks(
            S, a, b, y, G, weight, factor, out, kept, chunk0, low, high, L, HV, scale, at, et, yt, gt, mt, columns_k, columns_v,
            W, V, C, BK, BV, GATE, True, REVERSE, WEIGHTED, SKIP, KEEP, PREC
        )  # fmt: skip
    else:
        S = scan_chunks(
            S, a, b, y, G, weight, factor, out, kept, chunk0, low, high, L, HV, scale, at, et, yt, gt, mt, columns_k, columns_v,
            W, V, C, BK, BV, GATE, False, REVERSE, WEIGHTED, SKIP, KEEP, PREC
        )  # fmt: skip
    if END:
        if REVERSE:
            S = S * scale
        tl.store(end + (n * HV + hv) * (W * V) + tile, S, mask=inside)
