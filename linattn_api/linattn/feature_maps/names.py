"""Maps by name."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from ..errors import OptionError
from ..suggestions import closest
from .base import FeatureMap
from .elementwise import Elu1, Exp, Identity, Relu, Relu2
from .learned import Hedgehog, Rebased, T2r
from .polynomial import Dpfp, Taylor2
from .positional import Cosformer
from .random_features import Performer, Rfa

__all__ = ["MAPS", "resolve"]

MAPS: dict[str, type[FeatureMap]] = {
    "identity": Identity,
    "elu1": Elu1,
    "relu": Relu,
    "relu2": Relu2,
    "exp": Exp,
    "taylor2": Taylor2,
    "hedgehog": Hedgehog,
    "t2r": T2r,
    "performer": Performer,
    "rfa": Rfa,
    "cosformer": Cosformer,
    "dpfp": Dpfp,
    "rebased": Rebased,
}
"""The class of every name."""


def _required(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.default is MISSING)


REQUIRED = {name: _required(cls) for name, cls in MAPS.items()}
"""What a map cannot do without: its name alone does not make it."""


def resolve(feature_map: str | FeatureMap) -> FeatureMap:
    """The map of that name with its defaults, or the object itself.

    Raises:
        OptionError: No map has this name (close matches are named), the map needs arguments, or the object is no feature map.
    """
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if not isinstance(feature_map, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may ignore types
        raise OptionError(f"feature_map must be a name or a linattn.feature_maps.FeatureMap, got {type(feature_map).__name__}")
    if feature_map not in MAPS:
        close = closest(feature_map, MAPS)
        hint = f"did you mean {close!r}? " if close else ""
        raise OptionError(f"unknown feature map {feature_map!r}: {hint}known are {', '.join(MAPS)}")
    if REQUIRED[feature_map]:
        name, arguments = MAPS[feature_map].__name__, ", ".join(REQUIRED[feature_map])
        raise OptionError(
            f"feature map {feature_map!r} needs {arguments}: pass the object linattn.feature_maps.{name}({arguments})"
        )
    return MAPS[feature_map]()
