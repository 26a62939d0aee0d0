"""Kernels of ``mixed_attn``, and of every other sum that runs over whole chunks: ``linear_attn`` with ``causal=False``.

With ``x = quad_scale · q_quad k_quadᵀ + bias`` inside a chunk of ``C`` tokens, ``W = relu(x)²`` (masked to ``s ≤ t`` if
``CAUSAL``), and ``S`` the sum of ``k_linᵀ v`` over the chunks before (over all of them if not causal)::

    sums     k_linᵀ v of every chunk                              reverse: lin_scale q_linᵀ do
    scan     S before every chunk, and after the last whole one   reverse: dS, what later chunks make of a chunk's sum
    outputs  o = W v + lin_scale q_lin S
    queries  dq_quad = quad_scale dx k_quad,   dq_lin = lin_scale do Sᵀ,   dx = 2 relu(x) ∘ (do vᵀ)
    keys     dk_quad = quad_scale dxᵀ q_quad,  dk_lin = v dSᵀ
    values   dv = Wᵀ do + k_lin dS
    biases   dbias = dx, summed over sequences and chunks

Without ``QUAD`` there is no ``x``: sums alone. A sequence that goes on from a state has ``p`` tokens of its current chunk held
there (``HELD``): they are its first ``p`` tokens, as keys and values, and have no queries. A chunk is worked on in blocks of
``BT`` tokens; ``C`` may be anything. No program waits for another or adds to what another wrote.
"""

import triton
import triton.language as tl

from ..lib.tiles import product, times

__all__ = ["biases", "keys", "outputs", "queries", "scan", "sums", "values"]


