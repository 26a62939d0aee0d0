# pyright: basic
"""The exchange beside the operator's own gradients, where a backend gives the gradient of entering states by itself.

What enters a span is then a constant to the operator, and the state that leaves it has the gradient of what the spans behind do
with it. Backward, a span first finds the gradient of what enters it from its outputs alone, which writes nothing a token; the
ranks exchange these; then the operator runs its one backward pass, knowing the gradient of the state that it ended in. Forward
and backward, that is one scan for a summary beside the operator's own pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import dispatch
from ..spec import SUMMARIES
from . import collectives
from .exchange import Exchange, Sources
from .rules import by_row, by_span

if TYPE_CHECKING:
    from .lowering import ShardCall
    from .on_torch import ContextPlan

__all__ = ["Link", "link_of"]

Adjoint = Callable[..., Tensor]
"""From a family, arrays by name, gradients of outputs and final states, and options: that of the states before the tokens."""


def link_of(plan: ContextPlan, call: ShardCall) -> Link | None:
    """The link of a call in chunk form, if its backend makes summaries itself, and their adjoints."""
    if call.form not in (None, "chunk") or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    spec = SUMMARIES[call.spec.name]
    named = tuple(call.every.get(arg.name) for arg in spec.args)
    keywords = {name: call.keywords[name] for name in spec.keywords} | {"cu_seqlens": None}
    with torch.no_grad():
        function, rewriting, *_ = dispatch.resolve(spec, "summary", named, keywords, None, call.backend)
    adjoint = getattr(getattr(function, "__self__", None), "adjoint", None)
    return None if rewriting is not None or adjoint is None else Link(plan, call, adjoint)


class Link(Exchange):
    """One call's exchange.

    Attributes:
        plan: Who has which tokens.
        call: The call.
        adjoint: The backend's.
        chained: Once states have been exchanged, the transitions and how they go from span to span.
    """

    def __init__(self, plan: ContextPlan, call: ShardCall, adjoint: Adjoint) -> None:
        self.plan, self.call, self.adjoint = plan, call, adjoint
        self.chained: tuple[Any, ...] = ()

    def around(self, enter: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What gives the states that enter the spans, and what then runs the operator."""

        def entering(call: ShardCall, *more: Any) -> Any:
            with torch.no_grad():
                return enter(call._replace(exchange=self), *more)

        return entering, self.operate

    def chain(self, call: ShardCall, A: Tensor, b: Tensor) -> Tensor:
        """The states that enter this rank's spans."""
        way = self.plan.way_of(call, A, b)
        entering, transitions = collectives.carried(A, b, *way)
        self.chained = transitions, *way
        return entering

    def combine(self, call: ShardCall, x: Tensor, sources: Sources) -> Tensor:
        """As the plan's."""
        return self.plan.combine(call, x, sources)

    def total(self, call: ShardCall, x: Tensor) -> Tensor:
        """As the plan's."""
        return self.plan.total(call, x)

    def operate(self, arrays: dict[str, Any], **changed: Any) -> tuple[Tensor, Tensor | None]:
        """Outputs and final states, which take the gradients of the spans behind."""
        asked = self.call.keywords["output_final_state"]
        if not torch.is_grad_enabled():
            return self.call.operate(arrays, **changed)
        o, final = self.call.operate(arrays, **changed | {"output_final_state": True})
        given = [x for x in (o, *self.call.keywords.values()) if isinstance(x, Tensor) and x.requires_grad]
        if not given:
            return o, final if asked else None
        operands = {arg.name for arg in self.call.spec.args if arg.role == "operand"}
        held = {
            name: (x.to(o.dtype) if name in operands else x).detach() for name, x in arrays.items() if isinstance(x, Tensor)
        }
        o, final = _Linked.apply(o, final, given[0], self, tuple(held), *held.values())
        return o, final if asked else None

    def after(self, arrays: dict[str, Tensor], do: Tensor, dfinal: Tensor | None) -> Tensor:
        """The gradient of the operator's final states, from those of its outputs and of the caller's final states."""
        transitions, *way = self.chained
        find = self._of_packed if self.call.shard.packed else self._of_rows
        return find(arrays, do, dfinal, lambda d: collectives.flow_back(d.contiguous(), transitions, *way))

    def _of_rows(self, arrays: dict[str, Tensor], do: Tensor, dfinal: Tensor | None, exchanged: Any) -> Tensor:
        """The spans of a rank are rows of a batch."""
        xp, spans = self.call.xp, self.call.shard.spans
        if [span.place for span in spans] == [0]:  # nothing enters
            before = self._nothing(arrays, do)
        else:
            before = self._before(arrays, do, dfinal)
        after = by_row(xp, exchanged(by_span(xp, before, len(spans))))
        return after if dfinal is None else after + dfinal

    def _of_packed(self, arrays: dict[str, Tensor], do: Tensor, dfinal: Tensor | None, exchanged: Any) -> Tensor:
        """One sequence enters a span, and one leaves it."""
        shard = self.call.shard
        found: list[Tensor] = []
        for number, span in enumerate(shard.spans):
            place = shard.entry(number)
            segment = shard.segments[place]
            mine = self.call.tokens(arrays, segment.start, segment.stop)
            own = None if dfinal is None else dfinal[place : place + 1]
            enters = shard.chain.enters[span.place]
            cut = do[:, segment.start : segment.stop]
            found.append(self._before(mine, cut, own) if enters else self._nothing(mine, cut))
        after = exchanged(torch.stack(found))
        rows = after.new_zeros((len(shard.segments), *after.shape[2:])) if dfinal is None else dfinal.clone()
        for number, span in enumerate(shard.spans):
            if span.tail is not None:
                rows[shard.segments.index(span.tail)] += after[number, 0]
        return rows

    def _before(self, arrays: dict[str, Tensor], do: Tensor, dfinal: Tensor | None) -> Tensor:
        """The gradient of the states before the tokens."""
        keywords = self.call.keywords
        options = {name: keywords[name] for name in ("scale", "chunk_size", "qk_norm", "gate", "beta_map") if name in keywords}
        return self.adjoint(self.call.spec.name, arrays, do, dfinal, **options)

    def _nothing(self, arrays: dict[str, Tensor], do: Tensor) -> Tensor:
        rows, (HV, V), K = do.shape[0], do.shape[2:], arrays["k"].shape[-1]
        return torch.zeros((rows, HV, K, V), dtype=torch.promote_types(do.dtype, torch.float32), device=do.device)


class _Linked(torch.autograd.Function):
    """Outputs and final states as they are; backward, final states get the gradients of the spans behind."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, final: Tensor, tie: Tensor, link: Link, names: tuple[str, ...], *arrays: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.link, ctx.names, ctx.like = link, names, (o.shape, o.dtype, o.device)
        ctx.save_for_backward(*arrays)
        return o.view_as(o), final.view_as(final)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> Any:
        shape, dtype, device = ctx.like
        do = torch.zeros(shape, dtype=dtype, device=device) if do is None else do
        arrays = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        after = ctx.link.after(arrays, do, dfinal)
        return do, after, None, None, None, *(None for _ in arrays)
