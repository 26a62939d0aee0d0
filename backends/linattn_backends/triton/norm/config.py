"""Which kernels the norm runs, and with which tiles: by shape, and nothing is tuned at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...chunks import power_of_two
from ..host.tiles import Tile
from ..host.variant import Stage, Variant
from ..lib.sums import column_sums
from .kernels import norm_gradients_bwd, norm_outputs_fwd

__all__ = ["NormTile", "variant", "walks_for"]


class NormTile(NamedTuple):
    """A program's ``R`` rows of ``BG`` columns, and its warps."""

    BG: int
    R: int
    warps: int
    stages: int = 1


@functools.lru_cache(maxsize=1024)
def variant(G: int, bytes_each: int, backward: bool) -> Variant:
    """The kernels of a forward or a backward pass over groups of ``G`` columns.

    A program has a whole group, sixteen numbers a thread; of narrow groups several rows, which need not wait for another warp.
    Backward, with few bytes each, a multiprocessor must have two programs' rows on their way: their registers are limited.
    """
    columns = power_of_two(G)
    rows = max(2048 // columns, 1)
    tile = NormTile(columns, rows, min(max(rows * columns // 512, 4), 16))
    if not backward:
        return Variant({"outputs": Stage(norm_outputs_fwd, tile)}, None)
    limit = dict(maxnreg=128) if bytes_each == 2 and columns <= 8192 else {}
    return Variant(
        {"gradients": Stage(norm_gradients_bwd, tile, limit), "sums": Stage(column_sums, Tile(32, 64, 4, 1))}, None
    )  # fmt: skip


def walks_for(blocks: int, groups: int, warps: int, num_sms: int) -> int:
    """How many programs share a group's blocks of rows: as many as run at once, with 16 warps or more a multiprocessor.

    One more of each group would wait for the others' end, and all for it.
    """
    return max(min(blocks, num_sms * max(16 // warps, 2) // groups), 1)
