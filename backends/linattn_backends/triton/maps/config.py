"""Which kernels map scalars, and with which tiles: by the number of heads, and nothing is tuned at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..host.tiles import fit
from ..host.variant import Stage, Variant
from .kernels import maps_scalars_bwd, maps_scalars_fwd

__all__ = ["ScalarTile", "variant"]


class ScalarTile(NamedTuple):
    """A program's ``R`` tokens of ``BH`` heads, and its warps."""

    R: int
    BH: int
    warps: int
    stages: int = 1


@functools.lru_cache(maxsize=1024)
def variant(heads: int, backward: bool) -> Variant:
    """The kernels of a forward or a backward pass: eight numbers a thread."""
    columns = fit(heads, 64, least=1)
    tile = ScalarTile(1024 // columns, columns, 4)
    return Variant({"scalars": Stage(maps_scalars_bwd if backward else maps_scalars_fwd, tile)}, None)
