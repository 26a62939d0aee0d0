"""Maps that act on each number by itself and have nothing to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..frameworks import Framework, framework_of
from .base import FeatureMap, Wide, power, rectified

__all__ = ["Elu1", "Exp", "Identity", "Relu", "Relu2"]


@dataclass(frozen=True)
class Identity(FeatureMap):
    """``φ(x) = x`` (Sun et al. 2023)."""

    signed: ClassVar[bool] = True

    def __call__(self, x: Any) -> Any:
        return x


@dataclass(frozen=True)
class Elu1(FeatureMap):
    """``φ(x) = elu(x) + 1`` (Katharopoulos et al. 2020, eq. 7): ``x + 1`` above zero, ``e^x`` below."""

    def __call__(self, x: Any) -> Any:
        xp = framework_of(x, "x")
        positive = x > 0
        # exp sees no large x, so that its gradient is not inf * 0 in the branch that where drops
        return xp.where(positive, x + 1, xp.exp(xp.where(positive, xp.zeros_like(x), x)))


@dataclass(frozen=True)
class Relu(FeatureMap):
    """``φ(x) = max(x, 0)`` (Kasai et al. 2021)."""

    def __call__(self, x: Any) -> Any:
        return rectified(framework_of(x, "x"), x)


@dataclass(frozen=True)
class Relu2(FeatureMap):
    """``φ(x) = max(x, 0)²`` (So et al. 2021)."""

    def __call__(self, x: Any) -> Any:
        positive = rectified(framework_of(x, "x"), x)
        return positive * positive


@dataclass(frozen=True)
class Exp(Wide):
    """``φ(x) = exp(t · x)`` elementwise (Zhang et al. 2024, §3.2), ``t · x`` held within ±35.

    Args:
        t: Temperature; larger is spikier. Default 1.
    """

    t: float = 1.0

    def features_of(self, xp: Framework, x: Any) -> Any:
        return power(xp, self.t * x)
