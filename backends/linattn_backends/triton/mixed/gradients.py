"""Gradients of ``mixed_attn`` and, with ``causal=False``, of ``linear_attn``.

With ``x``, ``W`` and ``S`` of :mod:`.outputs`, ``dS`` of :mod:`.states`, and ``dx = 2 relu(x) ∘ (do vᵀ)``::

    mixed_queries_bwd    dq_quad = quad_scale dx k_quad,   dq_lin = lin_scale do Sᵀ
    mixed_keys_bwd       dk_quad = quad_scale dxᵀ q_quad,  dk_lin = v dSᵀ
    mixed_values_bwd     dv = Wᵀ do + k_lin dS
    mixed_bias_bwd       dbias = dx, summed over sequences and chunks

No program waits for another or adds to what another wrote.
"""

import triton
import triton.language as tl

from ..lib.tiles import dot_add
from .blocks import load_rows, locate_chunk, relu_scores, store_rows

__all__ = ["mixed_bias_bwd", "mixed_keys_bwd", "mixed_queries_bwd", "mixed_values_bwd"]


@triton.jit
def score_gradient(
    do, v, held_v, bx, t, s, start, stop, p, dt, vt, V: tl.constexpr, BV: tl.constexpr, HV,
    HELD: tl.constexpr, TRANSPOSED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dx = 2 relu(x) ∘ (do vᵀ)``; transposed if ``TRANSPOSED``."""
    P = tl.zeros(bx.shape, tl.float32)
    for c in range(0, V, BV):
        columns_v = c + tl.arange(0, BV)
        bd = load_rows(do, do, start + t, dt, 0, columns_v, p, stop, V, BV, False)
        bv = load_rows(v, held_v, start + s, vt, HV * V, columns_v, p, stop, V, BV, HELD)
        if TRANSPOSED:
            P = dot_add(bv.to(bd.dtype), tl.trans(bd), P, PREC)
        else:
            P = dot_add(bd, tl.trans(bv.to(bd.dtype)), P, PREC)
    return tl.where(bx > 0, 2.0 * bx * P, 0.0)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def mixed_queries_bwd(
    q_quad, k_quad, q_lin, v, do, held_k, held_v, bias, states, dq_quad, dq_lin, owner, first, cu, length,
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
    n, row, bos, p, tokens, chunk = locate_chunk(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - chunk * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    start = chunk * C
    stop = start + inside
    t = block * BT + tl.arange(0, BT)
    do += row * db + bos * dt + head * dh
    v += row * vb + bos * vt + head * vh
    states += (i.to(tl.int64) * HV + hv) * (L * V)
    dq_lin += ((row * T + bos) * HV + head) * L
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        acc = tl.zeros((BT, BL), tl.float32)
        for c in range(0, V, BV):
            columns_v = c + tl.arange(0, BV)
            bd = load_rows(do, do, start + t, dt, 0, columns_v, p, stop, V, BV, False)
            bS = tl.load(
                states + columns_l[:, None] * V + columns_v[None, :],
                mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
                other=0.0,
            )
            acc = dot_add(bd.to(bS.dtype), tl.trans(bS), acc, PREC)
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
            x = relu_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, False, PREC)
            dx = score_gradient(do, v, held_v, x, t, s, start, stop, p, dt, vt, V, BV, HV, HELD, False, PREC)
            grad = dot_add(dx.to(DT), bk.to(DT), grad, PREC)
        dq_quad += ((row * T + bos) * HV + head) * K
        store_rows(dq_quad, dq_quad, grad * quad_scale, start + t, HV * K, 0, columns_k, p, stop, K, False)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def mixed_keys_bwd(
    q_quad, k_quad, v, do, held_k, held_v, bias, dstates, dk_quad, dk_lin, dheld_quad, dheld_lin, dfinal_quad, dfinal_lin,
    owner, first, cu, length, T, PER, N, HV, C, BLOCKS, quad_scale,
    ab, at, ah, bb, bt, bh, vb, vt, vh, db, dt, dh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr, BIAS: tl.constexpr,
    DFINAL_QUAD: tl.constexpr, DFINAL_LIN: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys; ``dfinal_quad`` and ``dfinal_lin`` are those of the keys that the final state holds."""
    pid = tl.program_id(0)
    block = pid % BLOCKS
    hv = pid // BLOCKS % HV
    i = pid // (BLOCKS * HV)
    n, row, bos, p, tokens, chunk = locate_chunk(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - chunk * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    start = chunk * C
    stop = start + inside
    s = block * BT + tl.arange(0, BT)
    do += row * db + bos * dt + head * dh
    v += row * vb + bos * vt + head * vh
    dstates += (i.to(tl.int64) * HV + hv) * (L * V)
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
                dstates + columns_l[:, None] * V + columns_v[None, :],
                mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
                other=0.0,
            )
            acc = dot_add(bv.to(bS.dtype), tl.trans(bS), acc, PREC)
        if DFINAL_LIN:
            final = dfinal_lin + (held * L + s[:, None].to(tl.int64) * (HV * L)) + columns_l[None, :]
            acc += tl.load(final, mask=(partial & (s < inside))[:, None] & (columns_l < L)[None, :], other=0.0).to(tl.float32)
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
            x = relu_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, True, PREC)
            dx = score_gradient(do, v, held_v, x, t, s, start, stop, p, dt, vt, V, BV, HV, HELD, True, PREC)
            grad = dot_add(dx.to(DT), bq.to(DT), grad, PREC)
        grad = grad * quad_scale
        if DFINAL_QUAD:
            final = dfinal_quad + (held * K + s[:, None].to(tl.int64) * (HV * K)) + columns_k[None, :]
            grad += tl.load(final, mask=(partial & (s < inside))[:, None] & (columns_k < K)[None, :], other=0.0).to(tl.float32)
        dk_quad += ((row * T + bos) * HV + head) * K
        if HELD:
            dheld_quad += held * K
        store_rows(dk_quad, dheld_quad, grad, start + s, HV * K, HV * K, columns_k, p, stop, K, HELD)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def mixed_values_bwd(
    q_quad, k_quad, k_lin, do, held_quad, held_lin, bias, dstates, dv, dheld, dfinal, owner, first, cu, length,
    T, PER, N, HV, C, BLOCKS, quad_scale,
    ab, at, ah, bb, bt, bh, kb, kt, kh, db, dt, dh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr,
    BIAS: tl.constexpr, DFINAL: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """A ``[BT, BV]`` tile of the gradient of one block of values; ``dfinal`` is that of values that the final state holds."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    block = pid // NV % BLOCKS
    hv = pid // (NV * BLOCKS) % HV
    i = pid // (NV * BLOCKS * HV)
    n, row, bos, p, tokens, chunk = locate_chunk(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
    inside = tl.minimum(C, tokens - chunk * C)
    if block * BT >= inside:
        return
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    start = chunk * C
    stop = start + inside
    s = block * BT + tl.arange(0, BT)
    k_lin += row * kb + bos * kt + (head // GROUP) * kh
    dstates += (i.to(tl.int64) * HV + hv) * (L * V)
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
            dstates + columns_l[:, None] * V + columns_v[None, :],
            mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
            other=0.0,
        )
        acc = dot_add(bk.to(bS.dtype), bS, acc, PREC)
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
            w = relu_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, True, PREC)
            bd = load_rows(do, do, start + t, dt, 0, columns_v, p, stop, V, BV, False)
            acc = dot_add((w * w).to(DT), bd.to(DT), acc, PREC)
    if DFINAL:
        final = dfinal + (held * V + s[:, None].to(tl.int64) * (HV * V)) + columns_v[None, :]
        mask = ((inside < C) & (s < inside))[:, None] & (columns_v < V)[None, :]
        acc += tl.load(final, mask=mask, other=0.0).to(tl.float32)
    dv += ((row * T + bos) * HV + head) * V
    store_rows(dv, dheld, acc, start + s, HV * V, HV * V, columns_v, p, stop, V, HELD)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS", "COUNT"])
def mixed_bias_bwd(
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
        n, row, bos, p, tokens, chunk = locate_chunk(i, owner, first, cu, length, T, PER, N, C, PACKED, HELD)
        inside = tl.minimum(C, tokens - chunk * C)
        wanted = (tb * BT < inside) & (sb * BT < inside)
        if CAUSAL:
            wanted = wanted & (sb <= tb)
        if wanted:
            start = chunk * C
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
            x = relu_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, True, False, PREC)
            acc += score_gradient(new_d, new_v, old_v, x, t, s, start, stop, p, dt, vt, V, BV, HV, HELD, False, PREC)
    keep = (t < C)[:, None] & (s < C)[None, :]
    tl.store(out + head * C * C + t[:, None].to(tl.int64) * C + s[None, :], acc, mask=keep)
