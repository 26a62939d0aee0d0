"""A call on a shard as ordinary calls: summary → exchange → initial state → the operator. Arrays of any framework.

A rule reads the same on every rank. What connects the ranks, and what differs between them, is asked of an
:class:`~linattn.distributed.exchange.Exchange`: a rule says how a fact follows from what a rank holds, whichever that is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from .. import dispatch, summarizing
from ..call import method_name
from ..errors import ContextError, OptionError, ShapeError
from ..feature_maps import FeatureMap
from ..feature_maps import resolve as resolve_map
from ..frameworks import Framework, framework_of
from ..spec import SUMMARIES, Arg, OpSpec
from .exchange import Exchange, joined
from .layout import Shard, tokens_of_span
from .mixed_rules import chunks_everywhere, whole_chunks
from .rules import convolution, each, everywhere, matrix_state

__all__ = ["ShardCall", "has_tokens", "run"]


class ShardCall(NamedTuple):
    """A call on the tokens of one rank.

    Attributes:
        xp: The framework of its arrays.
        spec: The family.
        form: The form.
        arrays: Positional arrays by name, feature maps applied.
        keywords: Its keywords.
        backend: The caller's wish.
        shard: What the rank holds; where no rank is known, what the first one does, for what all of them have alike.
        exchange: What connects the ranks, and knows which one this is.
        replicate_states: Whether every rank gets every final state.
        resolved: What would run the call on one device, as :func:`linattn.dispatch.resolve` says it.
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
    resolved: tuple[Any, ...] = ()

    @property
    def label(self) -> str:
        """What messages call it."""
        return method_name(self.form, self.spec.name)

    @property
    def length(self) -> int:
        """How many tokens the rank has."""
        return self.arrays[self.spec.args[0].name].shape[1]

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
    tokens_of_span(arrays[0].shape[1], shard.layout)
    named = {arg.name: x for arg, x in zip(spec.args, arrays, strict=True)}
    call = ShardCall(xp, spec, form, named, keywords, backend, shard, exchange, replicate_states)
    _check_states(call)
    if feature_map is not None:
        call = call._replace(arrays=_map_features(call, resolve_map(feature_map)))
    sequences = exchange.offsets(call, lambda shard: [0] * (shard.sequences + 1)) if shard.packed else None
    resolved = check(spec, form, tuple(call.arrays.values()), keywords, backend, sequences)
    o, final = _rule(call)(call._replace(resolved=resolved))
    if final is not None and replicate_states:
        final = each(lambda x: exchange.total(call, x), final)
    return o, final


def check(
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    backend: str | Sequence[str] | None,
    offsets: Any,
) -> tuple[Any, ...]:
    """Refuse a call as one device would, before ranks exchange anything; of ``offsets`` only how many there are counts. What
    would run it.
    """
    return dispatch.resolve(spec, form, arrays, {**keywords, "cu_seqlens": offsets}, None, backend)


def _rule(call: ShardCall) -> Callable[[ShardCall], tuple[Any, Any]]:
    causal = call.keywords.get("causal", True)
    if call.spec.name == "short_conv":
        return convolution
    if call.spec.name == "mixed_attn":
        return whole_chunks if causal else chunks_everywhere
    if call.spec.name not in SUMMARIES:
        raise ContextError(f"{call.label}: {call.spec.name} has no context=")
    return matrix_state if causal else everywhere


def _check_states(call: ShardCall) -> None:
    """An initial state has a row for every sequence of all ranks."""
    start = call.keywords["initial_state"]
    first = cast("tuple[Any, ...]", start)[0] if isinstance(start, tuple) else start
    found: list[int] = list(getattr(first, "shape", ()))
    rows = call.shard.sequences or next(iter(call.arrays.values())).shape[0]
    if found and found[0] != rows:
        what = "packed sequences on all ranks" if call.shard.packed else "batch entries"
        raise ShapeError(
            f"{call.label}: initial_state must have a row for each of the {rows} {what}, got {found}: "
            f"a rank reads those of the sequences whose first token it holds"
        )


def _moved(phi: Any, first: Any, tokens: slice) -> Any:
    """The map of some tokens of a rank, the first of which has this place; positions that are given are of the rank's own."""
    if getattr(phi, "positions", None) is None:
        return dataclasses.replace(phi, start=phi.start + first)
    return dataclasses.replace(phi, positions=phi.positions[:, tokens])


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
        for i in range(len(call.shard.spans)):
            first = length * call.exchange.number(call, lambda shard, i=i: shard.spans[i].place)
            tokens = slice(i * length, (i + 1) * length)
            pieces.append(_moved(phi, first, tokens)(x[:, tokens]))
        mapped[name] = joined(call.xp, pieces, axis=1)
    return mapped
