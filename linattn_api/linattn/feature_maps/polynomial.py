"""Fixed maps that multiply the entries of ``x`` with one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from ..frameworks import Framework
from .base import Wide, check_whole, outer, rectified

__all__ = ["Dpfp", "Taylor2"]


@dataclass(frozen=True)
class Taylor2(Wide):
    """``φ(x) = [1, y, vec(y yᵀ)/√2]`` with ``y = K^{-1/4} x``: width ``1 + K + K²`` (Zhang et al. 2024, §4.1; Keles et al.
    2023).

    ``φ(q)·φ(k) = 1 + s + s²/2`` is the expansion of ``exp(s)`` to second order, ``s = q·k/√K``. It is at least ½.
    """

    def features_of(self, xp: Framework, x: Any) -> Any:
        y = x * x.shape[-1] ** -0.25
        one = xp.full((*x.shape[:-1], 1), 1.0, like=x)
        return xp.concat([one, y, outer(y) * 0.5**0.5], axis=-1)


@dataclass(frozen=True)
class Dpfp(Wide):
    """Deterministic parameter-free projection: ``r ∘ roll(r, j)`` for ``j = 1 … ν``, ``r = relu([x, −x])``; width ``2Kν``
    (Schlag et al. 2021, eqs. 37 and 38).

    Args:
        nu: How many rolls. Default 1.

    Raises:
        OptionError: ``nu`` is not in ``1 … 2K−1``: the rolls repeat after that.
    """

    nu: int = 1

    def __post_init__(self) -> None:
        check_whole("dpfp", nu=self.nu)

    def features_of(self, xp: Framework, x: Any) -> Any:
        if self.nu >= 2 * x.shape[-1]:
            raise OptionError(f"dpfp: nu must be in 1 … 2K-1 = {2 * x.shape[-1] - 1}, got {self.nu}")
        r = rectified(xp, xp.concat([x, -x], axis=-1))
        rolled = [xp.concat([r[..., -j:], r[..., :-j]], axis=-1) for j in range(1, self.nu + 1)]
        return xp.concat([r * other for other in rolled], axis=-1)
