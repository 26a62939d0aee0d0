"""Which tokens of which sequences a rank holds, and which states go from span to span: plain integers, the same on every rank.

The tokens of all ranks are cut into *spans* of equal length, in order. ``"contiguous"``: rank ``r`` of ``R`` holds span ``r``.
``"zigzag"``: it holds spans ``r`` and ``2R−1−r``, as balanced causal softmax attention lays them out. A *segment* is what a
span holds of one sequence; a state crosses from one span to the next where a sequence does.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, cast

from ..errors import ContextError, OptionError

__all__ = [
    "LAYOUTS",
    "Layout",
    "Segment",
    "Shard",
    "Span",
    "chain_of",
    "plain_offsets",
    "rank_order",
    "remembered",
    "shard_of",
    "tokens_of_rank",
    "tokens_of_span",
]

Layout = Literal["contiguous", "zigzag"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag")


Function = TypeVar("Function", bound=Callable[..., Any])


def remembered(function: Function) -> Function:
    """A function of plain integers that keeps its results; a compiler that traces a call takes them for constants."""
    kept = functools.lru_cache(maxsize=256)(function)

    def call(*args: Any) -> Any:
        return kept(*args)

    call.__doc__ = function.__doc__
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Function, call)


class Segment(NamedTuple):
    """What a span holds of one sequence.

    Attributes:
        sequence: Number of the sequence; ``-1`` for none, where a rank holds padding only.
        start: First of the rank's tokens.
        stop: Behind the last one.
        span: Number of the span among those of the rank.
        first: Whether it holds the first token of the sequence: the initial state belongs here.
        last: Whether it holds the last one: the final state comes from here.
    """

    sequence: int
    start: int
    stop: int
    span: int
    first: bool
    last: bool


class Span(NamedTuple):
    """A stretch of the rank's tokens.

    Attributes:
        place: Number of the span among those of all ranks.
        start: First of the rank's tokens.
        stop: Behind the last one.
        tail: The segment that goes on in the next span, if any.
    """

    place: int
    start: int
    stop: int
    tail: Segment | None


class Chain(NamedTuple):
    """How states go from span to span.

    Attributes:
        order: For every span in order, the rank that holds it and its number there.
        enters: For every span, whether a sequence comes in from the one before.
        starts: For every span, whether the sequence that leaves it started in it, so that nothing before it counts.
    """

    order: tuple[tuple[int, int], ...]
    enters: tuple[bool, ...]
    starts: tuple[bool, ...]

    @property
    def needed(self) -> bool:
        """Whether any state crosses."""
        return any(self.enters)

    def before(self, place: int) -> tuple[int, int]:
        """The spans that what enters a span comes from: the first of them, in which it started, and how many."""
        first = place
        while self.enters[first] and (first == place or not self.starts[first]):
            first -= 1
        return first, place - first

    def behind(self, place: int) -> tuple[int, int]:
        """The spans that what leaves a span enters, from the last one back: that one, and how many."""
        last = place
        while last + 1 < len(self.enters) and self.enters[last + 1] and (last == place or not self.starts[last]):
            last += 1
        return last, last - place


class Shard(NamedTuple):
    """What one rank holds.

    Attributes:
        ranks: Number of ranks.
        rank: This one.
        spans: Its spans.
        segments: What it holds of packed sequences, in order; empty where none are packed.
        offsets: ``cu_seqlens`` of the segments.
        chain: How states go from span to span.
        sequences: Number of packed sequences, on all ranks; 0 where none are packed.
        layout: How spans are dealt out.
        tokens: Tokens of a rank; counts for packed sequences only.
        cu_seqlens: Offsets of packed sequences among the tokens of all ranks.
    """

    ranks: int
    rank: int
    spans: tuple[Span, ...]
    segments: tuple[Segment, ...]
    offsets: tuple[int, ...]
    chain: Chain
    sequences: int
    layout: Layout
    tokens: int
    cu_seqlens: tuple[int, ...] | None

    @property
    def peers(self) -> list[Shard]:
        """What every rank holds, in order."""
        return [shard_of(self.ranks, rank, self.layout, self.tokens, self.cu_seqlens) for rank in range(self.ranks)]

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.sequences > 0

    def runs(self, tokens: int) -> list[tuple[int, int]]:
        """Stretches of the rank's ``tokens`` that follow one another in one sequence: first position there, and how many.

        Padding counts on from zero.
        """
        length = tokens_of_span(tokens, self.layout)
        if not self.packed:
            return [(span.place * length, length) for span in self.spans]
        assert self.cu_seqlens is not None
        found: list[tuple[int, int]] = []
        met = 0
        for segment in self.segments:
            if segment.start > met:
                found.append((0, segment.start - met))
            before = segment.start + (self.spans[segment.span].place - segment.span) * length
            found.append((max(0, before - self.cu_seqlens[segment.sequence]), segment.stop - segment.start))
            met = segment.stop
        return [*found, (0, tokens - met)]

    def number_of(self, place: int) -> int:
        """The number, among the rank's spans, of the span with this place among all; −1 where another rank has it."""
        return next((i for i, span in enumerate(self.spans) if span.place == place), -1)

    def entry(self, number: int) -> int:
        """The segment that a state enters which comes into a span; of a span without any, the rank's first."""
        return next((j for j, segment in enumerate(self.segments) if segment.span == number), 0)


@remembered
def rank_order(ranks: int, layout: Layout) -> tuple[tuple[int, int], ...]:
    """For every span in order, the rank that holds it and its number there."""
    there = tuple((rank, 0) for rank in range(ranks))
    return there if layout == "contiguous" else (*there, *((rank, 1) for rank in reversed(range(ranks))))


