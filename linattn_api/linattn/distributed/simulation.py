"""All ranks of a call in one process, one after the other: exactness at any number of ranks, without a device for each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..affine import act
from ..context import Context
from ..feature_maps import FeatureMap
from ..frameworks import Framework, framework_of
from ..spec import OpSpec
from . import lowering
from .exchange import Exchange, Sources
from .layout import Layout, Shard, plain_offsets, rank_order, shard_of, tokens_of_rank
from .rules import plus

__all__ = ["simulate"]


class _Waiting(Exception):
    """A rank has come to an exchange whose result is not known yet."""

    def __init__(self, kind: str, shard: Shard, contributed: tuple[Any, ...]) -> None:
        super().__init__(kind)
        self.kind, self.shard, self.contributed = kind, shard, contributed


class _Rank(Context, Exchange):
    """One rank: runs its call anew whenever one more exchange is known."""

    def __init__(self, shard_of_tokens: Callable[[int], Shard], replicate_states: bool) -> None:
        self.shard_of_tokens, self.replicate_states = shard_of_tokens, replicate_states
        self.known: list[Any] = []
        self.met = 0

    def run(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        self.met = 0
        rest = (spec, form, arrays, keywords, feature_map, backend)
        return lowering.run(self, self.shard_of_tokens, self.replicate_states, *rest)

    def _result(self, kind: str, call: lowering.ShardCall, *contributed: Any) -> Any:
        self.met += 1
        if self.met > len(self.known):
            raise _Waiting(kind, call.shard, contributed)
        return self.known[self.met - 1]

    def chain(self, call: lowering.ShardCall, A: Any, b: Any) -> Any:
        return self._result("chain", call, A, b)

    def combine(self, call: lowering.ShardCall, x: Any, sources: Sources) -> Any:
        return self._result("combine", call, x, sources)

    def total(self, call: lowering.ShardCall, x: Any) -> Any:
        return self._result("total", call, x)


def simulate(
    operator: Callable[..., Any],
    *args: Any,
    ranks: int,
    layout: Layout = "contiguous",
    cu_seqlens: Sequence[int] | None = None,
    replicate_states: bool = False,
    **keywords: Any,
) -> tuple[Any, Any]:
    """Run a call as ``ranks`` devices would that share its tokens, in this process.

    Args:
        operator: An operator, e.g. ``linattn.chunk_gla``.
        *args: Its positional arrays, with the tokens of all ranks.
        ranks: Number of ranks.
        layout: ``"contiguous"`` or ``"zigzag"``.
        cu_seqlens: Offsets of packed sequences, as plain integers.
        replicate_states: Whether every rank gets every final state, which changes who has it, and not what it is.
        **keywords: Those of the call, but ``cu_seqlens``.

    Returns:
        ``(o, final_state)`` of the whole call, put together from the ranks.

    Raises:
        ContextError: The tokens cannot be dealt out evenly; packed sequences may end in padding.
    """
    offsets = plain_offsets("simulate", cu_seqlens)
    bound = inspect.signature(operator).bind(*args, **keywords).arguments
    spec: OpSpec = operator.spec  # type: ignore[attr-defined]
    first = bound[spec.args[0].name]
    xp, T, spans = framework_of(first), first.shape[1], len(rank_order(ranks, layout))
    tokens_of_rank(T, ranks, layout)
    members = [_Rank(partial(_shard, ranks, rank, layout, offsets), replicate_states) for rank in range(ranks)]
    inputs = [_local(xp, spec, bound, ranks, rank, layout) for rank in range(ranks)]
    results: list[Any] = []
    while True:
        waiting: list[_Waiting] = []
        results = []
        for member, given in zip(members, inputs, strict=True):
            try:
                results.append(operator(**given, context=member))
            except _Waiting as reached:
                waiting.append(reached)
        if not waiting:
            break
        _exchange(xp, members, waiting)
    o = [None] * spans
    for j, (rank, number) in enumerate(rank_order(ranks, layout)):
        length = T // spans
        o[j] = results[rank][0][:, number * length : (number + 1) * length]
    states = [state for _, state in results if state is not None]
    if not states:
        return xp.concat(o, axis=1), None
    final = states[0] if replicate_states else functools.reduce(plus, states)
    return xp.concat(o, axis=1), final


def _shard(ranks: int, rank: int, layout: Layout, offsets: tuple[int, ...] | None, tokens: int) -> Shard:
    return shard_of(ranks, rank, layout, tokens if offsets else 0, offsets)


def _local(xp: Framework, spec: OpSpec, bound: dict[str, Any], ranks: int, rank: int, layout: Layout) -> dict[str, Any]:
    """The arguments of one rank: of what holds a row a token, its own."""
    args = {arg.name: arg for arg in (*spec.args, *spec.keyword_args)}
    order = rank_order(ranks, layout)
    own = [j for j, (holder, _) in enumerate(order) if holder == rank]

    def cut(x: Any) -> Any:
        length = x.shape[1] // len(order)
        pieces = [x[:, j * length : (j + 1) * length] for j in own]
        return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=1)

    return {
        name: cut(x) if name in args and x is not None and lowering.has_tokens(args[name], x) else x
        for name, x in bound.items()
    }


def _exchange(xp: Framework, members: Sequence[_Rank], waiting: Sequence[_Waiting]) -> None:
    """Give every rank what all of them have contributed to."""
    assert len(waiting) == len(members), "ranks meet in the same exchanges"
    kind = waiting[0].kind
    for member, found in zip(members, _RESULTS[kind](xp, waiting), strict=True):
        member.known.append(found)


def _chained(xp: Framework, waiting: Sequence[_Waiting]) -> list[Any]:
    order = waiting[0].shard.chain.order
    A, b = ([waiting[rank].contributed[which][number] for rank, number in order] for which in (0, 1))
    entering = prefixes(xp, waiting[0].shard, A, b, len(order))
    own: list[list[Any]] = [[] for _ in waiting]
    for state, (rank, _) in zip(entering, order, strict=True):
        own[rank].append(state[None])
    return [xp.concat(states, axis=0) for states in own]


def _combined(xp: Framework, waiting: Sequence[_Waiting]) -> list[Any]:
    parts = [part for member in waiting for part in member.contributed[0]]
    sources = waiting[0].contributed[1]
    return [xp.concat([x[None] for x in sums(xp, parts, own)], axis=0) for own in sources]


def _totalled(xp: Framework, waiting: Sequence[_Waiting]) -> list[Any]:
    total = waiting[0].contributed[0]
    for member in waiting[1:]:
        total = total + member.contributed[0]
    return [total] * len(waiting)


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


_RESULTS = {"chain": _chained, "combine": _combined, "total": _totalled}
