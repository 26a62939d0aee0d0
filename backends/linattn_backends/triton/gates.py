"""A scalar gate as the chunk kernels read it: ``G_t = Σ_{j≤t} g_j`` from the start of ``t``'s chunk, base 2.

Summed once, in a kernel of its own: a sum of 64 numbers in the loop over chunks takes longer than the rest of the gate.
"""

import triton
import triton.language as tl

from .kernels import sequence_of
from .tiles import FLOOR, LOG2E

__all__ = ["running_sums"]


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
