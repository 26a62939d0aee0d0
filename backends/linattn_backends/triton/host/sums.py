"""The launch that adds up what programs left of two gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..lib.sums import column_sums
from ..runtime.launch import Launched, launch
from .tiles import programs

__all__ = ["sums_of_parts"]

ROWS, COLUMNS = 32, 64


def sums_of_parts(call: Launched, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Both sums over the first axis of a dense float32 array ``[programs, 2, …]``."""
    width = math.prod(parts.shape[2:])
    first, second = (torch.empty(parts.shape[2:], dtype=torch.float32, device=parts.device) for _ in range(2))
    launch(
        column_sums, 2 * programs(1, width, 1, COLUMNS), call,
        parts, first, second, parts.shape[0], width, ROWS=2, J=1, BP=ROWS, BD=COLUMNS, num_warps=4,
    )  # fmt: skip
    return first, second
