"""The recurrence itself, one token after the other, of every matrix-state family: decoding above all.

::

    S' = Diag(e^{g_t}) S_{t-1} Diag(e^{gv_t})
    S_t = S' + k_tᵀ v_t                                       the families with a diagonal gate
    S_t = S' + k_tᵀ (beta_t ∘ (v_t − k_t S'))                 the delta families: BETA, 1 a head, 2 a value channel
    S_t = S' + b_tᵀ (a_t S_{t-1}) + k_tᵀ v_t                  dplr: LOW_RANK
    o_t = scale · q_t S_t
    o_t = scale · q_t (S_{t-1} + Diag(u) k_tᵀ v_t)            RWKV-6: EXCLUSIVE

A program holds all ``K`` rows of ``BV`` columns of one head's state in registers, float32, and walks one sequence: no column
of a state needs another, so every sum over ``K`` stays inside it. At ``T = 1`` it reads the state once and writes it once, and
may write it where it read it. ``SLOTS`` says which of many states is a sequence's; a slot that is none of them is padding.

Raw projections become what the equations say as a token is taken up: unit ``q`` and ``k`` (``UNIT``), log decays (``MAP``),
writing strengths (``STRENGTH``), by :mod:`..lib.input_maps`.
"""

import triton
import triton.language as tl

from ..lib.gates import LOG2E
from ..lib.input_maps import NONE, decay_of, load_bias, load_rate, strength_of, unit

__all__ = ["recurrent_tokens_fwd"]


@triton.jit
def load_token(
    i, L, q, k, v, g, gv, beta, a, b, qt, kt, vt, gt, wt, et, at, bt, columns_k, columns_v, in_k, in_v,
    GATE: tl.constexpr, VALUE_GATE: tl.constexpr, BETA: tl.constexpr, LOW_RANK: tl.constexpr,
):  # fmt: skip
    """Rows of token ``i`` of ``L``, zeros from ``L`` on; for what a family lacks, anything."""
    more = i < L
    in_k = in_k & more
    in_v = in_v & more
    bq = tl.load(q + i * qt + columns_k, mask=in_k, other=0.0)
    bk = tl.load(k + i * kt + columns_k, mask=in_k, other=0.0)
    bv = tl.load(v + i * vt + columns_v, mask=in_v, other=0.0)
    bg, bw, be, ba, bb = bq, bv, bv, bq, bq
    if GATE == 1:
        bg = tl.load(g + i * gt, mask=more, other=0.0)
    if GATE == 2:
        bg = tl.load(g + i * gt + columns_k, mask=in_k, other=0.0)
    if VALUE_GATE:
        bw = tl.load(gv + i * wt + columns_v, mask=in_v, other=0.0)
    if BETA == 1:
        be = tl.load(beta + i * et, mask=more, other=0.0)
    if BETA == 2:
        be = tl.load(beta + i * et + columns_v, mask=in_v, other=0.0)
    if LOW_RANK:
        ba = tl.load(a + i * at + columns_k, mask=in_k, other=0.0)
        bb = tl.load(b + i * bt + columns_k, mask=in_k, other=0.0)
    return bq, bk, bv, bg, bw, be, ba, bb


