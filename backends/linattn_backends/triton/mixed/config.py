"""Which kernels run for ``mixed_attn``, and ``linear_attn`` with ``causal=False``, and with which tiles."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ...chunks import power_of_two
from ..host.tiles import Tile, fit
from ..host.variant import Stage, Variant
from .gradients import mixed_bias_bwd, mixed_keys_bwd, mixed_queries_bwd, mixed_values_bwd
from .outputs import mixed_outputs_fwd
from .states import mixed_states_fwd, mixed_sums_fwd
from .step import mixed_step_fwd

__all__ = ["MixedTile", "step_variant", "variant"]


class MixedTile(NamedTuple):
    """Tile of one kernel: ``BT`` tokens, ``BK`` channels of quadratic keys, ``BL`` of linear ones, ``BV`` of values; warps, and
    stages of the software pipeline.
    """

    BT: int
    BK: int
    BL: int
    BV: int
    warps: int
    stages: int


@functools.lru_cache(maxsize=1024)
def variant(K: int, L: int, V: int, dtype: torch.dtype, backward: bool) -> Variant:
    """The kernels of a forward or a backward pass with heads of these widths: ``K`` of quadratic ones, or 1, ``L`` of linear.

    Tiles are narrower in float32, whose products take more registers.
    """
    full = dtype == torch.float32
    least, most = (16, 32) if full else (64, 64)  # 16-bit tiles of 32 channels came out wrong on Hopper (Triton 3.6.0)
    stages = 1 if full and K > 128 else 2  # in 99 KB of shared memory
    widths = 32 if full or K > 128 else 64, max(power_of_two(K), least), fit(L, most, least), fit(V, most, least)
    tile = MixedTile(*widths, 4, stages)
    chosen = {
        "sums": Stage(mixed_sums_fwd, tile._replace(stages=2)),
        "states": Stage(mixed_states_fwd, Tile(1, 1024, 4, 3)),  # of a state, as one row
    }
    if not backward:
        return Variant(chosen | {"outputs": Stage(mixed_outputs_fwd, tile)}, None)
    gradients = {"queries": mixed_queries_bwd, "keys": mixed_keys_bwd, "values": mixed_values_bwd, "bias": mixed_bias_bwd}
    return Variant(chosen | {name: Stage(kernel, tile) for name, kernel in gradients.items()}, None)


@functools.lru_cache(maxsize=1024)
def step_variant(K: int, L: int, V: int) -> Variant:
    """The kernel that takes one token a sequence."""
    tile = MixedTile(32, max(power_of_two(K), 16), fit(L, 64), fit(V, 64), 4, 3)
    return Variant({"step": Stage(mixed_step_fwd, tile)}, None)