def tokens_of_rank(tokens: int, ranks: int, layout: Layout) -> int:
    """How many of so many tokens each rank has.

    Raises:
        ContextError: They cannot be dealt out.
    """
    spans = len(rank_order(ranks, layout))
    if tokens % spans:
        raise ContextError(f"{tokens} tokens cannot be dealt out to {ranks} ranks in {spans} spans of equal length: pad them")
    return tokens // ranks


def tokens_of_span(tokens: int, layout: Layout) -> int:
    """How many tokens each span has of a rank that has so many.

    Raises:
        ContextError: They cannot be halved.
    """
    if layout == "contiguous":
        return tokens
    if tokens % 2:
        raise ContextError(f"layout 'zigzag' halves a rank's tokens, and {tokens} are odd: pad them")
    return tokens // 2


def plain_offsets(owner: str, cu_seqlens: Any) -> tuple[int, ...] | None:
    """Offsets of packed sequences as plain integers, from any array or sequence of them; None where there are none.

    Raises:
        OptionError: They are no integers.
    """
    if cu_seqlens is None:
        return None
    try:
        return tuple(map(operator.index, cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens))
    except TypeError:
        raise OptionError(
            f"{owner}: cu_seqlens must be integers, the offsets [N+1] of packed sequences, got {cu_seqlens!r:.80}"
        ) from None


@remembered
def chain_of(ranks: int, layout: Layout, length: int, cu_seqlens: tuple[int, ...] | None) -> Chain:
    """How states go from span to span; a span has ``length`` tokens, which counts for packed sequences only."""
    order = rank_order(ranks, layout)
    count = len(order)
    if cu_seqlens is None:
        return Chain(order, tuple(j > 0 for j in range(count)), tuple(j == 0 for j in range(count)))
    enters, starts = [False] * count, [True] * count
    for start, stop in pairwise(cu_seqlens):
        if start == stop or not length:
            continue
        first, last = start // length, (stop - 1) // length
        for j in range(first + 1, last + 1):
            enters[j] = True
            starts[j] = j == last  # another sequence may leave it, or none
    return Chain(order, tuple(enters), tuple(starts))


@remembered
def shard_of(ranks: int, rank: int, layout: Layout, tokens: int, cu_seqlens: tuple[int, ...] | None) -> Shard:
    """What one rank holds.

    Args:
        ranks: Number of ranks.
        rank: The one asked for.
        layout: How spans are dealt out.
        tokens: Tokens of a rank; counts for packed sequences only.
        cu_seqlens: Offsets of packed sequences among the tokens of all ranks.

    Raises:
        ContextError: The sequences do not fit the tokens.
    """
    order = rank_order(ranks, layout)
    own = [j for j, (holder, _) in enumerate(order) if holder == rank]
    length = tokens_of_span(tokens, layout)
    if cu_seqlens is not None:
        _check(ranks, tokens, layout, cu_seqlens)
    chain = chain_of(ranks, layout, length, cu_seqlens)
    if cu_seqlens is None:
        return Shard(ranks, rank, tuple(Span(j, 0, 0, None) for j in own), (), (), chain, 0, layout, tokens, None)
    segments: list[Segment] = []
    spans: list[Span] = []
    for number, j in enumerate(own):
        found = _segments(cu_seqlens, j * length, (j + 1) * length, number, last_span=j == len(order) - 1)
        segments += found
        tail = next((segment for segment in found if not segment.last), None)
        spans.append(Span(j, number * length, (number + 1) * length, tail))
    segments = segments or [Segment(-1, 0, 0, 0, first=True, last=True)]
    offsets = (*(segment.start for segment in segments), segments[-1].stop)
    return Shard(ranks, rank, tuple(spans), tuple(segments), offsets, chain, len(cu_seqlens) - 1, layout, tokens, cu_seqlens)


def _segments(cu_seqlens: tuple[int, ...], low: int, high: int, number: int, last_span: bool) -> list[Segment]:
    """What the span of tokens ``low … high`` holds; an empty sequence belongs where its offset is."""
    moved = number * (high - low) - low
    found: list[Segment] = []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        if start == stop:
            if low <= start < high or (last_span and start >= high):
                place = min(start, high) + moved
                found.append(Segment(n, place, place, number, first=True, last=True))
        elif max(start, low) < min(stop, high):
            begin, end = max(start, low) + moved, min(stop, high) + moved
            found.append(Segment(n, begin, end, number, first=start >= low, last=stop <= high))
    return found


def _check(ranks: int, tokens: int, layout: Layout, cu_seqlens: tuple[int, ...]) -> None:
    total = ranks * tokens
    if len(cu_seqlens) < 2:
        raise ContextError(f"cu_seqlens must hold the offsets of one sequence or more, got {list(cu_seqlens)}")
    if cu_seqlens[0] != 0 or any(later < earlier for earlier, later in pairwise(cu_seqlens)):
        raise ContextError(
            f"cu_seqlens must start at 0 and not decrease, got {list(cu_seqlens[:8])}{' …' * (len(cu_seqlens) > 8)}"
        )
    if cu_seqlens[-1] > total:
        raise ContextError(
            f"cu_seqlens must not pass the tokens of all ranks, {ranks} · {tokens} = {total}, got {cu_seqlens[-1]}"
        )
    if layout == "zigzag" and 2 * cu_seqlens[-1] <= total and cu_seqlens[-1] < total:
        raise ContextError(
            f"layout 'zigzag' takes padding of less than half of the {total} tokens, got {cu_seqlens[-1]} tokens"
        )
