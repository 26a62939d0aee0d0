"""A kernel's tile, and how many of them cover a head."""

from __future__ import annotations

from typing import NamedTuple

from ...chunks import power_of_two


class Tile(NamedTuple):
    """Tile of one kernel: ``BK`` key and ``BV`` value channels, warps, and stages of the software pipeline."""

    BK: int
    BV: int
    warps: int
    stages: int


def programs(K: int, V: int, BK: int, BV: int) -> int:
    """Tiles of ``BK`` by ``BV`` that cover ``K`` by ``V``."""
    return -(-K // BK) * -(-V // BV)


def fit(n: int, most: int, least: int = 16) -> int:
    """A tile's width for ``n`` channels: a power of two, ``least`` … ``most``."""
    return min(max(power_of_two(n), least), most)
