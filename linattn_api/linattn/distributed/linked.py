# pyright: basic
"""The exchange between the stages of an operator, where a backend runs it in stages.

What such a backend makes before any state is known, the scores of chunks and decayed rows, serves the summary that a span tells
the others and then, once it is known what enters, the outputs. Backward, it serves the gradient of what entered, which follows
from the outputs alone, and once the ranks have exchanged these, all other gradients, for which the states of the chunks are
made again. So what a span does for the others is a scan forward, two where its transition is a matrix, and one
backward, which write nothing a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from .. import dispatch
from ..affine import act
from ..spec import SUMMARIES
from . import collectives
from .exchange import Exchange, Sources, stacked
from .messages import Route, route_of
from .rules import by_row, by_span, starting, starting_tails

if TYPE_CHECKING:
    from .lowering import ShardCall
    from .on_torch import ContextPlan

__all__ = ["Link", "Stages", "link_of"]

Arrays: TypeAlias = "Sequence[Tensor | None]"
Exchanged = Callable[[Tensor], Tensor]
"""From gradients of what entered spans, those of the states after them."""
OPTIONS = ("scale", "chunk_size", "qk_norm", "gate", "beta_map")
"""Keywords that stages take besides arrays, where a family has them."""


class Stages(Protocol):
    """A call in stages.

    A backend's method ``stages(family, arrays, *, cu_seqlens, offsets, **options)`` returns the inputs of stages, to which
    gradients flow, and such an object. ``number`` says which of packed sequences is meant, as if there were no other; None
    stands for all of a batch.
    """

    def begin(self, inputs: Arrays, kept: Arrays | None = None) -> Arrays:
        """What is made before any state is known; backward, of what the forward pass ``kept``, the rest."""
        ...

    def summary(self, inputs: Arrays, made: Arrays, number: int | None) -> tuple[Tensor, Tensor]:
        """``(A, b)``, in float32."""
        ...

    def finish(self, inputs: Arrays, made: Arrays, start: Tensor, final: bool) -> tuple[Tensor, Tensor | None, Arrays]:
        """Outputs, final states if asked for, and what is kept for the backward pass."""
        ...

    def adjoint(self, inputs: Arrays, made: Arrays, do: Tensor, dfinal: Tensor | None, number: int | None) -> Tensor:
        """The gradient of the states before the tokens ``[N, HV, K, V]``, in float32."""
        ...

    def recall(self, inputs: Arrays, made: Arrays, start: Tensor) -> list[Tensor | None]:
        """What is made, and what else the backward pass needs that follows from the states before the tokens."""
        ...

    def gradients(
        self, inputs: Arrays, made: list[Tensor | None], start: Tensor, do: Tensor, dfinal: Tensor | None
    ) -> Arrays:  # fmt: skip
        """Gradients of the inputs, and last that of the states before the tokens.

        Nobody asks for what is ``made`` again: a backend may empty the list, to give memory back on the way.
        """
        ...


def link_of(plan: ContextPlan, call: ShardCall) -> Link | None:
    """The link of a call in chunk form, if its backend makes summaries itself, and runs the operator in stages."""
    if call.form not in (None, "chunk") or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    arrays = call.every
    resolved = call.resolved if call.form == "chunk" else _resolved(call, arrays, None)
    operator, lowered, *_ = resolved
    backend = getattr(operator, "__self__", None)
    if lowered is not None or not hasattr(backend, "stages"):
        return None
    known = _known.get(id(operator))
    if known is None or known[0] is not operator:
        if len(_known) >= MOST:
            _known.clear()
        known = _known[id(operator)] = operator, _summary_shapes(call, arrays, backend)
    return None if known[1] is None else Link(plan, call, resolved, known[1])


Shapes: TypeAlias = "list[tuple[torch.Size, torch.dtype]]"
_known: dict[int, tuple[Any, Shapes | None]] = {}
"""By the method that runs calls of a kind, one object for all: itself, and shapes and dtypes of ``A`` and ``b`` of their
summaries, if its backend makes them."""
MOST = 1024
"""Of these, so many; with one more, all are forgotten."""


def _summary_shapes(call: ShardCall, arrays: dict[str, Any], backend: Any) -> Shapes | None:
    """Shapes and dtypes of the summary of a call; None unless a backend makes it, and as it is asked for."""
    spec = SUMMARIES[call.spec.name]
    keywords = {name: call.keywords[name] for name in spec.keywords} | {"cu_seqlens": None}
    with torch.no_grad():
        summary, rewritten, *_ = dispatch.resolve(
            spec, "summary", tuple([arrays.get(arg.name) for arg in spec.args]), keywords, None, call.backend
        )
        if rewritten is not None or getattr(summary, "__self__", None) is not backend:
            return None
        return [(x.shape, x.dtype) for x in call.summarize(call.tokens(arrays, 0, 0))]


def _resolved(call: ShardCall, arrays: dict[str, Any], cu_seqlens: Tensor | None) -> tuple[Any, ...]:
    """What runs the chunk form, and what it is given, but for states."""
    own = {name: arrays[name] for name in call.keywords if name in arrays}
    keywords = {**call.keywords, **own, "cu_seqlens": cu_seqlens, "initial_state": None}
    named = tuple([arrays.get(arg.name) for arg in call.spec.args])
    return dispatch.resolve(call.spec, "chunk", named, keywords, None, call.backend)


class Link(Exchange):
    """One call's exchange.

    Attributes:
        plan: Who has which tokens.
        call: The call.
        resolved: What runs it, and what that is given, until its arrays are cut into spans.
        shapes: Of the two arrays of a summary, with their dtypes.
        stages: Its stages, once its arrays are cut into spans.
        inputs, made: What stages read, and make before any state is known; until there are outputs.
        transitions: What gradients cross on their way to this rank's spans, once that has been exchanged; until there are
            outputs.
        way: How states go from span to span.
        route: How messages go, if its stages write some.
        differentiable: Whether anybody may ask for gradients.
    """

    stages: Stages
    inputs: Arrays
    made: Arrays
    transitions: Tensor | None
    way: tuple[Any, ...]
    route: Route | None
    differentiable: bool
    resolved: tuple[Any, ...]

    def __init__(self, plan: ContextPlan, call: ShardCall, resolved: tuple[Any, ...], shapes: Shapes) -> None:
        self.plan, self.call, self.resolved, self.shapes = plan, call, resolved, shapes

    def around(self, enter: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What gives the states that enter the spans, and what then runs the operator."""

        def entering(call: ShardCall, *rows: Any) -> Any:
            self._divide(*rows or (call.every,))
            with torch.no_grad():
                if self.route is not None:
                    return self._exchange_messages(self.route)
                self.made = self.stages.begin(self.inputs)
                return enter(call._replace(exchange=self), *rows)

        return entering, self.operate

    def _divide(self, arrays: dict[str, Any]) -> None:
        """Have the call in stages."""
        shard, spec = self.call.shard, self.call.spec
        resolved, self.resolved = self.resolved, ()
        cu_seqlens = self.plan.offsets(self.call, lambda shard: shard.offsets) if shard.packed else None
        if shard.packed or len(shard.spans) > 1:
            resolved = _resolved(self.call, arrays, cu_seqlens)
        operator, _, _, positional, keywords = resolved
        given = dict(zip([arg.name for arg in spec.args], positional, strict=True))
        given |= {arg.name: keywords[arg.name] for arg in spec.keyword_args if arg.name in keywords}
        options = {name: self.call.keywords[name] for name in OPTIONS if name in self.call.keywords}
        offsets = {"cu_seqlens": cu_seqlens, "offsets": shard.offsets}
        self.inputs, self.stages = operator.__self__.stages(spec.name, given, **offsets, **options)
        self.route = route_of(self.plan, self.call.label, self.call.length, self.shapes, shard, self.stages, self.inputs)
        given = (*self.inputs, self.call.keywords["initial_state"])
        self.differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)

    def _exchange_messages(self, route: Route) -> Tensor:
        """The states that enter this rank's span ``[1, ...]``, from one message of each rank."""
        stages: Any = self.stages
        shard, (span,) = self.call.shard, self.call.shard.spans
        start = starting_tails(self.call) if shard.packed else starting(self.call)
        goes_on = span.tail is not None if shard.packed else span.place < shard.ranks - 1
        if goes_on and not shard.packed:
            self.made, message = stages.opened(self.inputs, route.digest)
        else:
            self.made = stages.begin(self.inputs)
            if goes_on:
                number = shard.segments.index(span.tail)
                message = stages.message(self.inputs, self.made, number, route.digest)
            else:
                message = stages.sealed(route.layout, route.digest)
        if start is not None and goes_on:
            A, b = stages.parts(route.layout, message)
            b += act(self.call.xp, A, start[0])
        entering, self.transitions = route.entering(stages, message, self.differentiable)
        return entering[None]

    def summaries(self, call: ShardCall, arrays: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """``(A, b)`` of the rows that stages run on."""
        return self.stages.summary(self.inputs, self.made, None)

    def nothing(self, call: ShardCall, arrays: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """What stands in the place of a summary that nobody reads."""
        like = next(iter(arrays.values()))
        A, b = [like.new_empty(shape, dtype=dtype) for shape, dtype in self.shapes]
        return A, b

    def tails(self, call: ShardCall) -> tuple[Tensor, Tensor]:
        """``(A, b) [spans, 1, ...]`` of what each span holds of the sequence that goes on behind it."""
        pairs = [
            self.stages.summary(self.inputs, self.made, call.shard.segments.index(span.tail))
            if span.tail
            else call.summarize(call.tokens(call.every, 0, 0))
            for span in call.shard.spans
        ]
        A, b = (stacked(call.xp, each) for each in zip(*pairs, strict=True))
        return A, b

    def chain(self, call: ShardCall, A: Tensor, b: Tensor) -> Tensor:
        """The states that enter this rank's spans."""
        self.way = self.plan.way_of(call, A, b)
        entering, transitions = collectives.carried(A, b, call.length, self.plan.said, *self.way)
        order, *_, ring = self.way
        self.transitions = transitions if ring else collectives.crossed(transitions, order, self.plan.rank)
        return entering

    def crosses(self, call: ShardCall) -> bool:
        """As the plan's."""
        return self.plan.crosses(call)

    def combine(self, call: ShardCall, x: Tensor, sources: Sources) -> Tensor:
        """As the plan's."""
        return self.plan.combine(call, x, sources)

    def total(self, call: ShardCall, x: Tensor) -> Tensor:
        """As the plan's."""
        return self.plan.total(call, x)

    def operate(self, arrays: dict[str, Any], initial_state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Outputs and final states, once it is known what enters."""
        asked, inputs, made, transitions = self.call.keywords["output_final_state"], self.inputs, self.made, self.transitions
        self.call = self.call._replace(arrays={}, keywords={}, resolved=())  # autograd keeps what it needs
        self.inputs, self.made, self.transitions = (), (), None
        if not self.differentiable:
            o, end, _ = self.stages.finish(inputs, made, initial_state, asked)
            return o, end
        return _Linked.apply(self, made, asked, transitions, initial_state, *inputs)

    def after(
        self, inputs: Arrays, made: Arrays, transitions: Tensor, start: Tensor, do: Tensor, dfinal: Tensor | None
    ) -> Tensor:  # fmt: skip
        """The gradient of the operator's final states, of those of its outputs and of the caller's final states."""
        find = self._of_packed if self.call.shard.packed else self._of_rows

        def before(number: int | None, enters: bool, dfinal: Tensor | None) -> Tensor:
            if not enters:  # nobody reads what is sent in its place
                return torch.empty_like(start if number is None else start[:1])
            return self.stages.adjoint(inputs, made, do, dfinal, number)

        def exchanged(d: Tensor) -> Tensor:
            if self.route is None:
                return collectives.flowing_back(d.contiguous(), transitions, *self.way)
            return self.route.leaving(self.stages, d[0], transitions)[None]  # type: ignore[arg-type]

        return find(before, dfinal, exchanged)

    def _of_rows(self, before: Callable[..., Tensor], dfinal: Tensor | None, exchanged: Exchanged) -> Tensor:
        """The spans of a rank are rows of a batch."""
        xp, spans = self.call.xp, self.call.shard.spans
        d = before(None, [span.place for span in spans] != [0], dfinal)
        after = by_row(xp, exchanged(by_span(xp, d, len(spans))))
        return after if dfinal is None else after + dfinal

    def _of_packed(self, before: Callable[..., Tensor], dfinal: Tensor | None, exchanged: Exchanged) -> Tensor:
        """One sequence enters a span, and one leaves it."""
        shard = self.call.shard
        found: list[Tensor] = []
        for number, span in enumerate(shard.spans):
            place = shard.entry(number)
            own = None if dfinal is None else dfinal[place : place + 1]
            found.append(before(place, shard.chain.enters[span.place], own))
        after = exchanged(stacked(self.call.xp, found))
        rows = after.new_zeros((len(shard.segments), *after.shape[2:])) if dfinal is None else dfinal.clone()
        for number, span in enumerate(shard.spans):
            if span.tail is not None:
                rows[shard.segments.index(span.tail)] += after[number, 0]
        return rows


class _Linked(torch.autograd.Function):
    """The stages that know a state, with the exchange of gradients between those of the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, made: Arrays, final: bool, transitions: Tensor, start: Tensor, *inputs: Tensor | None
    ) -> Any:  # fmt: skip
        ctx.set_materialize_grads(False)
        o, end, kept = link.stages.finish(inputs, made, start, final)
        ctx.link, ctx.like, ctx.count = link, (o.shape, o.dtype, o.device), len(inputs)
        ctx.save_for_backward(transitions, start, *inputs, *kept)
        return o, end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> Any:
        shape, dtype, device = ctx.like
        do = torch.zeros(shape, dtype=dtype, device=device) if do is None else do
        link, (transitions, start, *saved) = ctx.link, ctx.saved_tensors
        inputs, kept = tuple(saved[: ctx.count]), tuple(saved[ctx.count :])
        made = link.stages.begin(inputs, kept)
        dend = link.after(inputs, made, transitions, start, do, dfinal)
        made = link.stages.recall(inputs, made, start)
        *gradients, dstart = link.stages.gradients(inputs, made, start, do, dend)
        return None, None, None, None, dstart, *gradients
