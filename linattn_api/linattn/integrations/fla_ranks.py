"""Plans of ranks that fla's context parallelism means, for the functions that take its ``cp_context``.

fla's context tells a rank where sequences lie among its own tokens; a plan of linattn's knows all of them. Ranks tell each
other once a context, which keeps the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..errors import Unsupported

__all__ = ["offsets_of_all", "plan_of"]

KEPT = "_linattn_plan"
"""The attribute of a context that holds its plan."""


def plan_of(context: Any) -> Any:
    """The plan of a context made by ``fla.ops.cp.build_cp_context``, for ``context=`` of linattn's operators.

    Every rank of the context's group calls this, as it calls the function that takes the context.
    """
    if getattr(context, "group", None) is None or getattr(context, "cu_seqlens", None) is None:
        got = type(context).__name__
        raise Unsupported(
            f"cp_context: expected a context of fla.ops.cp.build_cp_context with a group and cu_seqlens, got {got}"
        )
    if not hasattr(context, KEPT):
        import torch

        from linattn.distributed import context_parallel

        dist = cast("Any", torch.distributed)

        offsets = context.cu_seqlens if context.cu_seqlens_cpu is None else context.cu_seqlens_cpu
        told: list[Any] = [None] * dist.get_world_size(context.group)
        dist.all_gather_object(told, (offsets.tolist(), bool(context.is_first_rank)), group=context.group)
        setattr(context, KEPT, context_parallel(context.group, cu_seqlens=offsets_of_all(told)))
    return getattr(context, KEPT)


def offsets_of_all(told: Sequence[tuple[Sequence[int], bool]]) -> list[int]:
    """Offsets of sequences over the tokens of all ranks.

    Args:
        told: Of each rank the offsets among its own tokens, from 0 to their number, and whether its first sequence begins
            with it.
    """
    found: list[int] = []
    before = 0
    for offsets, begins in told:
        found += [before + at for at in offsets[:-1] if at or begins]
        before += offsets[-1]
    return [*found, before]
