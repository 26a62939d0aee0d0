"""Which kernels the map runs, and with which tiles: by shape, and nothing is tuned at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..host.tiles import Tile, fit
from ..host.variant import Stage, Variant
from ..lib.sums import column_sums
from .kernels import features_bwd, features_fwd

__all__ = ["WIDEST", "FeatureTile", "variant", "walks_for"]

WIDEST = 128
"""The widest head, and the widest projection, whose weights a program has room for."""


class FeatureTile(NamedTuple):
    """A program's ``R`` rows, its ``BK`` channels and ``BD`` features, and its warps."""

    R: int
    BK: int
    BD: int
    warps: int
    stages: int = 1


@functools.lru_cache(maxsize=1024)
def variant(K: int, D: int, softmax: bool, backward: bool) -> Variant:
    """The kernels of a forward or a backward pass: a head's weights stay with a program.

    Backward, softmax has twice as many numbers of a row at a time, and wide heads have larger weights: half as many rows.
    """
    BK, BD = fit(K, WIDEST), fit(D, WIDEST)
    if not backward:
        return Variant({"features": Stage(features_fwd, FeatureTile(64, BK, BD, 4))}, None)
    wide = BK * BD > 4096
    tile = FeatureTile(32 if softmax or wide else 64, BK, BD, 8 if wide else 4)
    return Variant({"features": Stage(features_bwd, tile), "sums": Stage(column_sums, Tile(32, 64, 4, 1))}, None)


def walks_for(blocks: int, heads: int, num_sms: int) -> int:
    """How many programs share a head's blocks of rows: two a multiprocessor."""
    return max(min(blocks, -(-2 * num_sms // heads)), 1)
