"""Which tile runs the recurrence."""

from __future__ import annotations

import functools

from ..host.tiles import Tile, fit, power_of_two


@functools.cache
def recurrent_tile(K: int, V: int, wide: bool) -> Tile:
    """All ``K`` rows of a state. ``wide`` for one token, a matter of bandwidth, and for ``dplr``, whose vectors more columns
    share; else warps that need not wait win.
    """
    rows = max(power_of_two(K), 16)
    columns = min(fit(V, 64), max(16, (8192 if wide else 4096) // rows))
    return Tile(rows, columns, 2 if rows * columns > 4096 else 1, 1)
