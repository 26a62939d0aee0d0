# pyright: basic
"""What ranks tell each other as one message that a backend writes, with what is worked out once for all calls of a kind.

Each rank has one span. Its message ends in a digest of the plan and the call. One kernel reads the messages of all ranks: what
enters the span follows from those before, and it is NaN where a digest is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import collectives
from .digests import Doubt
from .layout import Shard

if TYPE_CHECKING:
    from .linked import Arrays
    from .on_torch import ContextPlan

__all__ = ["Messages", "Route", "route_of"]


class Messages(Protocol):
    """What stages may have besides, which write messages and read those of all ranks."""

    def layout(self, inputs: Arrays) -> Any:
        """How a message is laid out, float32, which is a key; it has a ``size``."""
        ...

    def opened(self, inputs: Arrays, digest: Tensor) -> tuple[Arrays, Tensor]:
        """What is made before any state is known, and the message of all of a batch."""
        ...

    def message(self, inputs: Arrays, made: Arrays, number: int, digest: Tensor) -> Tensor:
        """The message of one of packed sequences."""
        ...

    def sealed(self, layout: Any, digest: Tensor) -> Tensor:
        """A message of which nobody reads more than the digest."""
        ...

    def parts(self, layout: Any, message: Tensor) -> tuple[Tensor, Tensor]:
        """``A`` and ``b`` where they lie in a message."""
        ...

    def entering(
        self, layout: Any, messages: Tensor, digest: Tensor, ever: Tensor, told: Tensor, first: int, count: int
    ) -> Tensor:  # fmt: skip
        """The states after ``count`` spans, of which the ``first`` starts from zero; NaN where a digest is another, which
        ``ever`` and ``told`` then say.
        """
        ...

    def crossed(self, layout: Any, messages: Tensor, first: int, count: int) -> Tensor:
        """The transitions of ``count`` spans from the ``first`` one on, in memory of their own."""
        ...

    def leaving(self, layout: Any, d: Tensor, transitions: Tensor, first: int, count: int) -> Tensor:
        """Gradients of the states after a span, of those before all spans ``[ranks, …]``: of ``count`` of them, from the
        ``first`` one back, of which all but that one are crossed.
        """
        ...


class Route(NamedTuple):
    """How messages go in calls of a kind.

    Attributes:
        said: What the rank says of such a call.
        digest: Of that, on the device, as messages hold it.
        doubt: Whether digests were ever others.
        layout: How a message is laid out.
        before: The span that what enters starts in, and from how many spans it comes.
        behind: The span that what leaves ends in, and how many spans it enters.
    """

    said: collectives.Said
    digest: Tensor
    doubt: Doubt
    layout: Any
    before: tuple[int, int]
    behind: tuple[int, int]

    def entering(self, stages: Messages, message: Tensor, crossed: bool) -> tuple[Tensor, Tensor | None]:
        """What enters, and if asked for the transitions that gradients cross on their way back."""
        messages, (last, count) = collectives.gathered(self.said, message), self.behind
        found = stages.entering(self.layout, messages, self.digest, self.doubt.ever, self.doubt.told, *self.before)
        between = max(count - 1, 0)
        return found, stages.crossed(self.layout, messages, last - between, between) if crossed else None

    def leaving(self, stages: Messages, d: Tensor, transitions: Tensor) -> Tensor:
        """The gradient of what leaves, of that of what entered."""
        all_d = collectives.all_of(d, self.said.group, self.said.label)
        return stages.leaving(self.layout, all_d, transitions, *self.behind)


def route_of(
    plan: ContextPlan, label: str, tokens: int, shapes: Sequence[tuple[torch.Size, torch.dtype]], shard: Shard, stages: Any,
    inputs: Arrays,
) -> Route | None:  # fmt: skip
    """The route of a call whose summaries have such shapes; ``None`` where its stages write no messages, or not of such spans.

    Of a kind that was not called yet the ranks compare what they say.
    """
    if len(shard.spans) != 1 or not hasattr(stages, "opened") or plan.in_a_ring(shapes):
        return None
    layout, device = stages.layout(inputs), next(x.device for x in inputs if x is not None)
    key = label, tokens, layout, device
    route = plan.routes.get(key)
    if route is None or not collectives.in_step(route.said):
        place = shard.spans[0].place
        kinds, how = [((1, *shape), dtype) for shape, dtype in shapes], f", in {layout.size} numbers"
        said = collectives.said_of(plan.group_name, label, tokens, plan.said, kinds, how)
        with torch.inference_mode(False):
            digest = torch.tensor([said.number], device=device).view(torch.float32)
        doubt = said.watch.doubt(device)
        route = plan.routes[key] = Route(said, digest, doubt, layout, shard.chain.before(place), shard.chain.behind(place))
        collectives.in_step(said)
    return route