@triton.jit
def to_float32(q, k, v, g, gv, beta, a, b):
    """A token's rows in float32, before they take the state's layout: there a thread holds eight times as much of a vector."""
    return (
        q.to(tl.float32), k.to(tl.float32), v.to(tl.float32), g.to(tl.float32), gv.to(tl.float32), beta.to(tl.float32),
        a.to(tl.float32), b.to(tl.float32),
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "HV", "P"])
def recurrent_tokens_fwd(
    q, k, v, g, gv, beta, a, b, u, A_log, bias, start, out, end, cu, slots, T, HV, P, scale, number, factor,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh, wb, wt, wh, eb, et, eh, ab, at, ah, bb, bt, bh,
    As, bs, bias_k, sn, sh, sk, sv, fn, fh, fk, fv,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    GROUP: tl.constexpr, GATE_GROUP: tl.constexpr, GATE: tl.constexpr, VALUE_GATE: tl.constexpr, BETA: tl.constexpr,
    LOW_RANK: tl.constexpr, EXCLUSIVE: tl.constexpr, UNIT: tl.constexpr, MAP: tl.constexpr, STRENGTH: tl.constexpr,
    PACKED: tl.constexpr, SLOTS: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
    WIDE_STRIDES: tl.constexpr,
):  # fmt: skip
    """Walk one sequence of one head with a ``[K, BV]`` tile of its state."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    iv = pid % NV
    hv = pid // NV % HV
    n = (pid // (NV * HV)).to(tl.int64)
    head = hv.to(tl.int64)
    columns_k = tl.arange(0, BK)
    columns_v = iv * BV + tl.arange(0, BV)
    in_k = columns_k < K
    in_v = columns_v < V
    inside = in_k[:, None] & in_v[None, :]
    if PACKED:
        bos = tl.load(cu + n).to(tl.int64)
        L = (tl.load(cu + n + 1).to(tl.int64) - bos).to(tl.int32)
        row = n * 0
    else:
        bos = n * 0
        L = T
        row = n
    out += ((row * T + bos) * HV + hv) * V
    slot = n
    if SLOTS:
        slot = tl.load(slots + n).to(tl.int64)
        if (slot < 0) | (slot >= P):
            for _ in range(0, L):
                tl.store(out + columns_v, tl.zeros((BV,), out.dtype.element_ty), mask=in_v)
                out += HV * V
            return
    in_state_k = columns_k[:, None]
    in_state_v = columns_v[None, :]
    if WIDE_STRIDES:
        in_state_k = in_state_k.to(tl.int64)
        in_state_v = in_state_v.to(tl.int64)
    S = tl.zeros((BK, BV), tl.float32)
    if START:
        p = start + slot * sn + head * sh + in_state_k * sk + in_state_v * sv
        S += tl.load(p, mask=inside, other=0.0).to(tl.float32)
    q += row * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += row * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    v += row * vb + bos * vt + head * vh
    if GATE > 0:
        g += row * gb + bos * gt + (hv // GATE_GROUP).to(tl.int64) * gh
    if VALUE_GATE:
        gv += row * wb + bos * wt + head * wh
    if BETA > 0:
        beta += row * eb + bos * et + head * eh
    if LOW_RANK:
        a += row * ab + bos * at + head * ah
        b += row * bb + bos * bt + head * bh
    if EXCLUSIVE:
        bu = tl.load(u + hv * K + columns_k, mask=in_k, other=0.0).to(tl.float32)
    if MAP != NONE:
        gate_head = (hv // GATE_GROUP).to(tl.int64)
        rate = load_rate(A_log, gate_head * As)
        shift = load_bias(bias, gate_head * bs, columns_k, bias_k, in_k, GATE)
    # Loaded two tokens ahead: under load, memory takes longer than the work on one.
    zero = n * 0
    mq, mk, mv, mg, mw, me, ma, mb = load_token(
        zero, L, q, k, v, g, gv, beta, a, b, qt, kt, vt, gt, wt, et, at, bt, columns_k, columns_v, in_k, in_v,
        GATE, VALUE_GATE, BETA, LOW_RANK
    )  # fmt: skip
    nq, nk, nv, ng, nw, ne, na, nb = to_float32(mq, mk, mv, mg, mw, me, ma, mb)
    mq, mk, mv, mg, mw, me, ma, mb = load_token(
        zero + 1, L, q, k, v, g, gv, beta, a, b, qt, kt, vt, gt, wt, et, at, bt, columns_k, columns_v, in_k, in_v,
        GATE, VALUE_GATE, BETA, LOW_RANK
    )  # fmt: skip
    for i in range(0, L):
        bq, bk, bv, bg, bw, be, ba, low = nq, nk, nv, ng, nw, ne, na, nb
        nq, nk, nv, ng, nw, ne, na, nb = to_float32(mq, mk, mv, mg, mw, me, ma, mb)
        mq, mk, mv, mg, mw, me, ma, mb = load_token(
            zero + i + 2, L, q, k, v, g, gv, beta, a, b, qt, kt, vt, gt, wt, et, at, bt, columns_k, columns_v, in_k, in_v,
            GATE, VALUE_GATE, BETA, LOW_RANK
        )  # fmt: skip
        if UNIT:
            bq = unit(bq)
            bk = unit(bk)
        if MAP != NONE:
            bg = decay_of(bg + shift, rate, number, MAP)
        if STRENGTH:
            be = strength_of(be, factor)
        if EXCLUSIVE:
            o = tl.sum(S * bq[:, None], 0) + tl.sum(bq * bu * bk, 0) * bv
        if LOW_RANK:
            read = tl.sum(S * ba[:, None], 0)
        if GATE == 1:
            S = S * tl.exp2(bg * LOG2E)
        if GATE == 2:
            S = S * tl.exp2(bg * LOG2E)[:, None]
        if VALUE_GATE:
            S = S * tl.exp2(bw * LOG2E)[None, :]
        if BETA > 0:
            bv = (bv - tl.sum(S * bk[:, None], 0)) * be
        S += bk[:, None] * bv[None, :]
        if LOW_RANK:
            S += low[:, None] * read[None, :]
        if not EXCLUSIVE:
            o = tl.sum(S * bq[:, None], 0)
        tl.store(out + columns_v, (o * scale).to(out.dtype.element_ty), mask=in_v)
        out += HV * V
    if END:
        p = end + slot * fn + head * fh + in_state_k * fk + in_state_v * fv
        tl.store(p, S.to(end.dtype.element_ty), mask=inside)