@triton.jit
def chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED: tl.constexpr, HELD: tl.constexpr):
    """Chunk ``i``: its sequence, batch row, first new token, tokens held before, tokens in all (0 past the end), number."""
    p = 0
    if PACKED:
        n = tl.load(owner + i).to(tl.int64)
        there = n < N
        n = tl.where(there, n, 0)
        piece = i - tl.load(first + n)
        bos = tl.load(cu + n).to(tl.int64)
        L = (tl.load(cu + n + 1).to(tl.int64) - bos).to(tl.int32)
        row = n * 0
    else:
        n = (i // PER).to(tl.int64)
        piece = i % PER
        bos = n * 0
        L = T
        row = n
    if HELD:
        p = tl.load(length + n).to(tl.int32)
        L += p
    if PACKED:
        L = tl.where(there, L, 0)
    return n, row, bos, p, L, piece


@triton.jit
def load_rows(new, held, j, stride, held_stride, columns, p, stop, W: tl.constexpr, BW: tl.constexpr, HELD: tl.constexpr):
    """Tokens ``j`` below ``stop`` as a tile ``[BT, BW]``: the first ``p`` are held. ``new`` points at the first new token."""
    in_w = (columns < W)[None, :]
    rows = (j - p).to(tl.int64)[:, None]
    x = tl.load(new + rows * stride + columns[None, :], mask=((j >= p) & (j < stop))[:, None] & in_w, other=0.0)
    if HELD:
        old = held + j.to(tl.int64)[:, None] * held_stride + columns[None, :]
        x += tl.load(old, mask=((j < p) & (j < stop))[:, None] & in_w, other=0.0).to(x.dtype)
    return x


@triton.jit
def store_rows(new, held, x, j, stride, held_stride, columns, p, stop, W: tl.constexpr, HELD: tl.constexpr):
    """The transpose of ``load_rows``."""
    in_w = (columns < W)[None, :]
    rows = (j - p).to(tl.int64)[:, None]
    keep = ((j >= p) & (j < stop))[:, None] & in_w
    tl.store(new + rows * stride + columns[None, :], x.to(new.dtype.element_ty), mask=keep)
    if HELD:
        old = held + j.to(tl.int64)[:, None] * held_stride + columns[None, :]
        tl.store(old, x.to(held.dtype.element_ty), mask=((j < p) & (j < stop))[:, None] & in_w)


@triton.jit
def kept_scores(
    bq, bk, bias, t, s, tokens, C, scale, CAUSAL: tl.constexpr, BIAS: tl.constexpr, TURNED: tl.constexpr, PREC: tl.constexpr
):
    """``relu(x)`` for rows ``t`` and columns ``s`` of a chunk of ``tokens``, masked; transposed if ``TURNED``."""
    if TURNED:
        x = times(bk, tl.trans(bq), PREC) * scale
        rt, rs = t[None, :], s[:, None]
    else:
        x = times(bq, tl.trans(bk), PREC) * scale
        rt, rs = t[:, None], s[None, :]
    keep = (rt < tokens) & (rs < tokens)
    if CAUSAL:
        keep = keep & (rs <= rt)
    if BIAS:
        x += tl.load(bias + rt.to(tl.int64) * C + rs, mask=keep, other=0.0).to(tl.float32)
    return tl.where(keep, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 0.0)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C"])
def sums(
    x, y, held_x, held_y, out, owner, first, cu, length, T, PER, N, HV, C, scale,
    xb, xt, xh, yb, yt, yh, hx, hy,
    L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, HELD: tl.constexpr, QUERIES: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``scale xᵀ y`` of one chunk, a ``[BL, BV]`` tile, float32; ``QUERIES`` have no rows in the state."""
    NL: tl.constexpr = (L + BL - 1) // BL
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    il = pid // NV % NL
    hv = pid // (NV * NL) % HV
    i = pid // (NV * NL * HV)
    n, row, bos, p, tokens, piece = chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    if piece * C >= tokens:
        return
    head = hv.to(tl.int64)
    columns_l = il * BL + tl.arange(0, BL)
    columns_v = iv * BV + tl.arange(0, BV)
    x += row * xb + bos * xt + (head // GROUP) * xh
    y += row * yb + bos * yt + head * yh
    if HELD and not QUERIES:
        held_x += n * C * hx + head * L
        held_y += n * C * hy + head * V
    stop = tl.minimum(piece * C + C, tokens)
    acc = tl.zeros((BL, BV), tl.float32)
    for start in range(piece * C, stop, BT):
        j = start + tl.arange(0, BT)
        bx = load_rows(x, held_x, j, xt, hx, columns_l, p, stop, L, BL, HELD and not QUERIES)
        by = load_rows(y, held_y, j, yt, hy, columns_v, p, stop, V, BV, HELD and not QUERIES)
        acc = product(tl.trans(bx.to(by.dtype)), by, acc, PREC)
    at = out + (i.to(tl.int64) * HV + hv) * (L * V) + columns_l[:, None] * V + columns_v[None, :]
    tl.store(at, acc * scale, mask=(columns_l < L)[:, None] & (columns_v < V)[None, :])


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C"])
def scan(
    local, kept, start, end, owner, first, cu, length, T, PER, N, HV, C,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr,
    REVERSE: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """From the sums of chunks, what each chunk reads (``kept``); ``SIZE`` numbers a head. Only whole chunks add to a state."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    columns = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    hv = pid // BLOCKS % HV
    n = (pid // (BLOCKS * HV)).to(tl.int64)
    tokens = T
    chunk0 = (n * PER).to(tl.int64)
    if PACKED:
        tokens = (tl.load(cu + n + 1).to(tl.int64) - tl.load(cu + n).to(tl.int64)).to(tl.int32)
        chunk0 = tl.load(first + n).to(tl.int64)
    if HELD:
        tokens += tl.load(length + n).to(tl.int32)
    chunks = (tokens + C - 1) // C
    whole = tokens // C
    S = tl.zeros((BLOCK,), tl.float32)
    if START:
        S += tl.load(start + (n * HV + hv) * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        for step in range(0, chunks):
            c = step
            if REVERSE:
                c = chunks - 1 - step
            at = ((chunk0 + c) * HV + hv) * SIZE + columns
            own = tl.load(local + at, mask=inside, other=0.0)
            if REVERSE:
                tl.store(kept + at, tl.where(c < whole, S, 0.0).to(kept.dtype.element_ty), mask=inside)
                S += own
            else:
                tl.store(kept + at, S.to(kept.dtype.element_ty), mask=inside)
                S += tl.where(c < whole, own, 0.0)
    else:
        for c in range(0, chunks):
            S += tl.load(local + ((chunk0 + c) * HV + hv) * SIZE + columns, mask=inside, other=0.0)
        for c in range(0, chunks):
            tl.store(kept + ((chunk0 + c) * HV + hv) * SIZE + columns, S.to(kept.dtype.element_ty), mask=inside)
    if END:
        tl.store(end + (n * HV + hv) * SIZE + columns, S, mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def outputs(
    q_quad, k_quad, q_lin, v, held_k, held_v, bias, kept, out, owner, first, cu, length,
    T, PER, N, HV, C, BLOCKS, quad_scale, lin_scale,
    ab, at, ah, bb, bt, bh, qb, qt, qh, vb, vt, vh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr,
    BIAS: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """A ``[BT, BV]`` tile of ``o``: block ``t0`` of a chunk."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    block = pid // NV % BLOCKS
    hv = pid // (NV * BLOCKS) % HV
    i = pid // (NV * BLOCKS * HV)
    n, row, bos, p, tokens, piece = chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - piece * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    start = piece * C
    stop = start + inside
    t = block * BT + tl.arange(0, BT)
    q_lin += row * qb + bos * qt + (head // GROUP) * qh
    kept += (i.to(tl.int64) * HV + hv) * (L * V)
    acc = tl.zeros((BT, BV), tl.float32)
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        bq = load_rows(q_lin, q_lin, start + t, qt, 0, columns_l, p, stop, L, BL, False)
        bS = tl.load(
            kept + columns_l[:, None] * V + columns_v[None, :],
            mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
            other=0.0,
        )
        acc = product(bq.to(bS.dtype), bS, acc, PREC)
    acc = acc * lin_scale
    if QUAD:
        q_quad += row * ab + bos * at + head * ah
        k_quad += row * bb + bos * bt + head * bh
        v += row * vb + bos * vt + head * vh
        if HELD:
            held_k += n * C * HV * K + head * K
            held_v += n * C * HV * V + head * V
        if BIAS:
            bias += head * C * C
        bq = load_rows(q_quad, q_quad, start + t, at, 0, columns_k, p, stop, K, BK, False)
        high = inside
        if CAUSAL:
            high = tl.minimum(inside, block * BT + BT)
        for s0 in range(0, high, BT):
            s = s0 + tl.arange(0, BT)
            bk = load_rows(k_quad, held_k, start + s, bt, HV * K, columns_k, p, stop, K, BK, HELD)
            w = kept_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, False, PREC)
            bv = load_rows(v, held_v, start + s, vt, HV * V, columns_v, p, stop, V, BV, HELD)
            acc = product((w * w).to(DT), bv.to(DT), acc, PREC)
    out += ((row * T + bos) * HV + head) * V
    store_rows(out, out, acc, start + t, HV * V, 0, columns_v, p, stop, V, False)


@triton.jit
def score_gradient(
    do, v, held_v, bx, t, s, start, stop, p, dt, vt, V: tl.constexpr, BV: tl.constexpr, HV,
    HELD: tl.constexpr, TURNED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dx = 2 relu(x) ∘ (do vᵀ)``; transposed if ``TURNED``."""
    P = tl.zeros(bx.shape, tl.float32)
    for c in range(0, V, BV):
        columns_v = c + tl.arange(0, BV)
        bd = load_rows(do, do, start + t, dt, 0, columns_v, p, stop, V, BV, False)
        bv = load_rows(v, held_v, start + s, vt, HV * V, columns_v, p, stop, V, BV, HELD)
        if TURNED:
            P = product(bv.to(bd.dtype), tl.trans(bd), P, PREC)
        else:
            P = product(bd, tl.trans(bv.to(bd.dtype)), P, PREC)
    return tl.where(bx > 0, 2.0 * bx * P, 0.0)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def queries(
    q_quad, k_quad, q_lin, v, do, held_k, held_v, bias, kept, dq_quad, dq_lin, owner, first, cu, length,
    T, PER, N, HV, C, BLOCKS, quad_scale, lin_scale,
    ab, at, ah, bb, bt, bh, vb, vt, vh, db, dt, dh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr, BIAS: tl.constexpr,
    PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries."""
    pid = tl.program_id(0)
    block = pid % BLOCKS
    hv = pid // BLOCKS % HV
    i = pid // (BLOCKS * HV)
    n, row, bos, p, tokens, piece = chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - piece * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    start = piece * C
    stop = start + inside
    t = block * BT + tl.arange(0, BT)
    do += row * db + bos * dt + head * dh
    v += row * vb + bos * vt + head * vh
    kept += (i.to(tl.int64) * HV + hv) * (L * V)
    dq_lin += ((row * T + bos) * HV + head) * L
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        acc = tl.zeros((BT, BL), tl.float32)
        for c in range(0, V, BV):
            columns_v = c + tl.arange(0, BV)
            bd = load_rows(do, do, start + t, dt, 0, columns_v, p, stop, V, BV, False)
            bS = tl.load(
                kept + columns_l[:, None] * V + columns_v[None, :],
                mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
                other=0.0,
            )
            acc = product(bd.to(bS.dtype), tl.trans(bS), acc, PREC)
        store_rows(dq_lin, dq_lin, acc * lin_scale, start + t, HV * L, 0, columns_l, p, stop, L, False)
    if QUAD:
        q_quad += row * ab + bos * at + head * ah
        k_quad += row * bb + bos * bt + head * bh
        if HELD:
            held_k += n * C * HV * K + head * K
            held_v += n * C * HV * V + head * V
        if BIAS:
            bias += head * C * C
        bq = load_rows(q_quad, q_quad, start + t, at, 0, columns_k, p, stop, K, BK, False)
        grad = tl.zeros((BT, BK), tl.float32)
        high = inside
        if CAUSAL:
            high = tl.minimum(inside, block * BT + BT)
        for s0 in range(0, high, BT):
            s = s0 + tl.arange(0, BT)
            bk = load_rows(k_quad, held_k, start + s, bt, HV * K, columns_k, p, stop, K, BK, HELD)
            x = kept_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, False, PREC)
            dx = score_gradient(do, v, held_v, x, t, s, start, stop, p, dt, vt, V, BV, HV, HELD, False, PREC)
            grad = product(dx.to(DT), bk.to(DT), grad, PREC)
        dq_quad += ((row * T + bos) * HV + head) * K
        store_rows(dq_quad, dq_quad, grad * quad_scale, start + t, HV * K, 0, columns_k, p, stop, K, False)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def keys(
    q_quad, k_quad, v, do, held_k, held_v, bias, kept, dk_quad, dk_lin, dheld_quad, dheld_lin, tail_quad, tail_lin,
    owner, first, cu, length, T, PER, N, HV, C, BLOCKS, quad_scale,
    ab, at, ah, bb, bt, bh, vb, vt, vh, db, dt, dh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr, BIAS: tl.constexpr,
    TAIL_QUAD: tl.constexpr, TAIL_LIN: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys. ``tail``: of those that the final state holds."""
    pid = tl.program_id(0)
    block = pid % BLOCKS
    hv = pid // BLOCKS % HV
    i = pid // (BLOCKS * HV)
    n, row, bos, p, tokens, piece = chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - piece * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    start = piece * C
    stop = start + inside
    s = block * BT + tl.arange(0, BT)
    do += row * db + bos * dt + head * dh
    v += row * vb + bos * vt + head * vh
    kept += (i.to(tl.int64) * HV + hv) * (L * V)
    held = n * C * HV + head
    if HELD:
        held_k += held * K
        held_v += held * V
        dheld_lin += held * L
    dk_lin += ((row * T + bos) * HV + head) * L
    partial = inside < C
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        acc = tl.zeros((BT, BL), tl.float32)
        for c in range(0, V, BV):
            columns_v = c + tl.arange(0, BV)
            bv = load_rows(v, held_v, start + s, vt, HV * V, columns_v, p, stop, V, BV, HELD)
            bS = tl.load(
                kept + columns_l[:, None] * V + columns_v[None, :],
                mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
                other=0.0,
            )
            acc = product(bv.to(bS.dtype), tl.trans(bS), acc, PREC)
        if TAIL_LIN:
            at_tail = tail_lin + (held * L + s[:, None].to(tl.int64) * (HV * L)) + columns_l[None, :]
            acc += tl.load(at_tail, mask=(partial & (s < inside))[:, None] & (columns_l < L)[None, :], other=0.0).to(tl.float32)
        store_rows(dk_lin, dheld_lin, acc, start + s, HV * L, HV * L, columns_l, p, stop, L, HELD)
    if QUAD:
        q_quad += row * ab + bos * at + head * ah
        k_quad += row * bb + bos * bt + head * bh
        if BIAS:
            bias += head * C * C
        bk = load_rows(k_quad, held_k, start + s, bt, HV * K, columns_k, p, stop, K, BK, HELD)
        grad = tl.zeros((BT, BK), tl.float32)
        low = 0
        if CAUSAL:
            low = block * BT
        for t0 in range(low, inside, BT):
            t = t0 + tl.arange(0, BT)
            bq = load_rows(q_quad, q_quad, start + t, at, 0, columns_k, p, stop, K, BK, False)
            x = kept_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, True, PREC)
            dx = score_gradient(do, v, held_v, x, t, s, start, stop, p, dt, vt, V, BV, HV, HELD, True, PREC)
            grad = product(dx.to(DT), bq.to(DT), grad, PREC)
        grad = grad * quad_scale
        if TAIL_QUAD:
            at_tail = tail_quad + (held * K + s[:, None].to(tl.int64) * (HV * K)) + columns_k[None, :]
            grad += tl.load(at_tail, mask=(partial & (s < inside))[:, None] & (columns_k < K)[None, :], other=0.0).to(
                tl.float32
            )
        dk_quad += ((row * T + bos) * HV + head) * K
        if HELD:
            dheld_quad += held * K
        store_rows(dk_quad, dheld_quad, grad, start + s, HV * K, HV * K, columns_k, p, stop, K, HELD)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def values(
    q_quad, k_quad, k_lin, do, held_quad, held_lin, bias, kept, dv, dheld, tail, owner, first, cu, length,
    T, PER, N, HV, C, BLOCKS, quad_scale,
    ab, at, ah, bb, bt, bh, kb, kt, kh, db, dt, dh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr,
    BIAS: tl.constexpr, TAIL: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """A ``[BT, BV]`` tile of the gradient of one block of values."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    block = pid // NV % BLOCKS
    hv = pid // (NV * BLOCKS) % HV
    i = pid // (NV * BLOCKS * HV)
    n, row, bos, p, tokens, piece = chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - piece * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    start = piece * C
    stop = start + inside
    s = block * BT + tl.arange(0, BT)
    k_lin += row * kb + bos * kt + (head // GROUP) * kh
    kept += (i.to(tl.int64) * HV + hv) * (L * V)
    held = n * C * HV + head
    if HELD:
        held_quad += held * K
        held_lin += held * L
        dheld += held * V
    acc = tl.zeros((BT, BV), tl.float32)
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        bk = load_rows(k_lin, held_lin, start + s, kt, HV * L, columns_l, p, stop, L, BL, HELD)
        bS = tl.load(
            kept + columns_l[:, None] * V + columns_v[None, :],
            mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
            other=0.0,
        )
        acc = product(bk.to(bS.dtype), bS, acc, PREC)
    if QUAD:
        q_quad += row * ab + bos * at + head * ah
        k_quad += row * bb + bos * bt + head * bh
        do += row * db + bos * dt + head * dh
        if BIAS:
            bias += head * C * C
        bk = load_rows(k_quad, held_quad, start + s, bt, HV * K, columns_k, p, stop, K, BK, HELD)
        low = 0
        if CAUSAL:
            low = block * BT
        for t0 in range(low, inside, BT):
            t = t0 + tl.arange(0, BT)
            bq = load_rows(q_quad, q_quad, start + t, at, 0, columns_k, p, stop, K, BK, False)
            w = kept_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, True, PREC)
            bd = load_rows(do, do, start + t, dt, 0, columns_v, p, stop, V, BV, False)
            acc = product((w * w).to(DT), bd.to(DT), acc, PREC)
    if TAIL:
        at_tail = tail + (held * V + s[:, None].to(tl.int64) * (HV * V)) + columns_v[None, :]
        mask = ((inside < C) & (s < inside))[:, None] & (columns_v < V)[None, :]
        acc += tl.load(at_tail, mask=mask, other=0.0).to(tl.float32)
    dv += ((row * T + bos) * HV + head) * V
    store_rows(dv, dheld, acc, start + s, HV * V, HV * V, columns_v, p, stop, V, HELD)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS", "COUNT"])
def biases(
    q_quad, k_quad, v, do, held_k, held_v, bias, out, owner, first, cu, length,
    T, PER, N, HV, C, BLOCKS, COUNT, quad_scale,
    ab, at, ah, bb, bt, bh, vb, vt, vh, db, dt, dh,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the bias, summed over every chunk in order."""
    pid = tl.program_id(0)
    sb = pid % BLOCKS
    tb = pid // BLOCKS % BLOCKS
    hv = pid // (BLOCKS * BLOCKS)
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    t = tb * BT + tl.arange(0, BT)
    s = sb * BT + tl.arange(0, BT)
    bias += head * C * C
    acc = tl.zeros((BT, BT), tl.float32)
    for i in range(0, COUNT):
        n, row, bos, p, tokens, piece = chunk_of(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
        inside = tl.minimum(C, tokens - piece * C)
        wanted = (tb * BT < inside) & (sb * BT < inside)
        if CAUSAL:
            wanted = wanted & (sb <= tb)
        if wanted:
            start = piece * C
            stop = start + inside
            held = n * C * HV + head
            new_k = k_quad + row * bb + bos * bt + head * bh
            new_v = v + row * vb + bos * vt + head * vh
            new_q = q_quad + row * ab + bos * at + head * ah
            new_d = do + row * db + bos * dt + head * dh
            bq = load_rows(new_q, new_q, start + t, at, 0, columns_k, p, stop, K, BK, False)
            if HELD:
                old_k, old_v = held_k + held * K, held_v + held * V
            else:
                old_k, old_v = new_k, new_v
            bk = load_rows(new_k, old_k, start + s, bt, HV * K, columns_k, p, stop, K, BK, HELD)
            x = kept_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, True, False, PREC)
            acc += score_gradient(new_d, new_v, old_v, x, t, s, start, stop, p, dt, vt, V, BV, HV, HELD, False, PREC)
    keep = (t < C)[:, None] & (s < C)[None, :]
    tl.store(out + head * C * C + t[:, None].to(tl.int64) * C + s[None, :], acc, mask=keep)
