"""A call on a shard as ordinary calls: summary → exchange → initial state → the operator. Arrays of any framework.

A rule is a function of the rank's :class:`~linattn.distributed.layout.Shard` and of an :class:`Exchange`, which is all that
connects the ranks, and which does one of two things: :meth:`Exchange.chain` carries states from span to span, and
:meth:`Exchange.combine` sums what ranks contribute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from .. import dispatch, summarizing
from ..affine import act
from ..call import method_name
from ..errors import ContextError, OptionError, ShapeError
from ..feature_maps import FeatureMap
from ..feature_maps import resolve as resolve_map
from ..frameworks import Framework, framework_of
from ..spec import SUMMARIES, Arg, OpSpec
from .layout import Segment, Shard

__all__ = ["Exchange", "ShardCall", "Sources", "has_tokens", "prefixes", "run", "sums"]


Sources: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""For every rank and output, what it is the sum of: parts by number, ``rank · parts + part``."""


class Exchange:
    """What connects the ranks of one call."""

    def chain(self, call: ShardCall, A: Any, b: Any) -> Any:
        """The state that enters each of this rank's spans ``[spans, ...]``, from their summaries ``A, b [spans, ...]``."""
        raise NotImplementedError

    def combine(self, call: ShardCall, x: Any, sources: Sources) -> Any:
        """This rank's sums ``[outputs, ...]`` of what the ranks contribute, ``x [parts, ...]`` each."""
        raise NotImplementedError

    def total(self, call: ShardCall, x: Any) -> Any:
        """The sum over all ranks, of arrays that are zero wherever another rank's is not."""
        raise NotImplementedError


