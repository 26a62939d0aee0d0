"""Log decays and writing strengths of raw ones ``[B, T, HV]``, and the gradients of those (:mod:`..lib.input_maps`).

They are small beside queries and keys, and every kernel of a core reads them: so they are made once, both in one launch, in
float32. Backward, a program walks over tokens, and adds up its part of the parameters' gradients ``Σ dg ∘ dg/dA`` and
``Σ dg ∘ dg/dx``. Where no gradient arrives, as behind packed sequences, nothing of what lies there does either.
"""

import triton
import triton.language as tl

from ..lib.gates import LOG2E
from ..lib.input_maps import NONE, decay_of, decay_slopes, strength_of, strength_slope

__all__ = ["maps_scalars_bwd", "maps_scalars_fwd"]


@triton.jit
def parameter_row(p, heads, stride, HV):
    """A parameter of heads ``[BH]``, float32, zeros if there is none; with stride 0, one number for all."""
    if p is None:
        row = tl.zeros(heads.shape, tl.float32)
    else:
        row = tl.load(p + heads.to(tl.int64) * stride, mask=heads < HV, other=0.0).to(tl.float32)
    return row


@triton.jit
def raw_tile(p, rows, heads, T, stride_b, stride_t, stride_h, inside):
    """Tokens ``[R]`` of all sequences and heads ``[BH]`` of an array as it lies, as a tile, float32."""
    at = (rows // T).to(tl.int64) * stride_b + (rows % T).to(tl.int64) * stride_t
    return tl.load(p + at[:, None] + heads.to(tl.int64)[None, :] * stride_h, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M", "T", "HV"])
def maps_scalars_fwd(
    g, beta, A_log, bias, decay, strength, M, T, HV, number, factor, gb, gt, gh, bb, bt, bh, As, bs,
    R: tl.constexpr, BH: tl.constexpr, MAP: tl.constexpr, STRENGTH: tl.constexpr,
):  # fmt: skip
    """``decay`` and ``strength`` of ``R`` of ``M`` tokens and ``BH`` heads; what is not asked for is ``None``."""
    pid = tl.program_id(0)
    blocks = (HV + BH - 1) // BH
    rows = pid // blocks * R + tl.arange(0, R)
    heads = pid % blocks * BH + tl.arange(0, BH)
    inside = (rows < M)[:, None] & (heads < HV)[None, :]
    at = rows.to(tl.int64)[:, None] * HV + heads[None, :]
    if MAP != NONE:
        x = raw_tile(g, rows, heads, T, gb, gt, gh, inside) + parameter_row(bias, heads, bs, HV)[None, :]
        rate = tl.exp2(parameter_row(A_log, heads, As, HV) * LOG2E)[None, :]
        tl.store(decay + at, decay_of(x, rate, number, MAP), mask=inside)
    if STRENGTH:
        tl.store(strength + at, strength_of(raw_tile(beta, rows, heads, T, bb, bt, bh, inside), factor), mask=inside)


@triton.jit(do_not_specialize=["M", "T", "HV"])
def maps_scalars_bwd(
    ddecay, dstrength, g, beta, A_log, bias, dg, dbeta, parts, M, T, HV, number, factor, gb, gt, gh, bb, bt, bh, As, bs,
    R: tl.constexpr, BH: tl.constexpr, MAP: tl.constexpr, STRENGTH: tl.constexpr,
):  # fmt: skip
    """``dg`` and ``dbeta`` of every so many tokens of ``BH`` heads, and ``parts [walks, 2, HV]`` of ``A``'s and the bias's."""
    pid = tl.program_id(0)
    blocks = (HV + BH - 1) // BH
    walk = pid // blocks
    heads = pid % blocks * BH + tl.arange(0, BH)
    by_rate = tl.zeros((R, BH), tl.float32)
    by_bias = tl.zeros((R, BH), tl.float32)
    if MAP != NONE:
        shift = parameter_row(bias, heads, bs, HV)[None, :]
        rate = tl.exp2(parameter_row(A_log, heads, As, HV) * LOG2E)[None, :]
    for block in range(walk, tl.cdiv(M, R), tl.num_programs(0) // blocks):
        rows = block * R + tl.arange(0, R)
        inside = (rows < M)[:, None] & (heads < HV)[None, :]
        at = rows.to(tl.int64)[:, None] * HV + heads[None, :]
        if MAP != NONE:
            by_x, by_A = decay_slopes(raw_tile(g, rows, heads, T, gb, gt, gh, inside) + shift, rate, number, MAP)
            d = tl.load(ddecay + at, mask=inside, other=0.0).to(tl.float32)
            by_rate += tl.where(d == 0.0, 0.0, d * by_A)
            d = tl.where(d == 0.0, 0.0, d * by_x)
            by_bias += d
            tl.store(dg + at, d.to(dg.dtype.element_ty), mask=inside)
        if STRENGTH:
            d = tl.load(dstrength + at, mask=inside, other=0.0).to(tl.float32)
            slope = strength_slope(raw_tile(beta, rows, heads, T, bb, bt, bh, inside), factor)
            tl.store(dbeta + at, tl.where(d == 0.0, 0.0, d * slope).to(dbeta.dtype.element_ty), mask=inside)
    if parts is not None:
        parts += walk.to(tl.int64) * 2 * HV + heads
        tl.store(parts, tl.sum(by_rate, 0), mask=heads < HV)
        tl.store(parts + HV, tl.sum(by_bias, 0), mask=heads < HV)
