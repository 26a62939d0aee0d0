"""A scalar gate's running sums, and its gradient.

::

    G_t = Σ_{j≤t} g_j                                           from the start of t's chunk
    dg_j = Σ_{t≥j} (q_t·dq_t - k_t·dk_t) + Σ S ∘ dS             t up to the end of a span of chunks, S and dS there

Summing within spans alone keeps the rounding of far tokens out of ``dg``.
"""

import triton
import triton.language as tl

from .kernels import sequence_of
from .tiles import FLOOR, LOG2E

__all__ = ["gate_gradient", "running_sums"]


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def running_sums(
    g, G, owner, first, cu, T, PER, N, HV, gb, gt, gh, Gb, Gt, Gh, C: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``G`` of one chunk and ``BH`` heads, base 2, in ``G``'s dtype."""
    pid = tl.program_id(0)
    blocks = (HV + BH - 1) // BH
    i = pid // blocks
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = (piece * C + tl.arange(0, C)).to(tl.int64)[:, None]
    heads = (pid % blocks * BH + tl.arange(0, BH)).to(tl.int64)[None, :]
    inside = (rows < L) & (heads < HV)
    bg = tl.load(g + b * gb + (bos + rows) * gt + heads * gh, mask=inside, other=0.0).to(tl.float32)
    bg = tl.maximum(bg, FLOOR, propagate_nan=tl.PropagateNan.ALL).to(G.dtype.element_ty)
    p = G + b * Gb + (bos + rows) * Gt + heads * Gh
    tl.store(p, tl.cumsum(bg * LOG2E, 0), mask=inside)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "SPANS", "TOKENS"])
def gate_gradient(
    g, q_dots, k_dots, met, dg, owner, first, cu, T, PER, N, HV, SPANS, TOKENS, gb, gt, gh,
    LENGTH: tl.constexpr, TILES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``dg [B, T, HV]`` in one span of ``LENGTH`` tokens of one head, from the sums that tiles of channels left."""
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    rows = (piece * LENGTH + tl.arange(0, LENGTH)).to(tl.int64)
    mask = rows < L
    d = tl.zeros((LENGTH,), tl.float32)
    through = 0.0
    for tile in tl.static_range(TILES):
        at = (tile * HV + hv).to(tl.int64) * TOKENS + b * T + bos
        d += tl.load(q_dots + at + rows, mask=mask, other=0.0) - tl.load(k_dots + at + rows, mask=mask, other=0.0)
        through += tl.load(met + (tile * SPANS + i).to(tl.int64) * HV + hv)
    d = tl.cumsum(d, 0, reverse=True) + through
    bg = tl.load(g + b * gb + (bos + rows) * gt + hv.to(tl.int64) * gh, mask=mask, other=0.0).to(tl.float32)
    d = tl.where(bg <= -87.0, 0.0, d)  # e^g is zero, and so is its gradient
    tl.store(dg + (b * T + bos + rows) * HV + hv, d.to(dg.dtype.element_ty), mask=mask)
