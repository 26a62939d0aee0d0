"""Which kernels the normaliser runs, and with which tiles: by shape, and nothing is tuned at run time."""

from __future__ import annotations

import functools

import torch

from ..host.tiles import Tile, fit
from ..host.variant import Stage, Variant
from .kernels import (
    normalizer_carries,
    normalizer_gradients_bwd,
    normalizer_outputs_fwd,
    normalizer_quotients_bwd,
    normalizer_sums,
)

__all__ = ["CHUNK", "CHUNKS", "before_division", "operands", "variant"]

CHUNK = 64
"""Tokens whose sums one program makes."""
CHUNKS = 64
"""Chunks over which sums are carried at once."""


@functools.lru_cache(maxsize=1024)
def variant(K: int, V: int, backward: bool) -> Variant:
    """The kernels of a forward or a backward pass: bandwidth is all that counts, and registers that hold a tile."""
    keys, values = fit(K, 64), fit(V, 64)
    stages = dict(
        sums=Stage(normalizer_sums, Tile(keys, 0, 4, 1)), carries=Stage(normalizer_carries, Tile(fit(K, 32), 0, 4, 1))
    )
    if not backward:
        return Variant(stages | dict(outputs=Stage(normalizer_outputs_fwd, Tile(keys, values, 8, 1))), None)
    quotients = dict(quotients=Stage(normalizer_quotients_bwd, Tile(0, values, 4, 1)))
    return Variant(quotients | stages | dict(gradients=Stage(normalizer_gradients_bwd, Tile(keys, 0, 8, 1))), None)


def before_division(dtype: torch.dtype) -> torch.dtype:
    """The dtype of outputs that are still to be divided: float16 has not their range."""
    return torch.float32 if dtype == torch.float16 else dtype


def operands(dtype: torch.dtype, gated: bool, differentiated: bool) -> torch.dtype:
    """The dtype in which a call runs.

    float16 has not the range of gradients that are divided. Under a gate few keys may count, and then nearly all of a gradient
    cancels, to more than 16 bits.
    """
    return torch.float32 if differentiated and (gated or dtype == torch.float16) else dtype
