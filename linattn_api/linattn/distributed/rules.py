"""The rules of families whose state is one array: what spans tell each other, and what enters each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ..affine import act
from ..frameworks import Framework
from ..plugin import MixedState
from .exchange import Sources, joined, stacked
from .layout import Shard, Span

if TYPE_CHECKING:
    from .lowering import ShardCall

__all__ = [
    "chained",
    "convolution",
    "each",
    "everywhere",
    "initial_rows",
    "matrix_state",
    "operate_on_packed",
    "operate_on_rows",
    "plus",
    "split",
    "starting",
    "starting_tails",
    "unsplit",
    "windows",
]


Operate = Callable[..., tuple[Any, Any]]
"""Runs the operator on arrays by name, with keywords changed."""

# -- the operator, once it is known what enters ----------------------------------------------------------------------


def operate_on_rows(
    call: ShardCall, enter: Callable[[ShardCall, dict[str, Any]], Any], operate: Operate | None = None
) -> tuple[Any, Any]:
    """A batch of sequences, each over all ranks. The spans of one rank are rows of a larger batch.

    Args:
        call: The call.
        enter: From the call and its arrays by rows, the states that enter the spans ``[spans, B, …]``.
        operate: Runs the operator once these are known. Default: that of the call.
    """
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    x = call.every if m == 1 else call.of_tokens(call.every, lambda x: split(x, m))
    if shard.ranks * m == 1:
        return call.operate(x)
    # what enters the first span is zero; to read it all the same makes every rank take part in the exchange's gradient
    states = plus(enter(call, x), starting(call))
    o, final = (operate or call.operate)(x, initial_state=each(lambda x: by_row(xp, x), states), cu_seqlens=None)
    if final is None:
        return unsplit(o, m), None
    last = len(shard.chain.order) - 1

    def end(x: Any) -> Any:
        return call.exchange.rows(call, by_span(xp, x, m), lambda shard: [shard.number_of(last)])[0]

    return unsplit(o, m), each(end, final)


def operate_on_packed(call: ShardCall, enter: Callable[[ShardCall], Any], operate: Operate | None = None) -> tuple[Any, Any]:
    """Packed sequences: what crosses is the state of the one sequence that a span's end cuts.

    Args:
        call: The call.
        enter: From the call, the states that enter the spans ``[spans, 1, …]``.
        operate: Runs the operator once these are known. Default: that of the call.
    """
    shard, rows = call.shard, call.exchange.rows
    states = initial_rows(call, lambda shard: [s.sequence if s.first else -1 for s in shard.segments])
    if call.exchange.crosses(call):
        entering = enter(call)
        for i in range(len(shard.spans)):
            states = plus(_arriving(call, entering, i), states)
    offsets = call.exchange.offsets(call, lambda shard: shard.offsets)
    o, final = (operate or call.operate)(call.every, initial_state=states, cu_seqlens=offsets)
    if final is None:
        return o, None

    def ends(shard: Shard) -> list[int]:
        found = {segment.sequence: i for i, segment in enumerate(shard.segments) if segment.last}
        return [found.get(n, -1) for n in range(shard.sequences)]

    return o, each(lambda x: rows(call, x, ends), final)


def _arriving(call: ShardCall, entering: Any, number: int) -> Any:
    """What enters a span, in a row for each of the rank's segments: that of the one that it enters."""

    def place(shard: Shard) -> list[int]:
        return [0 if j == shard.entry(number) else -1 for j in _slots(shard)]

    return each(lambda x: call.exchange.rows(call, x[number], place), entering)


def _slots(shard: Shard) -> range:
    return range(len(shard.segments))


def plus(x: Any, y: Any) -> Any:
    """The sum of two states; the first, where the second is None."""
    if y is None:
        return x
    if not isinstance(x, tuple):
        return x + y
    pairs = zip(cast("tuple[Any, ...]", x), y, strict=True)
    return MixedState[Any](*(a + b for a, b in pairs))


def each(change: Callable[[Any], Any], state: Any) -> Any:
    """What becomes of the state if this is done to it, or to each of its arrays if it has several."""
    if not isinstance(state, tuple):
        return change(state)
    return MixedState[Any](*map(change, cast("tuple[Any, ...]", state)))


