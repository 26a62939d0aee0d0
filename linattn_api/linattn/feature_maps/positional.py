"""A map that depends on the position of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import numpy as np

from ..errors import ShapeError
from ..frameworks import Framework
from .base import Wide, check_fit, check_whole, rectified

__all__ = ["Cosformer"]


@dataclass(frozen=True, eq=False)
class Cosformer(Wide):
    """``φ(x_t) = [relu(x_t) cos(πt/2M), relu(x_t) sin(πt/2M)]``; width ``2K`` (Qin et al. 2022, eq. 10).

    ``φ(q_i)·φ(k_j) = relu(q_i)·relu(k_j) cos(π(i − j)/2M)``: only distances count. So packed sequences need no positions of
    their own, and a sequence that goes on from a state needs ``start``.

    Args:
        M: The largest distance; weights between tokens further apart than ``M`` are negative, of which a normalised call
            with so many tokens warns.
        start: Position of the first token: an int, or integers of the caller's framework, ``[]`` or one for each row ``[B]``
            (whose values no warning takes into account). Default 0.
    """

    M: int
    start: Any = 0

    def __post_init__(self) -> None:
        check_whole("cosformer", M=self.M)

    def signed_within(self, T: int) -> bool:
        return T - 1 + (int(self.start) if isinstance(self.start, Integral) else 0) > self.M

    def features_of(self, xp: Framework, x: Any) -> Any:
        if len(x.shape) < 3:
            raise ShapeError(f"cosformer: x must be [..., T, H, K], got {list(x.shape)}")
        angle = (xp.arange(x.shape[-3], like=x)[:, None, None] + self._start(xp, x)) * (math.pi / (2 * self.M))
        r = rectified(xp, x)
        return xp.concat([r * xp.cos(angle), r * xp.sin(angle)], axis=-1)

    def _start(self, xp: Framework, x: Any) -> Any:
        start = self.start
        if isinstance(start, (int, np.integer)):  # a symbolic int, under torch.compile, is one
            return cast(Any, start)
        rows = tuple(x.shape[-4:-3]) if len(getattr(start, "shape", ())) else ()
        check_fit(xp, x, "cosformer", "start", start, "B" if rows else "", rows)
        start = xp.astype(start, xp.dtype(x))
        return start[:, None, None, None] if rows else start
