"""The launch that zeroes what lies behind the last packed sequence, and how many programs share that."""

from __future__ import annotations

import math

from torch import Tensor

from ..lib.tails import zero_tails
from ..runtime.device import properties
from ..runtime.launch import Launched, launch

__all__ = ["BLOCK", "zero_behind", "zeroing"]

MOST, BLOCK = 6, 1024


def zeroing(call: Launched, T: int, width: int) -> int:
    """Programs that zero up to ``T`` rows of ``width`` numbers."""
    return min(-(-T * width // BLOCK), 4 * properties(call.v.device).num_sms)


def zero_behind(call: Launched, cu: Tensor | None, *arrays: Tensor | None) -> None:
    """Zero the rows of ``arrays [1, T, …]``, dense, that belong to none of the sequences ``cu``; of whole rows, all do."""
    given = [x for x in arrays if x is not None]
    if cu is None or not given:
        return
    T, widths = given[0].shape[1], [math.prod(x.shape[2:]) for x in given]
    none = MOST - len(given)
    launch(
        zero_tails, zeroing(call, T, max(widths)), call,
        *given, *[None] * none, cu, T, cu.shape[0] - 1, *widths, *[0] * none, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
