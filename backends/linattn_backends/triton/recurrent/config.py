"""Which kernel runs the recurrence, and with which tile."""

from __future__ import annotations

import functools

from ...chunks import power_of_two
from ..host.tiles import Tile, fit
from ..host.variant import Stage, Variant
from .kernels import recurrent_tokens_fwd

__all__ = ["variant"]


@functools.lru_cache(maxsize=1024)
def variant(K: int, V: int, wide: bool) -> Variant:
    """One kernel with all ``K`` rows of a state. ``wide`` is for one token, a matter of bandwidth, and for ``dplr``, whose
    vectors more columns share; else warps that need not wait win.
    """
    rows = max(power_of_two(K), 16)
    columns = min(fit(V, 64), max(16, (8192 if wide else 4096) // rows))
    return Variant({"tokens": Stage(recurrent_tokens_fwd, Tile(rows, columns, 2 if rows * columns > 4096 else 1, 1))}, None)