def split(x: Any, m: int) -> Any:
    """``[B, m·L, …]`` as ``[B·m, L, …]``."""
    return x if m == 1 else x.reshape(x.shape[0] * m, x.shape[1] // m, *x.shape[2:])


def unsplit(x: Any, m: int) -> Any:
    """``[B·m, L, …]`` as ``[B, m·L, …]``."""
    return x if m == 1 else x.reshape(x.shape[0] // m, x.shape[1] * m, *x.shape[2:])


def by_span(xp: Framework, x: Any, m: int) -> Any:
    """``[B·m, …]`` as ``[m, B, …]``."""
    return x[None] if m == 1 else xp.swapaxes(x.reshape(x.shape[0] // m, m, *x.shape[1:]), 0, 1)


def by_row(xp: Framework, x: Any) -> Any:
    """``[m, B, …]`` as ``[B·m, …]``."""
    return x[0] if x.shape[0] == 1 else xp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def initial_rows(call: ShardCall, rows: Callable[[Shard], list[int]]) -> Any:
    """The caller's states of these sequences, as they are accumulated; None where the caller gives none."""
    if call.keywords["initial_state"] is None or call.exchange.always(call, lambda shard: max(rows(shard)) < 0):
        return None
    return each(lambda x: call.exchange.rows(call, _wide(call, x), rows), call.keywords["initial_state"])


def starting(call: ShardCall) -> Any:
    """The caller's states where they enter the first span of all, ``[spans, B, …]``; None where the caller gives none."""

    def first(shard: Shard) -> list[int]:
        return [0 if span.place == 0 else -1 for span in shard.spans]

    if call.keywords["initial_state"] is None or call.exchange.always(call, lambda shard: max(first(shard)) < 0):
        return None
    return each(lambda x: call.exchange.rows(call, _wide(call, x)[None], first), call.keywords["initial_state"])


def _wide(call: ShardCall, x: Any) -> Any:
    """An array of a state, as it is accumulated; counts stay what they are."""
    return x if "int" in call.xp.dtype(x) else call.xp.astype(x, call.xp.accumulation(next(iter(call.arrays.values()))))


# -- the matrix-state families ---------------------------------------------------------------------------------------


def matrix_state(call: ShardCall) -> tuple[Any, Any]:
    """Every family that is affine in its state: spans tell each other their summaries."""
    link = call.exchange.link(call) if call.exchange.crosses(call) else None
    if call.shard.packed:
        return operate_on_packed(call, *(link.around(_chained_tails) if link else (_chained_tails,)))
    return operate_on_rows(call, *(link.around(_chained_rows) if link else (_chained_rows,)))


def _chained_rows(call: ShardCall, x: dict[str, Any]) -> Any:
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    last = len(shard.chain.order) - 1
    # nobody waits for what the last span does to the state
    idle = call.exchange.always(call, lambda shard: [span.place for span in shard.spans] == [last])
    found = (call.exchange.nothing if idle else call.exchange.summaries)(call, x)
    A, b = (by_span(xp, each, m) for each in found)
    return chained(call, A, b, starting(call))


def _chained_tails(call: ShardCall) -> Any:
    return chained(call, *call.exchange.tails(call), starting_tails(call))


def starting_tails(call: ShardCall) -> Any:
    """The caller's states of what goes on behind a span and starts in it, ``[spans, 1, …]``; None if the caller gives none."""

    def first(span: Span) -> int:
        return span.tail.sequence if span.tail and span.tail.first else -1

    start = initial_rows(call, lambda shard: [first(span) for span in shard.spans])
    return None if start is None else start[:, None]


def chained(call: ShardCall, A: Any, b: Any, start: Any) -> Any:
    """The states that enter the spans, from summaries and from what the caller has before each of them."""
    return call.exchange.chain(call, A, b if start is None else act(call.xp, A, start) + b)


# -- causal=False ----------------------------------------------------------------------------------------------------


def everywhere(call: ShardCall) -> tuple[Any, Any]:
    """Every token reads the sum over its whole sequence: the sums of a sequence's segments are added, and read."""
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    if shard.packed:
        x, cu = call.every, call.exchange.offsets(call, lambda shard: shard.offsets)
        total = _whole_sequences(call, call.summarize(x, cu)[1])
    else:
        x, cu = call.of_tokens(call.every, lambda x: split(x, m)), None
        sources = ((tuple(range(shard.ranks * m)),),) * shard.ranks
        _, b = call.summarize(x)
        total = call.exchange.combine(call, by_span(xp, b, m), sources)[0]
        total = by_row(xp, stacked(xp, [total] * m))
    nothing = {**x, "k": xp.zeros_like(x["k"]), "v": xp.zeros_like(x["v"])}
    o, _ = call.operate(nothing, initial_state=total, cu_seqlens=cu, causal=True, output_final_state=False)
    return (o if shard.packed else unsplit(o, m)), None


def _whole_sequences(call: ShardCall, own: Any) -> Any:
    """For each of a rank's segments, the sum over its whole sequence, from those over the segments ``own [segments, …]``."""
    shard = call.shard
    if not call.exchange.crosses(call):
        return own
    most = 2 * len(shard.spans)  # a span has one segment that comes in, and one that goes on

    def contributed(shard: Shard) -> list[int]:
        opened = _open(shard)
        return opened + [-1] * (most - len(opened))

    def summed(shard: Shard) -> list[int]:
        opened = _open(shard)
        # a spare sum is zero; to read it all the same makes every rank take part in the exchange's gradient
        spare = -1 if len(opened) == most else most - 1
        return [opened.index(i) if i in opened else spare for i in _slots(shard)]

    rows, sources = call.exchange.rows, _whole_sources(shard, most)
    total = rows(call, call.exchange.combine(call, rows(call, own, contributed), sources), summed)
    return total + rows(call, own, lambda shard: [-1 if i in _open(shard) else i for i in _slots(shard)])


def _open(shard: Shard) -> list[int]:
    """The rank's segments whose sequence another span holds a part of."""
    return [i for i, segment in enumerate(shard.segments) if not (segment.first and segment.last)]


def _whole_sources(shard: Shard, most: int) -> Sources:
    """For every rank's open segments, where the parts of their sequences are, in the order of the spans."""
    places: dict[int, list[tuple[int, int]]] = {}
    peers = shard.peers
    for peer in peers:
        for slot, i in enumerate(_open(peer)):
            segment = peer.segments[i]
            places.setdefault(segment.sequence, []).append((peer.spans[segment.span].place, peer.rank * most + slot))
    whole = {sequence: tuple(source for _, source in sorted(found)) for sequence, found in places.items()}
    asked = [[whole[peer.segments[i].sequence] for i in _open(peer)] for peer in peers]
    return tuple((*own, *[()] * (most - len(own))) for own in asked)


# -- short_conv ------------------------------------------------------------------------------------------------------


def convolution(call: ShardCall) -> tuple[Any, Any]:
    """``short_conv``: spans tell each other their last ``W−1`` inputs."""
    if call.arrays["weight"].shape[1] == 1:
        return _without_exchange(call)
    if call.shard.packed:
        return operate_on_packed(call, lambda call: _windows(call, call.every, call.shard.tokens // len(call.shard.spans)))
    return operate_on_rows(call, lambda call, x: _windows(call, x, x["x"].shape[1]))


def _without_exchange(call: ShardCall) -> tuple[Any, Any]:
    """A filter of one tap has no past: its windows are empty."""
    shard, x = call.shard, call.arrays["x"]
    wide = call.xp.accumulation(x)
    empty = call.xp.full((len(shard.spans), x.shape[0] if not shard.packed else 1, x.shape[2], 0), 0.0, like=x, dtype=wide)
    if shard.packed:
        return operate_on_packed(call, lambda call: empty)
    return operate_on_rows(call, lambda call, x: empty)


def _windows(call: ShardCall, arrays: dict[str, Any], length: int) -> Any:
    """The windows that enter the spans ``[spans, B, D, W−1]``."""
    xp, initial = call.xp, call.keywords["initial_state"]
    x = xp.astype(arrays["x"], xp.accumulation(arrays["x"]))
    before = None if initial is None else xp.swapaxes(xp.astype(initial, xp.dtype(x)), 1, 2)
    return xp.swapaxes(windows(call, x, before, arrays["weight"].shape[1] - 1, length), 2, 3)


def windows(call: ShardCall, x: Any, before: Any, size: int, length: int) -> Any:
    """What the last tokens of a sequence have, as they enter the spans ``[spans, B, size, D]``; zeros before its first one.

    Args:
        call: The call.
        x: What tokens have: those of packed sequences ``[1, T, D]``, or of spans as rows ``[B·spans, T, D]``.
        before: What stands before each sequence ``[N, size, D]``, or None for zeros.
        size: How many tokens.
        length: Tokens of a span.
    """
    shard, m = call.shard, len(call.shard.spans)
    rows = [_leaving(call, x, before, i, size) for i in range(m)]  # [B, size, D] each
    contributed = call.xp.swapaxes(joined(call.xp, rows, axis=1), 0, 1)
    entered = call.exchange.combine(call, contributed, _window_sources(shard, size, length))
    return call.xp.swapaxes(entered.reshape(m, size, *entered.shape[1:]), 1, 2)


def _leaving(call: ShardCall, x: Any, before: Any, number: int, size: int) -> Any:
    """What the last tokens have of the sequence that leaves a span ``[B, size, D]``, as far as the rank knows them."""
    m = len(call.shard.spans)
    own = x if call.shard.packed else x[number::m]
    length = own.shape[1]

    def held(shard: Shard) -> tuple[int, int, int]:
        """Where the inputs start and stop, and the sequence whose window is in front of them, if any."""
        span = shard.spans[number]
        if not shard.packed:
            return 0, length, 0 if span.place == 0 else -1
        return (span.tail.start, span.tail.stop, span.tail.sequence if span.tail.first else -1) if span.tail else (0, 0, -1)

    def inputs(shard: Shard) -> list[int]:
        start, stop, _ = held(shard)
        return [t if t >= start else -1 for t in range(stop - size, stop)]

    def earlier(shard: Shard) -> list[int]:
        start, stop, sequence = held(shard)
        missing = size - min(size, stop - start) if sequence >= 0 else 0
        return [sequence * size + stop - start + i if i < missing else -1 for i in range(size)]

    known = call.exchange.rows(call, own, inputs, axis=1)
    if before is None or call.exchange.always(call, lambda shard: max(earlier(shard)) < 0):
        return known
    if call.shard.packed:
        before = before.reshape(1, before.shape[0] * size, before.shape[2])
    return known + call.exchange.rows(call, before, earlier, axis=1)


def _window_sources(shard: Shard, size: int, length: int) -> Sources:
    """Where each input of each rank's windows is: one of the ``W−1`` that leave an earlier span."""
    order, tails = shard.chain.order, _tails(shard, length)
    per_rank = len(shard.spans) * size
    entering: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    for j, place in enumerate(order):
        found: list[tuple[int, ...]] = []
        i = j - 1
        while shard.chain.enters[j] and len(found) < size:
            tokens, first = tails[i]
            holder, number = order[i]
            known = size if first else min(size, tokens)
            taken = min(known, size - len(found))
            base = holder * per_rank + number * size
            found = [*((base + row,) for row in range(size - taken, size)), *found]
            i -= 1
        entering[place] = tuple(found) or ((),) * size
    return tuple(
        tuple(source for number in range(len(shard.spans)) for source in entering[rank, number]) for rank in range(shard.ranks)
    )


def _tails(shard: Shard, length: int) -> list[tuple[int, bool]]:
    """For every span in order, the tokens that it holds of the sequence that leaves it, and whether that started in it."""
    if not shard.packed:
        return [(length, j == 0) for j in range(len(shard.chain.order))]
    spans = sorted((span for peer in shard.peers for span in peer.spans), key=lambda span: span.place)
    return [(span.tail.stop - span.tail.start, span.tail.first) if span.tail else (0, True) for span in spans]
