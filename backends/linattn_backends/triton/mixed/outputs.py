"""Outputs of ``mixed_attn`` and, with ``causal=False``, of ``linear_attn``.

With ``x = quad_scale · q_quad k_quadᵀ + bias`` inside a chunk of ``C`` tokens, ``W = relu(x)²``, masked to ``s ≤ t`` if
``CAUSAL``, and ``S`` the state that the chunk reads (:mod:`.states`)::

    mixed_outputs_fwd    o = W v + lin_scale q_lin S

Without ``QUAD`` there is no ``x``, and states alone. No program waits for another or adds to what another wrote.
"""

import triton
import triton.language as tl

from ..lib.tiles import dot_add
from .blocks import load_rows, locate_chunk, relu_scores, store_rows

__all__ = ["mixed_outputs_fwd"]


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "C", "BLOCKS"])
def mixed_outputs_fwd(
    q_quad, k_quad, q_lin, v, held_k, held_v, bias, states, out, owner, first, cu, length,
    T, PER, N, HV, C, BLOCKS, quad_scale, lin_scale,
    ab, at, ah, bb, bt, bh, qb, qt, qh, vb, vt, vh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, HELD: tl.constexpr, CAUSAL: tl.constexpr, QUAD: tl.constexpr,
    BIAS: tl.constexpr, PREC: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """A ``[BT, BV]`` tile of ``o``, of one block of a chunk."""
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
    t = block * BT + tl.arange(0, BT)
    q_lin += row * qb + bos * qt + (head // GROUP) * qh
    states += (i.to(tl.int64) * HV + hv) * (L * V)
    acc = tl.zeros((BT, BV), tl.float32)
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        bq = load_rows(q_lin, q_lin, start + t, qt, 0, columns_l, p, stop, L, BL, False)
        bS = tl.load(
            states + columns_l[:, None] * V + columns_v[None, :],
            mask=(columns_l < L)[:, None] & (columns_v < V)[None, :],
            other=0.0,
        )
        acc = dot_add(bq.to(bS.dtype), bS, acc, PREC)
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
            w = relu_scores(bq, bk, bias, t, s, inside, C, quad_scale, CAUSAL, BIAS, False, PREC)
            bv = load_rows(v, held_v, start + s, vt, HV * V, columns_v, p, stop, V, BV, HELD)
            acc = dot_add((w * w).to(DT), bv.to(DT), acc, PREC)
    out += ((row * T + bos) * HV + head) * V
    store_rows(out, out, acc, start + t, HV * V, 0, columns_v, p, stop, V, False)
