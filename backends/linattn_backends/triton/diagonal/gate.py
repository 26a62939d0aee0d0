"""Gates as sums over a chunk's tokens: what small kernels make before the others run.

A scalar gate as the chunk kernels read it is ``G_t = Σ_{j≤t} g_j`` from the start of ``t``'s chunk, base 2: a sum of 64 numbers
in the loop over chunks takes longer than the rest of the gate. A vector gate is summed by products with matrices of ones and
zeros. They are made again for every call, in two microseconds: an array that outlives a call would lie in the memory of
whatever graph is being recorded, or prepared to be, when it is first made.
"""

import triton
import triton.language as tl

from ..lib.gates import FLOOR, LOG2E
from ..lib.indexing import locate_sequence

__all__ = ["diagonal_running_sums_fwd", "diagonal_sum_matrices_fwd"]


# Kinds of gates, as kernels are compiled for them (``GATE``).
NONE = tl.constexpr(0)
SCALAR = tl.constexpr(1)  # one number a token; ``g`` holds running sums within the chunks
VECTOR = tl.constexpr(2)  # one a key channel; ``g`` holds log decays
SUMMED = tl.constexpr(3)  # one a key channel, applied to the rows already; ``g`` holds its sum over each chunk

# Places of the matrices in ``masks``. ``BLOCKS``: three a length; ``LEVELS``: two a level, the longest first.
UNTIL = tl.constexpr(0)
AFTER = tl.constexpr(1)
BEFORE = tl.constexpr(2)
FROM = tl.constexpr(3)
BLOCKS = tl.constexpr(4)
LEVELS = tl.constexpr(10)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def diagonal_running_sums_fwd(
    g, weight, G, late, owner, first, cu, T, PER, N, HV, gb, gt, gh, mb, mt, mh, Gb, Gt, Gh,
    C: tl.constexpr, BH: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``G`` of one chunk and ``BH`` heads, base 2, in ``G``'s dtype; and ``late``, which lies as ``G`` does, of weights ``m``.

    ``late = G - log2 m``: in its place for the token of a value, ``e^{G_t - G_s}`` has the value's weight.
    """
    pid = tl.program_id(0)
    blocks = (HV + BH - 1) // BH
    i = pid // blocks
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = (piece * C + tl.arange(0, C)).to(tl.int64)[:, None]
    heads = (pid % blocks * BH + tl.arange(0, BH)).to(tl.int64)[None, :]
    inside = (rows < L) & (heads < HV)
    bg = tl.load(g + b * gb + (bos + rows) * gt + heads * gh, mask=inside, other=0.0).to(tl.float32)
    bg = tl.maximum(bg, FLOOR, propagate_nan=tl.PropagateNan.ALL).to(G.dtype.element_ty)
    at = b * Gb + (bos + rows) * Gt + heads * Gh
    sums = tl.cumsum(bg * LOG2E, 0)
    tl.store(G + at, sums, mask=inside)
    if WEIGHTED:
        m = tl.load(weight + b * mb + (bos + rows) * mt + heads * mh, mask=inside, other=1.0)
        tl.store(late + at, tl.where(m == 0.0, float("inf"), sums - tl.log2(tl.maximum(m, 1e-45))), mask=inside)


@triton.jit
def diagonal_sum_matrices_fwd(out, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Matrix number ``program_id`` of those that sum over tokens: a row of ones and zeros for each token ``t``.

    ``UNTIL`` is ``j ≤ t`` (``j < t`` if ``EXCLUSIVE``, as in all that a query reads), ``AFTER`` ``j > t``, ``BEFORE``
    ``j < t``, ``FROM`` ``j ≥ t`` (``j > t``). ``BLOCKS``, for 16 and 4 tokens: ``t``'s block, and in it ``UNTIL`` and ``FROM``.
    ``LEVELS``, for blocks of ``C``, ``C/2``, … 2: the gates between ``t`` and the middle of its block; and for a gate ``t``
    the tokens whose way to the middle crosses it.
    """
    place = tl.program_id(0)
    t = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    after = j > t
    before = j < t
    if EXCLUSIVE:
        until = before
        since = after
    else:
        until = j <= t
        since = j >= t
    if place < BLOCKS:
        found = ((place == 0) & until) | ((place == 1) & after) | ((place == 2) & before) | ((place == 3) & since)
    elif place < LEVELS:
        what = (place - BLOCKS) % 3
        block = (t ^ j) < tl.where(place < BLOCKS + 3, 16, 4)
        found = block & ((what == 0) | ((what == 1) & until) | ((what == 2) & since))
    else:
        half = C >> (1 + (place - LEVELS) // 2)
        upper = (t & half) != 0
        crossed = (place - LEVELS) % 2 == 1
        found = (crossed & ((upper & since) | ((upper == 0) & before))) | (
            (crossed == 0) & ((upper & until) | ((upper == 0) & after))
        )
        found = found & ((t ^ j) < half)
    tl.store(out + place * C * C + t * C + j, found.to(tl.float32).to(out.dtype.element_ty))


@triton.jit
def load_chunk_decay(decay, chunk0, chunk, hv, HV, columns, there, K: tl.constexpr):
    """A chunk's sum of a vector gate, base 2. Scans load it a chunk ahead: it is too small for the compiler's pipeline."""
    return tl.load(decay + ((chunk0 + chunk) * HV + hv) * K + columns, mask=(columns < K) & there, other=0.0)


@triton.jit
def load_chunk_sum(G, chunk, L, stride, there, C: tl.constexpr):
    """``G_C`` of a scalar gate's chunk, which scans load a chunk ahead."""
    return tl.load(G + (tl.minimum(chunk * C + C, L) - 1) * stride, mask=there, other=0.0)


@triton.jit
def load_numbers(p, rows, stride, L):
    """One number a token of a chunk, ``[C]``; zeros past its sequence."""
    return tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
