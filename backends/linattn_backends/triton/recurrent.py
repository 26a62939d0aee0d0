"""The recurrence itself, one token after the other: decoding above all.

::

    S_t = Diag(e^{g_t}) S_{t-1} Diag(e^{gv_t}) + k_tᵀ v_t,    o_t = scale · q_t S_t
    with u (RWKV-6):                                          o_t = scale · q_t (S_{t-1} + Diag(u) k_tᵀ v_t)

A program holds all ``K`` rows of ``BV`` columns of one head's state in registers, float32, and walks one sequence. At ``T = 1``
it reads the state once and writes it once.
"""

import triton
import triton.language as tl

from .tiles import LOG2E

__all__ = ["recurrent"]


@triton.jit(do_not_specialize=["T", "HV"])
def recurrent(
    q, k, v, g, gv, u, start, out, end, cu, T, HV, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh, wb, wt, wh, sn, sh, sk,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, GATE: tl.constexpr, VALUE_GATE: tl.constexpr, EXCLUSIVE: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """Walk one sequence of one head with a ``[K, BV]`` tile of its state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    n = (pid // (NV * HV)).to(tl.int64)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    in_k = columns_k < K
    in_v = columns_v < V
    inside = in_k[:, None] & in_v[None, :]
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        p = start + n * sn + hv.to(tl.int64) * sh + columns_k[:, None] * sk + columns_v[None, :]
        S += tl.load(p, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        bos = tl.load(cu + n).to(tl.int64)
        L = (tl.load(cu + n + 1).to(tl.int64) - bos).to(tl.int32)
        b = n * 0
    else:
        bos = n * 0
        L = T
        b = n
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    v += b * vb + bos * vt + hv.to(tl.int64) * vh
    if GATE > 0:
        g += b * gb + bos * gt + (hv // GATE_GROUP).to(tl.int64) * gh
    if VALUE_GATE:
        gv += b * wb + bos * wt + hv.to(tl.int64) * wh
    out += ((b * T + bos) * HV + hv) * V
    if EXCLUSIVE:
        bu = tl.load(u + hv * K + columns_k, mask=in_k, other=0.0).to(tl.float32)
    for _ in range(0, L):
        bq = tl.load(q + columns_k, mask=in_k, other=0.0).to(tl.float32) * scale
        bk = tl.load(k + columns_k, mask=in_k, other=0.0).to(tl.float32)
        bv = tl.load(v + columns_v, mask=in_v, other=0.0).to(tl.float32)
        if EXCLUSIVE:
            o = tl.sum(S * bq[:, None], 0) + tl.sum(bq * bu * bk, 0) * bv
        if GATE == 1:
            S = S * tl.exp2(tl.load(g).to(tl.float32) * LOG2E)
        if GATE == 2:
            bg = tl.load(g + columns_k, mask=in_k, other=0.0).to(tl.float32)
            S = S * tl.exp2(bg * LOG2E)[:, None]
        if VALUE_GATE:
            bg = tl.load(gv + columns_v, mask=in_v, other=0.0).to(tl.float32)
            S = S * tl.exp2(bg * LOG2E)[None, :]
        S += bk[:, None] * bv[None, :]
        if not EXCLUSIVE:
            o = tl.sum(S * bq[:, None], 0)
        tl.store(out + columns_v, o.to(out.dtype.element_ty), mask=in_v)
        q += qt
        k += kt
        v += vt
        out += HV * V
        if GATE > 0:
            g += gt
        if VALUE_GATE:
            gv += wt
    if END:
        p = end + (n * HV + hv) * (K * V) + columns_k[:, None] * V + columns_v[None, :]
        tl.store(p, S, mask=inside)
