# pyright: basic
"""Plans of ranks that fla's context parallelism means, for the functions that take its ``cp_context``.

fla's context tells a rank where sequences lie among its own tokens; a plan of linattn's knows all of them. Ranks tell each
other once, and the context keeps the plan for as long as it says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..errors import ContextError, Unsupported

__all__ = ["offsets_of_all", "plan_of"]

KEPT = "_linattn_planned"
"""The attribute of a context that holds what was planned."""


class Planned(NamedTuple):
    """A plan, and what the context said when it was made.

    Attributes:
        cu_seqlens, version: Offsets on the device, and how often they had been written to; None where nobody counts.
        tokens: Those of the rank.
        group: Of ranks.
        begins: Whether the rank's first sequence begins with it.
        plan: The plan.
    """

    cu_seqlens: Any
    version: int | None
    tokens: int
    group: Any
    begins: bool
    plan: Any

    def holds(self, context: Any, tokens: int) -> bool:
        """Whether the context says the same now, of as many tokens."""
        written = self.version is None or _version(self.cu_seqlens) != self.version
        same = context.cu_seqlens is self.cu_seqlens and not written and tokens == self.tokens
        return same and context.group is self.group and bool(context.is_first_rank) == self.begins


def _version(x: Any) -> int | None:
    """How often a tensor was written to, which is not counted of those made in inference mode."""
    return None if x.is_inference() else x._version


@torch.compiler.disable(reason="cp_context: offsets are read on the host: pass fullgraph=False, or linattn's own context=")
def plan_of(context: Any, tokens: int) -> Any:
    """The plan of a context made by ``fla.ops.cp.build_cp_context``, for ``context=`` of linattn's operators.

    Every rank of the context's group calls this, as it calls the function that takes the context, with how many ``tokens`` it
    has. Offsets are read on the host when they are new.
    """
    if getattr(context, "group", None) is None or getattr(context, "cu_seqlens", None) is None:
        got = type(context).__name__
        raise Unsupported(
            f"cp_context: expected a context of fla.ops.cp.build_cp_context with a group and cu_seqlens, got {got}"
        )
    if (layout := getattr(context, "layout", "contiguous")) != "contiguous":
        raise Unsupported(f"cp_context: layout={layout!r} is not served by linattn, only 'contiguous'")
    planned: Planned | None = getattr(context, KEPT, None)
    if planned is None or not planned.holds(context, tokens):
        from linattn.distributed.agreement import told_by_all
        from linattn.distributed.on_torch import context_parallel, cpu_group_of

        offsets, begins = context.cu_seqlens, bool(context.is_first_rank)
        # not over the context's own group: where the others exchange states already, they would take this for one
        told = told_by_all(cpu_group_of(context.group), "cp_context", (tuple(offsets.tolist()), begins, tokens))
        _check([counted for *_, counted in told], [own[-1] for own, *_ in told], told[0][1])
        plan = context_parallel(context.group, cu_seqlens=offsets_of_all([(own, first) for own, first, _ in told]))
        planned = Planned(offsets, _version(offsets), tokens, context.group, begins, plan)
        setattr(context, KEPT, planned)
    return planned.plan


def _check(tokens: Sequence[int], ends: Sequence[int], begins: bool) -> None:
    """What the contexts of all ranks say fits their tokens; the same on each of them."""
    if any(count != tokens[0] for count in tokens) or list(ends) != list(tokens):
        raise ContextError(
            f"cp_context: every rank must have as many tokens, and its cu_seqlens end there: the ranks have {list(tokens)} "
            f"tokens, and their cu_seqlens end at {list(ends)}"
        )
    if not begins:
        raise ContextError("cp_context: the first rank must begin with a sequence, got is_first_rank=False there")


def offsets_of_all(told: Sequence[tuple[Sequence[int], bool]]) -> list[int]:
    """Offsets of sequences over the tokens of all ranks, but for those that have none.

    Args:
        told: Of each rank the offsets among its own tokens, from 0 to their number, and whether its first sequence begins
            with it.
    """
    found: list[int] = []
    before = 0
    for offsets, begins in told:
        found += [before + start for start, stop in pairwise(offsets) if start < stop and (start or begins)]
        before += offsets[-1]
    return [*found, before]
