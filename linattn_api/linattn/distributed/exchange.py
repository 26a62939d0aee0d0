"""What connects the ranks of one call, and what a rule may ask of the rank that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..frameworks import Framework
from .layout import Shard

if TYPE_CHECKING:
    from .lowering import ShardCall

__all__ = ["Exchange", "Sources", "joined", "stacked", "taken"]


Sources: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""For every rank and output, what it is the sum of: parts by number, ``rank · parts + part``."""


class Exchange:
    """What connects the ranks of one call.

    :meth:`chain` carries states from span to span, :meth:`combine` and :meth:`total` sum what ranks contribute. What differs
    between ranks a rule gives as a function of a :class:`~linattn.distributed.layout.Shard`, and the other methods answer for
    the rank that runs it: here, for the one whose shard the call has. Where one program runs on all ranks, they answer for any.
    """

    def chain(self, call: ShardCall, A: Any, b: Any) -> Any:
        """The state that enters each of this rank's spans ``[spans, ...]``, from their summaries ``A, b [spans, ...]``."""
        raise NotImplementedError

    def combine(self, call: ShardCall, x: Any, sources: Sources) -> Any:
        """This rank's sums ``[outputs, ...]`` of what the ranks contribute, ``x [parts, ...]`` each."""
        raise NotImplementedError

    def total(self, call: ShardCall, x: Any) -> Any:
        """The sum over all ranks, of arrays that are zero wherever another rank's is not."""
        raise NotImplementedError

    def crosses(self, call: ShardCall) -> bool:
        """Whether spans have anything to tell each other; the same on every rank."""
        return call.shard.chain.needed

    def link(self, call: ShardCall) -> Any:
        """What crosses between spans apart from the operator's own gradients, if a backend knows how; else None."""
        return None

    def always(self, call: ShardCall, fact: Callable[[Shard], bool]) -> bool:
        """Whether a fact is true, whichever rank runs this."""
        return fact(call.shard)

    def number(self, call: ShardCall, fact: Callable[[Shard], int]) -> Any:
        """A number of the rank."""
        return fact(call.shard)

    def offsets(self, call: ShardCall, fact: Callable[[Shard], Sequence[int]]) -> Any:
        """``cu_seqlens`` of the rank, where its arrays are."""
        return call.xp.integers(fact(call.shard), next(iter(call.arrays.values())))

    def rows(self, call: ShardCall, x: Any, fact: Callable[[Shard], Sequence[int]], axis: int = 0) -> Any:
        """The rows of ``x`` along an axis that have the rank's numbers, and zeros for −1."""
        return taken(call.xp, x, fact(call.shard), axis)

    def summaries(self, call: ShardCall, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """``(A, b)`` of whole sequences."""
        return call.summarize(arrays)

    def nothing(self, call: ShardCall, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """``(A, b)`` of no tokens of whole sequences."""
        return call.summarize(call.tokens(arrays, 0, 0))

    def tails(self, call: ShardCall) -> tuple[Any, Any]:
        """``(A, b) [spans, 1, ...]`` of what each span holds of the sequence that goes on behind it."""
        ends = [(span.tail.start, span.tail.stop) if span.tail else (span.start, span.start) for span in call.shard.spans]
        pairs = [call.summarize(call.tokens(call.every, *end)) for end in ends]
        A, b = (stacked(call.xp, each) for each in zip(*pairs, strict=True))
        return A, b


def taken(xp: Framework, x: Any, numbers: Sequence[int], axis: int = 0) -> Any:
    """The rows of ``x`` with these numbers along an axis, and zeros for −1: stretches of them as slices."""
    pieces: list[Any] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        step = 0 if numbers[start] < 0 else i - start
        if i < len(numbers) and numbers[i] == numbers[start] + step:
            continue
        if numbers[start] < 0:
            pieces.append(xp.full((*x.shape[:axis], i - start, *x.shape[axis + 1 :]), 0.0, like=x))
        else:
            pieces.append(x[(slice(None),) * axis + (slice(numbers[start], numbers[start] + i - start),)])
        start = i
    return joined(xp, pieces, axis)


def joined(xp: Framework, pieces: Sequence[Any], axis: int) -> Any:
    """The pieces along an axis."""
    return pieces[0] if len(pieces) == 1 else xp.concat(list(pieces), axis=axis)


def stacked(xp: Framework, pieces: Sequence[Any]) -> Any:
    """The pieces along a new first axis."""
    return joined(xp, [piece[None] for piece in pieces], axis=0)
