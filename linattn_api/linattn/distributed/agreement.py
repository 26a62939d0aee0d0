# pyright: basic
"""Ranks tell each other what they are about to do, over a CPU group, before they do it for the first time."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import ContextError

__all__ = ["agree", "rank_is_gone", "told_by_all"]


def agree(group: Any, what: str, mine: str) -> None:
    """Compare what each rank says; raise the same error on all of them if they differ.

    Args:
        group: A process group of CPU tensors.
        what: What is compared, for the message.
        mine: What this rank says.

    Raises:
        ContextError: They differ; names every rank and what it said. Or a rank did not answer within the group's timeout.
    """
    said = told_by_all(group, what, mine)
    if len(set(said)) > 1:
        raise _disagreement(what, said)


def told_by_all(group: Any, what: str, mine: Any) -> list[Any]:
    """What each rank says, who ask each other for the same.

    Args:
        group: A process group of CPU tensors.
        what: What is asked for, for the message.
        mine: What this rank says.

    Raises:
        ContextError: Another rank asks for something else. Or one did not answer within the group's timeout.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(found, (what, mine), group=group)
    except RuntimeError as error:
        if gone := rank_is_gone(what, group, error):
            raise gone from error
        raise
    if len({asked for asked, _ in found}) > 1:
        raise _disagreement(what, [f"{asked}: {said}" for asked, said in found])
    return [said for _, said in found]


def _disagreement(what: str, said: list[Any]) -> ContextError:
    rows = "".join(f"\n  rank {_ranks(said, one)}: {one}" for one in dict.fromkeys(said))
    return ContextError(f"{what}: the ranks do not agree{rows}")


GONE = ("timed out", "timeout", "connection closed", "connection re", "broken pipe", "remote error", "remote process")
"""What the transports of gloo and NCCL say, among other things, when a rank does not answer."""


def rank_is_gone(what: str, group: Any, error: BaseException) -> ContextError | None:
    """The error that says so, where that is what an error of a collective means; any other gets a note of the call."""
    waited = f"{what}: rank {dist.get_rank(group)} waited for the {dist.get_world_size(group)} ranks of its group"
    text = str(error)
    if any(sign in text.lower() for sign in GONE):
        return ContextError(f"{waited}, and one of them died or is late: {text.splitlines()[0]}")
    error.add_note(waited)
    return None


def _ranks(said: list[Any], one: Any) -> str:
    return ", ".join(str(rank) for rank, other in enumerate(said) if other == one)
