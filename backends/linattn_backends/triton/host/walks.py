"""How many sequences a program goes through one after the other, where kernels for Hopper can."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .chunks import Chunked, usual_tokens
from .tiles import programs

__all__ = ["goes_through_many", "together"]

GO_THROUGH_MANY = frozenset((
    "diagonal_scan_sm90", "diagonal_scalar_gradients_bwd_sm90", "delta_fused_fwd_sm90", "delta_state_fwd_sm90",
    "delta_state_bwd_sm90",
))  # fmt: skip
"""Kernels that go through several sequences a program, if asked to."""
ONCE = 2
"""Chunks in the time of which a program does what it does but once, whatever the number of its sequences."""
MOST = 32
"""Chunks in the mean of a program of several sequences, at most. With more, what it does but once is next to nothing; and where
lengths differ, fewer and longer programs fill a device less evenly."""


def goes_through_many(kernel: Any) -> bool:
    """Whether a program of ``kernel`` can go through several sequences."""
    return kernel.__name__ in GO_THROUGH_MANY


def together(
    call: Chunked, chunk: int, heads: int, num_sms: int, *in_a_row: Tensor | None, once: float = ONCE, most: int = MOST
) -> int:
    """How many sequences of ``call`` a program goes through, where each of ``heads`` has one; ``most`` chunks in the mean.

    So many that all are done soonest if all are as long as in the mean: a multiprocessor runs one such program, which takes as
    long as its chunks and ``once`` more. Of a batch, one, unless sequences lie one after the other in all that are to lie
    ``in_a_row``.
    """
    if call.cu is None and not lie_in_a_row(*in_a_row):
        return 1
    chunks = max(-(-usual_tokens(call) // chunk), 1)

    def time(n: int) -> float:
        rounds = -(-programs(call.N, heads, n, 1) // num_sms)
        return rounds * (n * chunks + once)

    return min(range(1, max(most // chunks, 1) + 1), key=time)


def lie_in_a_row(*arrays: Tensor | None) -> bool:
    """Whether the sequences of a batch lie one after the other in each of ``arrays [B, T, …]``, if they are there."""
    return all(x.stride(0) == x.shape[1] * x.stride(1) for x in arrays if x is not None)
