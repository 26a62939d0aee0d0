"""Which chunks of a sequence leave anything in the state at its far end, by what they decay by."""

import triton
import triton.language as tl

from .indexing import chunk_at, head_pointer, locate_segment

FORGOTTEN = tl.constexpr(-280.0)  # decayed by 2 to this power, the largest float32 number is less than half of the smallest

# Kinds of sums (``KIND``).
RUNNING = tl.constexpr(0)  # a scalar gate's from the start of each chunk, ``[B, T, HV]``, base 2
SUMS = tl.constexpr(1)  # over each chunk, ``[chunks, HV, K]``, base 2
DECAYS = tl.constexpr(2)  # their powers of 2


@triton.jit(do_not_specialize=["T", "HV"])
def chunks_in_reach(
    sums, ranges, shorter, chunk_first, cu, T, HV, stride0, stride1, stride2,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr, REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """The first chunk of each sequence and head that counts, and the one past the last: ``ranges [N, HV, 2]``.

    The far end is the last token, in reverse the first. The chunk there counts, and every other one that some channel decays
    by less than ``FORGOTTEN`` between it and the far end; one of which that is not known, for a NaN, counts too. Where there is
    ``shorter``, it gets the same, but no chunk where all of them count.
    """
    pid = tl.program_id(0)
    hv = pid % HV
    n, bos, L, b, _, chunks = locate_segment(pid // HV, cu, cu, cu, T, 1, 1, C, PACKED, True)
    if PACKED and KIND != RUNNING:
        chunk0 = tl.load(chunk_first + n).to(tl.int64)
    else:
        chunk0 = n * ((T + C - 1) // C)
    columns = tl.arange(0, BK)
    passed = tl.zeros((BK,), tl.float32)
    found = 0
    for step in range(0, chunks, P):
        nth = step + tl.arange(0, P)
        chunk = chunk_at(nth, 0, chunks, not REVERSE)
        if KIND == RUNNING:
            p = head_pointer(sums, b, bos, hv, stride0, stride1, stride2, 1)
            p += (tl.minimum(chunk * C + C, L) - 1).to(tl.int64) * stride1
            own = tl.load(p, mask=nth < chunks, other=0.0).to(tl.float32)[:, None] + tl.zeros((P, BK), tl.float32)
        else:
            p = sums + (chunk0 + chunk)[:, None] * stride0 + hv.to(tl.int64) * stride1 + columns[None, :] * stride2
            inside = (nth < chunks)[:, None] & (columns < K)[None, :]
            own = tl.load(p, mask=inside, other=0.0).to(tl.float32)
            if KIND == DECAYS:
                positive = tl.where(own < 2e-38, 2e-38, own)  # not tl.maximum, which leaves no NaN
                own = tl.where(inside, tl.where(own <= 0, FORGOTTEN, tl.log2(positive)), 0.0)
        until = passed[None, :] + tl.cumsum(own, 0) - own
        forgotten = tl.min(((until <= FORGOTTEN) | (columns >= K)[None, :]).to(tl.int32), 1)
        found = tl.maximum(found, tl.max(tl.where((nth < chunks) & (forgotten == 0), nth + 1, 0), 0))
        passed += tl.sum(own, 0)
    low = chunks - found
    high = chunks
    if REVERSE:
        low = chunks * 0
        high = found
    tl.store(ranges + 2 * pid, low)
    tl.store(ranges + 2 * pid + 1, high)
    if shorter is not None:
        tl.store(shorter + 2 * pid, low)
        tl.store(shorter + 2 * pid + 1, tl.where(found == chunks, low, high))


@triton.jit(do_not_specialize=["chunks"])
def ranges_proved(ranges, transitions, proved, again, chunks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Of each sequence and head the ranges whose transition is zero, all ``SIZE`` numbers of it, and all chunks in the place of
    others. ``again``, if there is one, gets the ranges whose transition is to be made anew: all chunks in the place of those
    others, no chunk elsewhere, nor where all chunks counted.
    """
    pid = tl.program_id(0).to(tl.int64)
    low = tl.load(ranges + 2 * pid)
    high = tl.load(ranges + 2 * pid + 1)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(transitions + pid * SIZE + at, mask=at < SIZE, other=0.0)
        found |= (x != 0).to(tl.int32)  # of a NaN, too
    zero = tl.max(found, 0) == 0
    tl.store(proved + 2 * pid, tl.where(zero, low, 0))
    tl.store(proved + 2 * pid + 1, tl.where(zero, high, chunks))
    if again is not None:
        tl.store(again + 2 * pid, 0)
        tl.store(again + 2 * pid + 1, tl.where(zero | (high - low == chunks), 0, chunks))


@triton.jit
def made_anew(transitions, others, again, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The ``others`` in the place of the transitions that were made again."""
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    one = pid // BLOCKS
    if tl.load(again + 2 * one + 1) == 0:
        return
    at = pid % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(others + one * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(transitions + one * SIZE + at, x, mask=at < SIZE)
