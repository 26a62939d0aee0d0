"""Which kernels stand around the core of ``ssd``, and with which tiles: by the heads' width; nothing is tuned at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...chunks import power_of_two
from ..host.variant import Stage, Variant
from .kernels import ssd_inputs_bwd, ssd_inputs_fwd, ssd_outputs_bwd, ssd_outputs_fwd, ssd_steps_bwd, ssd_steps_fwd

__all__ = ["RowTile", "variant", "walks_for", "weights_have_slopes"]


class RowTile(NamedTuple):
    """A program's ``R`` rows of ``BV`` value channels, and its warps."""

    BV: int
    R: int
    warps: int
    stages: int = 1


class StepTile(NamedTuple):
    """A program's ``R`` tokens of ``BH`` heads, and its warps; of rows that are a token of a head, ``BH`` is one."""

    BH: int
    R: int
    warps: int
    stages: int = 1


@functools.lru_cache(maxsize=1024)
def variant(V: int, skip: int, gated: bool, backward: bool, weighted: bool = False) -> Variant:
    """The kernels of a forward or a backward pass over heads of ``V`` channels: sixteen numbers a thread.

    ``skip`` are the dimensions of ``D``. ``weighted`` is whether the core takes weights of values; then it takes a skip of
    a number a head, too, unless there is a gate after it.
    """
    columns = power_of_two(V)
    tile = RowTile(columns, max(2048 // columns, 1), 4)
    before, after = (ssd_inputs_bwd, ssd_outputs_bwd) if backward else (ssd_inputs_fwd, ssd_outputs_fwd)
    stages = {"inputs": Stage(before, tile)}
    if weighted:
        stages = {
            "steps": Stage(ssd_steps_bwd, StepTile(16, 64, 4)) if backward else Stage(ssd_steps_fwd, StepTile(1, 1024, 4))
        }
    if gated or (skip > weighted and not backward):
        stages["outputs"] = Stage(after, tile)
    return Variant(stages, None)


def weights_have_slopes(softplus: bool, most: float, skip: int) -> bool:
    """Whether gradients of weights say those of step sizes, for which each is divided by its weight.

    A softplus of zero has no slope either, so that it may be lost; an upper limit below zero makes all weights negative, which
    kernels do not divide by. And a ``D``, of ``skip`` dimensions, has one number a head.
    """
    return softplus and most >= 0 and skip < 2


def walks_for(blocks: int, heads: int, num_sms: int) -> int:
    """How many programs share a head's tokens: as many as run at once, with 32 warps a multiprocessor."""
    return max(min(blocks, -(-8 * num_sms // heads)), 1)