class ShardCall(NamedTuple):
    """A call on the tokens of one rank.

    Attributes:
        xp: The framework of its arrays.
        spec: The family.
        form: The form.
        arrays: Positional arrays by name, feature maps applied.
        keywords: Its keywords.
        backend: The caller's wish.
        shard: What the rank holds.
        exchange: What connects the ranks.
        replicate_states: Whether every rank gets every final state.
    """

    xp: Framework
    spec: OpSpec
    form: str | None
    arrays: dict[str, Any]
    keywords: dict[str, Any]
    backend: str | Sequence[str] | None
    shard: Shard
    exchange: Exchange
    replicate_states: bool

    @property
    def label(self) -> str:
        """What messages call it."""
        return method_name(self.form, self.spec.name)

    def operate(self, arrays: dict[str, Any], **changed: Any) -> tuple[Any, Any]:
        """The ordinary operator on other arrays."""
        named = tuple(arrays.get(arg.name) for arg in self.spec.args)
        keywords = {**self.keywords, **{name: arrays[name] for name in self.keywords if name in arrays}, **changed}
        return dispatch.run(self.spec, self.form, named, keywords, None, self.backend)

    def summarize(self, arrays: dict[str, Any], cu_seqlens: Any = None) -> tuple[Any, Any]:
        """``(A, b)`` of these tokens."""
        spec = SUMMARIES[self.spec.name]
        keywords = {name: self.keywords[name] for name in spec.keywords} | {"cu_seqlens": cu_seqlens}
        named = tuple(arrays.get(arg.name) for arg in spec.args)
        return summarizing.run(spec, "summary", named, keywords, None, self.backend)

    def tokens(self, arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        """The arrays with only these of their tokens."""
        return self.of_tokens(arrays, lambda x: x[:, start:stop])

    def of_tokens(self, arrays: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
        """The arrays, with what holds a row a token changed."""
        args = {arg.name: arg for arg in (*self.spec.args, *self.spec.keyword_args)}
        return {name: change(x) if x is not None and has_tokens(args[name], x) else x for name, x in arrays.items()}

    @property
    def every(self) -> dict[str, Any]:
        """Positional and keyword arrays by name, but for states and offsets."""
        return {**self.arrays, **{arg.name: self.keywords[arg.name] for arg in self.spec.keyword_args}}


def has_tokens(arg: Arg, x: Any) -> bool:
    """Whether an array has a row for each token."""
    return any(shape[1:2] == ("T",) and len(shape) == len(x.shape) for shape in arg.shapes)


def run(
    exchange: Exchange,
    shard_of_tokens: Callable[[int], Shard],
    replicate_states: bool,
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | FeatureMap | None,
    backend: str | Sequence[str] | None,
) -> Any:
    """Run one call on a rank's tokens; arguments as those of :func:`linattn.dispatch.run`, and what connects the ranks."""
    label = method_name(form, spec.name)
    xp = framework_of(arrays[0], spec.args[0].name, f"{label}: ")
    if keywords["cu_seqlens"] is not None:
        raise OptionError(
            f"{label}: context= holds the offsets of packed sequences: pass cu_seqlens to it, and not to the call"
        )
    shard = shard_of_tokens(arrays[0].shape[1])
    named = {arg.name: x for arg, x in zip(spec.args, arrays, strict=True)}
    call = ShardCall(xp, spec, form, named, keywords, backend, shard, exchange, replicate_states)
    _check_states(call)
    if feature_map is not None:
        call = call._replace(arrays=_map_features(call, resolve_map(feature_map)))
    o, final = _rule(call)(call)
    if final is not None and replicate_states and shard.ranks > 1:
        final = exchange.total(call, final)
    return o, final


def _rule(call: ShardCall) -> Callable[[ShardCall], tuple[Any, Any]]:
    if call.spec.name == "short_conv":
        return convolution
    if call.spec.name not in SUMMARIES:
        raise ContextError(f"{call.label}: {call.spec.name} has no context=")
    return matrix_state if call.keywords.get("causal", True) else everywhere


def _check_states(call: ShardCall) -> None:
    """An initial state has a row for every sequence of all ranks."""
    start = call.keywords["initial_state"]
    if start is None:
        return
    rows = call.shard.sequences or next(iter(call.arrays.values())).shape[0]
    if start.shape[0] != rows:
        what = "packed sequences on all ranks" if call.shard.packed else "batch entries"
        raise ShapeError(
            f"{call.label}: initial_state must have a row for each of the {rows} {what}, got {list(start.shape)}: "
            f"a rank reads those of the sequences whose first token it holds"
        )


def _map_features(call: ShardCall, phi: FeatureMap) -> dict[str, Any]:
    """The arrays mapped; a map that depends on the position starts where the rank's span does."""
    if call.keywords.get("qk_norm") is not None:
        raise OptionError(f"{call.label}: qk_norm and feature_map both map q and k: pass one of them")
    mapped = dict(call.arrays)
    for name in call.spec.mapped:
        x = mapped[name]
        if not hasattr(phi, "start"):
            mapped[name] = phi(x)
            continue
        length = x.shape[1] // len(call.shard.spans)
        pieces: list[Any] = []
        for i, span in enumerate(call.shard.spans):
            moved: Any = dataclasses.replace(phi, start=phi.start + span.place * length)  # type: ignore[type-var,attr-defined]
            pieces.append(moved(x[:, i * length : (i + 1) * length]))
        mapped[name] = _joined(call.xp, pieces, axis=1)
    return mapped


def _joined(xp: Framework, pieces: Sequence[Any], axis: int) -> Any:
    return pieces[0] if len(pieces) == 1 else xp.concat(list(pieces), axis=axis)


def _stacked(xp: Framework, pieces: Sequence[Any]) -> Any:
    return _joined(xp, [piece[None] for piece in pieces], axis=0)


# -- what exchanges compute ------------------------------------------------------------------------------------------


def prefixes(xp: Framework, shard: Shard, A: Sequence[Any], b: Sequence[Any], upto: int) -> list[Any]:
    """The states that enter the spans ``0 … upto-1``, in order; zeros where no sequence comes in.

    The order of every sum is that of the spans, so the bits do not depend on who computes it.
    """
    entering: list[Any] = []
    state = xp.zeros_like(b[0])
    for j in range(upto):
        entering.append(state if shard.chain.enters[j] else xp.zeros_like(state))
        state = b[j] if shard.chain.starts[j] else act(xp, A[j], state) + b[j]
    return entering


def sums(xp: Framework, parts: Sequence[Any], sources: Sequence[tuple[int, ...]]) -> list[Any]:
    """For each output, the sum of its sources, in their order; zeros where it has none."""
    found: list[Any] = []
    for own in sources:
        total = xp.zeros_like(parts[0])
        for i, source in enumerate(own):
            total = parts[source] if i == 0 else total + parts[source]
        found.append(total)
    return found


# -- the operator, once it is known what enters ----------------------------------------------------------------------


def operate_on_rows(call: ShardCall, enter: Callable[[ShardCall, dict[str, Any]], Any]) -> tuple[Any, Any]:
    """A batch of sequences, each over all ranks. The spans of one rank are rows of a larger batch.

    Args:
        call: The call.
        enter: From the call and its arrays by rows, the states that enter the spans ``[spans, B, …]``.
    """
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    x = call.of_tokens(call.every, lambda x: _split(x, m))
    start, end = shard.holds(0), shard.holds(len(shard.chain.order) - 1)
    if shard.ranks * m == 1:
        return call.operate(x)
    entering = enter(call, x)
    states = [entering[i] for i in range(m)]
    if start is not None and call.keywords["initial_state"] is not None:
        # what enters the first span is zero; to read it all the same makes every rank take part in the exchange's gradient
        states[start] = xp.astype(call.keywords["initial_state"], xp.dtype(entering)) + entering[start]
    o, final = call.operate(x, initial_state=_by_row(xp, _stacked(xp, states)), cu_seqlens=None)
    if final is not None:
        last = _by_span(xp, final, m)
        final = last[end] if end is not None else xp.zeros_like(last[0])
    return _unsplit(o, m), final


def operate_on_packed(call: ShardCall, enter: Callable[[ShardCall], Any]) -> tuple[Any, Any]:
    """Packed sequences: what crosses is the state of the one sequence that a span's end cuts.

    Args:
        call: The call.
        enter: From the call, the states that enter the spans ``[spans, 1, …]``.
    """
    shard = call.shard
    entering = enter(call) if shard.chain.needed else None
    rows = [_initial(call, segment) for segment in shard.segments]
    if entering is not None:
        for i in range(len(shard.spans)):
            # zeros where no sequence comes in; to read them all the same makes every rank take part in the exchange's gradient
            first = next((j for j, segment in enumerate(shard.segments) if segment.span == i), 0)
            rows[first] = (
                entering[i] if rows[first] is None else call.xp.astype(rows[first], call.xp.dtype(entering)) + entering[i]
            )
    o, final = call.operate(call.every, initial_state=_states(call, rows), cu_seqlens=offsets_of(call, shard.offsets))
    return o, None if final is None else _finals(call, final)


def _split(x: Any, m: int) -> Any:
    """``[B, m·L, …]`` as ``[B·m, L, …]``."""
    return x if m == 1 else x.reshape(x.shape[0] * m, x.shape[1] // m, *x.shape[2:])


def _unsplit(x: Any, m: int) -> Any:
    return x if m == 1 else x.reshape(x.shape[0] // m, x.shape[1] * m, *x.shape[2:])


def _by_span(xp: Framework, x: Any, m: int) -> Any:
    """``[B·m, …]`` as ``[m, B, …]``."""
    return x[None] if m == 1 else xp.swapaxes(x.reshape(x.shape[0] // m, m, *x.shape[1:]), 0, 1)


def _by_row(xp: Framework, x: Any) -> Any:
    """``[m, B, …]`` as ``[B·m, …]``."""
    return x[0] if x.shape[0] == 1 else xp.swapaxes(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def offsets_of(call: ShardCall, offsets: tuple[int, ...]) -> Any:
    """``cu_seqlens`` of a rank's own segments, where its arrays are."""
    like = next(iter(call.arrays.values()))
    return call.xp.integers(offsets, like)


def _initial(call: ShardCall, segment: Segment) -> Any:
    """The caller's state before a sequence that starts here ``[1, …]``; None for zeros."""
    initial = call.keywords["initial_state"]
    if initial is None or segment.sequence < 0 or not segment.first:
        return None
    return initial[segment.sequence][None]


def _states(call: ShardCall, rows: Sequence[Any]) -> Any:
    """The rows in one array, zeros for None; None where all are."""
    given = [row for row in rows if row is not None]
    if not given:
        return None
    xp, wide = call.xp, call.xp.accumulation(next(iter(call.arrays.values())))
    zeros = xp.zeros_like(xp.astype(given[0], wide))
    return _joined(xp, [zeros if row is None else xp.astype(row, wide) for row in rows], axis=0)


def _finals(call: ShardCall, final: Any) -> Any:
    """A row for every sequence of all ranks: its final state where its last token is here, else zeros."""
    ends = {segment.sequence: i for i, segment in enumerate(call.shard.segments) if segment.last}
    nothing = call.xp.full((1, *final.shape[1:]), 0.0, like=final)
    rows = [final[ends[n]][None] if n in ends else nothing for n in range(call.shard.sequences)]
    return _joined(call.xp, rows, axis=0)


# -- the matrix-state families ---------------------------------------------------------------------------------------


def matrix_state(call: ShardCall) -> tuple[Any, Any]:
    """Every family that is affine in its state: spans tell each other their summaries."""
    if call.shard.packed:
        return operate_on_packed(call, _chained_tails)
    return operate_on_rows(call, _chained_rows)


def _chained_rows(call: ShardCall, x: dict[str, Any]) -> Any:
    xp, shard, m, initial = call.xp, call.shard, len(call.shard.spans), call.keywords["initial_state"]
    start, end = shard.holds(0), shard.holds(len(shard.chain.order) - 1)
    # nobody waits for what the last span does to the state
    A, b = (_by_span(xp, each, m) for each in call.summarize(call.tokens(x, 0, 0) if end is not None and m == 1 else x))
    if start is not None and initial is not None:
        own = xp.astype(initial, xp.dtype(b))
        b = _stacked(xp, [act(xp, A[i], own) + b[i] if i == start else b[i] for i in range(m)])
    return call.exchange.chain(call, A, b)


def _chained_tails(call: ShardCall) -> Any:
    xp, initial = call.xp, call.keywords["initial_state"]
    pairs: list[tuple[Any, Any]] = []
    for span in call.shard.spans:
        tail = span.tail
        A, b = call.summarize(call.tokens(call.every, *((tail.start, tail.stop) if tail else (span.start, span.start))))
        if tail and tail.first and initial is not None:
            b = act(xp, A, xp.astype(initial[tail.sequence][None], xp.dtype(b))) + b
        pairs.append((A, b))
    return call.exchange.chain(call, *(_stacked(xp, each) for each in zip(*pairs, strict=True)))


# -- causal=False ----------------------------------------------------------------------------------------------------


def everywhere(call: ShardCall) -> tuple[Any, Any]:
    """Every token reads the sum over its whole sequence: the sums of a sequence's segments are added, and read."""
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    if shard.packed:
        x, cu = call.every, offsets_of(call, shard.offsets)
        total = _whole_sequences(call, call.summarize(x, cu)[1])
    else:
        x, cu = call.of_tokens(call.every, lambda x: _split(x, m)), None
        sources = ((tuple(range(shard.ranks * m)),),) * shard.ranks
        _, b = call.summarize(x)
        total = call.exchange.combine(call, _by_span(xp, b, m), sources)[0]
        total = _by_row(xp, _stacked(xp, [total] * m))
    nothing = {**x, "k": xp.zeros_like(x["k"]), "v": xp.zeros_like(x["v"])}
    o, _ = call.operate(nothing, initial_state=total, cu_seqlens=cu, causal=True, output_final_state=False)
    return (o if shard.packed else _unsplit(o, m)), None


def _whole_sequences(call: ShardCall, own: Any) -> Any:
    """For each of a rank's segments, the sum over its whole sequence, from those over the segments ``own [segments, …]``."""
    xp, shard = call.xp, call.shard
    if not shard.chain.needed:
        return own
    most = 2 * len(shard.spans)  # a span has one segment that comes in, and one that goes on
    opened = _open(shard)
    spare = [xp.zeros_like(own[0])] * (most - len(opened))
    contributed = _stacked(xp, [*(own[i] for i in opened), *spare])
    summed = call.exchange.combine(call, contributed, _whole_sources(shard, most))
    rows = [summed[opened.index(i)] if i in opened else own[i] for i in range(len(shard.segments))]
    if spare:  # zeros; to read them all the same makes every rank take part in the exchange's gradient
        rows[0] = rows[0] + summed[most - 1]
    return _stacked(xp, rows)


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
    empty = call.xp.full((len(shard.spans), x.shape[0] if not shard.packed else 1, x.shape[2], 0), 0.0, like=x)
    if shard.packed:
        return operate_on_packed(call, lambda call: empty)
    return operate_on_rows(call, lambda call, x: empty)


def _windows(call: ShardCall, arrays: dict[str, Any], length: int) -> Any:
    """The windows that enter the spans ``[spans, B, D, W−1]``."""
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    x, W = xp.astype(arrays["x"], xp.accumulation(arrays["x"])), arrays["weight"].shape[1]
    rows = [_leaving(call, x, i, W - 1) for i in range(m)]  # [B, W-1, D] each
    contributed = xp.swapaxes(_joined(xp, rows, axis=1), 0, 1)
    entered = call.exchange.combine(call, contributed, _window_sources(shard, W - 1, length))
    B, D = entered.shape[1:]
    return xp.swapaxes(xp.swapaxes(entered.reshape(m, W - 1, B, D), 1, 2), 2, 3)


def _leaving(call: ShardCall, x: Any, number: int, size: int) -> Any:
    """The last inputs of the sequence that leaves a span ``[B, W−1, D]``, as far as the rank knows them."""
    xp, shard, m, initial = call.xp, call.shard, len(call.shard.spans), call.keywords["initial_state"]
    if shard.packed:
        tail = shard.spans[number].tail
        own = x[:, tail.start : tail.stop] if tail else x[:, :0]
        first, row = bool(tail and tail.first), slice(tail.sequence, tail.sequence + 1) if tail else slice(0, 0)
    else:
        own, first, row = x[number::m], shard.spans[number].place == 0, slice(None)
    own = own[:, max(0, own.shape[1] - size) :]
    missing = size - own.shape[1]
    if missing == 0:
        return own
    if first and initial is not None:
        before = xp.swapaxes(xp.astype(initial[row], xp.dtype(x)), 1, 2)[:, size - missing :]
    else:
        before = xp.full((own.shape[0], missing, own.shape[2]), 0.0, like=x)
    return xp.concat([before, own], axis=1)


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
