"""One token a sequence of ``mixed_attn``, in one pass over the state.

Only the state is worth counting here: a sequence reads the ``p`` tokens held of its chunk, and ``kv``, once, and writes all of
the next state. More tokens, and gradients, are those of :mod:`.outputs` and :mod:`.gradients`.
"""

import triton
import triton.language as tl

from ..lib.tiles import dot_add

__all__ = ["mixed_step_fwd"]


@triton.jit
def load_renewed(held, new, s, p, stride, columns, W: tl.constexpr):
    """Tokens ``s`` of the chunk as a tile, float32: those held, and at ``p`` the new one, whose row is at ``new``."""
    inside = (columns < W)[None, :]
    x = tl.load(held + s.to(tl.int64)[:, None] * stride + columns[None, :], mask=(s < p)[:, None] & inside, other=0.0)
    own = tl.load(new + columns, mask=columns < W, other=0.0).to(tl.float32)
    return tl.where((s == p)[:, None], own[None, :], x.to(tl.float32))


@triton.jit(do_not_specialize=["HV", "C"])
def mixed_step_fwd(
    q_quad, k_quad, q_lin, k_lin, v, bias, kv, held_k, held_l, held_v, length, out, new_kv, new_k, new_l, new_v, new_length,
    HV, C, quad_scale, lin_scale, ab, ah, bb, bh, qb, qh, kb, kh, vb, vh,
    K: tl.constexpr, L: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, BV: tl.constexpr,
    BIAS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``BV`` value channels of one head of one sequence; the first such program copies keys. A full chunk goes to ``kv``."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = (pid // NV % HV).to(tl.int64)
    n = (pid // (NV * HV)).to(tl.int64)
    p = tl.load(length + n).to(tl.int32)
    full = p + 1 == C
    if pid % (NV * HV) == 0:
        tl.store(new_length + n, tl.where(full, 0, p + 1))
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    in_v = columns_v < V
    k_quad += n * bb + hv * bh
    k_lin += n * kb + hv * kh
    v += n * vb + hv * vh
    keys = (n * C * HV + hv) * K
    lins = (n * C * HV + hv) * L
    values = (n * C * HV + hv) * V
    sums = (n * HV + hv) * (L * V)
    q = tl.load(q_quad + n * ab + hv * ah + columns_k, mask=columns_k < K, other=0.0).to(tl.float32)
    acc = tl.zeros((BV,), tl.float32)
    for start in range(0, C, BT):
        s = start + tl.arange(0, BT)
        there = (s < C)[:, None]
        rows = s.to(tl.int64)[:, None] * HV
        bk = load_renewed(held_k + keys, k_quad, s, p, HV * K, columns_k, K)
        bv = load_renewed(held_v + values, v, s, p, HV * V, columns_v, V)
        x = tl.sum(bk * q[None, :], 1) * quad_scale
        if BIAS:
            x += tl.load(bias + (hv * C + p) * C + s, mask=s <= p, other=0.0).to(tl.float32)
        w = tl.where(s <= p, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
        acc += tl.sum((w * w)[:, None] * bv, 0)
        tl.store(new_v + values + rows * V + columns_v[None, :], tl.where(full, 0.0, bv), mask=there & in_v[None, :])
        if iv == 0:
            at = new_k + keys + rows * K + columns_k[None, :]
            tl.store(at, tl.where(full, 0.0, bk), mask=there & (columns_k < K)[None, :])
    for l in range(0, L, BL):
        columns_l = l + tl.arange(0, BL)
        inside = (columns_l < L)[:, None] & in_v[None, :]
        tile = sums + columns_l[:, None] * V + columns_v[None, :]
        S = tl.load(kv + tile, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(q_lin + n * qb + hv * qh + columns_l, mask=columns_l < L, other=0.0).to(tl.float32)
        acc += tl.sum(S * b[:, None], 0) * lin_scale
        for start in range(0, C, BT):
            s = start + tl.arange(0, BT)
            if full or iv == 0:
                bl = load_renewed(held_l + lins, k_lin, s, p, HV * L, columns_l, L)
                if full:
                    S = dot_add(tl.trans(bl), load_renewed(held_v + values, v, s, p, HV * V, columns_v, V), S, PREC)
                if iv == 0:
                    at = new_l + lins + s.to(tl.int64)[:, None] * HV * L + columns_l[None, :]
                    tl.store(at, tl.where(full, 0.0, bl), mask=(s < C)[:, None] & (columns_l < L)[None, :])
        tl.store(new_kv + tile, S, mask=inside)
    tl.store(out + (n * HV + hv) * V + columns_v, acc.to(out.dtype.element_ty), mask=in_v)
