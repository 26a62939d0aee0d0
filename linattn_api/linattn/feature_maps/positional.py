"""A map that depends on the position of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar, Self, cast

import numpy as np

from ..errors import ShapeError
from ..frameworks import Framework
from .base import Wide, check_fit, check_whole, rectified

__all__ = ["Cosformer"]


@dataclass(frozen=True, eq=False)
class Cosformer(Wide):
    """``φ(x_t) = [relu(x_t) cos(πt/2M), relu(x_t) sin(πt/2M)]``; width ``2K`` (Qin et al. 2022, eq. 10).

    ``φ(q_i)·φ(k_j) = relu(q_i)·relu(k_j) cos(π(i − j)/2M)``: only distances count. So packed sequences need no positions of
    their own, and a sequence that goes on from a state needs ``start``; packed ones that do need ``positions``.

    Args:
        M: The largest distance; weights between tokens further apart than ``M`` are negative, of which a normalised call
            with so many tokens, ``start`` among them, warns.
        start: Position of the first token: an int, or integers of the caller's framework, ``[]`` or one for each row ``[B]``
            (whose values no warning takes into account). Default 0.
        positions: Of each token, counted from ``start``: integers of the caller's framework, ``[B, T]``, or ``[1, T]`` for all
            rows. Default ``0 … T−1``.
    """

    positional: ClassVar[bool] = True
    axes: ClassVar[Mapping[str, str]] = {"start": "B", "positions": "B T"}

    M: int
    start: Any = 0
    positions: Any = None

    def __post_init__(self) -> None:
        check_whole("cosformer", M=self.M)

    def at(self, positions: Any) -> Self:
        return replace(self, positions=positions)

    def signed_within(self, T: int) -> bool:
        return T - 1 + (int(self.start) if isinstance(self.start, Integral) else 0) > self.M

    def features_of(self, xp: Framework, x: Any) -> Any:
        if len(x.shape) < 3:
            raise ShapeError(f"cosformer: x must be [..., T, H, K], got {list(x.shape)}")
        angle = (self._positions(xp, x) + self._start(xp, x)) * (math.pi / (2 * self.M))
        r = rectified(xp, x)
        return xp.concat([r * xp.cos(angle), r * xp.sin(angle)], axis=-1)

    def _positions(self, xp: Framework, x: Any) -> Any:
        T, positions = x.shape[-3], self.positions
        if positions is None:
            return xp.arange(T, like=x)[:, None, None]
        shared = len(x.shape) == 3 or tuple(getattr(positions, "shape", ()))[:1] == (1,)
        check_fit(xp, x, "cosformer", "positions", positions, "B T", (1 if shared else x.shape[-4], T))
        positions = xp.astype(positions, xp.dtype(x))[:, :, None, None]
        return positions[0] if shared else positions

    def _start(self, xp: Framework, x: Any) -> Any:
        start = self.start
        if isinstance(start, (int, np.integer)):  # a symbolic int, under torch.compile, is one
            return cast(Any, start)
        rows = tuple(x.shape[-4:-3]) if len(getattr(start, "shape", ())) else ()
        check_fit(xp, x, "cosformer", "start", start, "B" if rows else "", rows)
        start = xp.astype(start, xp.dtype(x))
        return start[:, None, None, None] if rows else start
