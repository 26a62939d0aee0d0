# pyright: basic
"""Ranks tell each other what they are about to do, over a CPU group, before they do it for the first time."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import ContextError

__all__ = ["agree"]


def agree(group: Any, what: str, mine: str) -> None:
    """Compare what each rank says; raise the same error on all of them if they differ.

    Args:
        group: A process group of CPU tensors.
        what: What is compared, for the message.
        mine: What this rank says.

    Raises:
        ContextError: They differ; names every rank and what it said. Or a rank did not answer within the group's timeout.
    """
    said: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(said, mine, group=group)
    except RuntimeError as error:
        raise ContextError(
            f"{what}: rank {dist.get_rank(group)} waited for the {len(said)} ranks of its group, and one of them died or is "
            f"late: {str(error).splitlines()[0]}"
        ) from error
    if len(set(said)) == 1:
        return
    rows = "".join(f"\n  rank {_ranks(said, one)}: {one}" for one in dict.fromkeys(said))
    raise ContextError(f"{what}: the ranks do not agree{rows}")


def _ranks(said: list[Any], one: Any) -> str:
    return ", ".join(str(rank) for rank, other in enumerate(said) if other == one)
