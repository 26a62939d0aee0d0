"""Feature maps: what is applied to queries and keys before the recurrence.

Each map is written once against the caller's array framework and is differentiable in its input. Use one by name,
``linattn.gla(..., feature_map="elu1")``, or as an object, ``feature_map=feature_maps.Exp(t=2.0)``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError
from ..frameworks import framework_of

__all__ = ["MAPS", "Elu1", "Exp", "FeatureMap", "Identity", "Relu", "Relu2", "resolve"]


class FeatureMap:
    """Base class of feature maps: ``map(x)`` turns ``[…, K]`` into ``[…, K']``."""

    def __call__(self, x: Any) -> Any:
        """Features of ``x``, an array ``[…, K]`` of any framework; same dtype and device."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


@dataclass(frozen=True)
class Identity(FeatureMap):
    """``φ(x) = x`` (Sun et al. 2023)."""

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
        xp = framework_of(x, "x")
        return xp.where(x < 0, xp.zeros_like(x), x)


@dataclass(frozen=True)
class Relu2(FeatureMap):
    """``φ(x) = max(x, 0)²`` (So et al. 2021)."""

    def __call__(self, x: Any) -> Any:
        rectified = Relu()(x)
        return rectified * rectified


@dataclass(frozen=True)
class Exp(FeatureMap):
    """``φ(x) = exp(t · x)`` elementwise (Zhang et al. 2024, §3.2).

    Args:
        t: Temperature; larger is spikier. Default 1.
    """

    t: float = 1.0

    def __call__(self, x: Any) -> Any:
        return framework_of(x, "x").exp(self.t * x)


MAPS: dict[str, Callable[[], FeatureMap]] = {
    "identity": Identity,
    "elu1": Elu1,
    "relu": Relu,
    "relu2": Relu2,
    "exp": Exp,
}


def resolve(feature_map: str | FeatureMap) -> FeatureMap:
    """The map of that name, or the object itself.

    Raises:
        OptionError: No map has this name (close matches are named), or the object is no feature map.
    """
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if not isinstance(feature_map, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may ignore types
        raise OptionError(f"feature_map must be a name or a linattn.feature_maps.FeatureMap, got {type(feature_map).__name__}")
    if feature_map not in MAPS:
        close = difflib.get_close_matches(feature_map, MAPS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise OptionError(f"unknown feature map {feature_map!r}: {hint}known are {', '.join(MAPS)}")
    return MAPS[feature_map]()
