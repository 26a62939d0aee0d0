"""Packed sequences cut into pieces of ``LENGTH`` tokens if one has more than ``WHOLE``, numbered one sequence after the other.

::

    p_n = ⌈len_n / LENGTH⌉ if max len > WHOLE, else min(len_n, 1)
    first_n = Σ_{m<n} p_m                       a sequence's first piece; first_N of them are filled
    owner_i = #{n : first_{n+1} ≤ i}            the sequence of piece i; N of pieces past the last

Programs beside those that cut may zero what lies behind the last sequence of an array that is not written yet.
"""

import triton
import triton.language as tl

from .tails import zero_rows

__all__ = ["cut_sequences"]


@triton.jit
def tokens_of(cu, held, n, N):
    """Tokens of sequences ``n``, with those that are ``held`` of them, if any are; none past the last."""
    there = n < N
    tokens = tl.load(cu + n + 1, mask=there, other=0) - tl.load(cu + n, mask=there, other=0)
    if held is not None:
        tokens += tl.load(held + n, mask=there, other=0)
    return tokens


@triton.jit(do_not_specialize=["N", "COUNT", "LENGTH", "WHOLE", "CUTTING", "T", "width"])
def cut_sequences(
    cu, held, owner, first, out, N, COUNT, LENGTH, WHOLE, CUTTING, T, width,
    S: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``owner`` of ``P`` of ``COUNT`` pieces, and of the first program all of ``first``; ``S`` sequences at a time.

    A sequence begins with the tokens that are ``held`` of it, if any are. Programs from ``CUTTING`` on write zeros in the rows
    behind the last one of ``out [1, T, …]``, each of ``width`` numbers.
    """
    if out is not None:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.program_id(0) >= CUTTING:
            end = tl.load(cu + N).to(tl.int64)
            zero_rows(out, end, T, width, tl.program_id(0) - CUTTING, tl.num_programs(0) - CUTTING, BLOCK)
            return
    longest = 0
    if WHOLE > 0:
        for block in range(0, N, S):
            longest = tl.maximum(longest, tl.max(tokens_of(cu, held, block + tl.arange(0, S), N), 0).to(tl.int32))
    low = tl.program_id(0) * P
    pieces = low + tl.arange(0, P)
    owners = tl.zeros((P,), tl.int32)
    done = 0
    for block in range(0, N, S):
        n = block + tl.arange(0, S)
        there = n < N
        tokens = tokens_of(cu, held, n, N)
        filled = tl.minimum(tokens, 1)
        if longest > WHOLE or WHOLE == 0:
            filled = (tokens + LENGTH - 1) // LENGTH
        filled = filled.to(tl.int32)
        ends = done + tl.cumsum(filled, 0)
        if low == 0:
            tl.store(first + 1 + n, ends, mask=there)
        done += tl.sum(filled, 0)
        if done <= low:
            owners += tl.sum(there.to(tl.int32), 0)
        else:
            before = there[:, None] & (ends[:, None] <= pieces[None, :])
            owners += tl.sum(before.to(tl.int32), 0)
    if low == 0:
        tl.store(first, 0)
    tl.store(owner + pieces, owners, mask=pieces < COUNT)
