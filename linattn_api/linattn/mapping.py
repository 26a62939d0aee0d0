"""Feature maps of queries and keys, before a call: made by a backend that has a way of its own, or as they are written."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from .errors import BackendError
from .feature_maps import FeatureMap
from .frameworks import Framework
from .planning import candidates
from .plugin import Backend
from .preference import ENVIRONMENT_VARIABLE, Preference, context, preference_of
from .registry import registry

__all__ = ["features", "made_by"]


def features(phi: FeatureMap, x: Any, framework: Framework, backend: str | Sequence[str] | None) -> Any:
    """``phi(x)``, of the first backend among those that the call may run on that makes it itself.

    Compilers fuse what a map is written in, so a call that is traced takes that.
    """
    made = None if framework.tracing() else next((made for _, made in _made(phi, x, framework, backend)), None)
    return phi(x) if made is None else made


def made_by(phi: FeatureMap, x: Any, framework: Framework, backend: str | Sequence[str] | None) -> str | None:
    """The name of that backend; ``None`` if the map is made as it is written."""
    return next((name for name, _ in _made(phi, x, framework, backend)), None)


def _made(
    phi: FeatureMap, x: Any, framework: Framework, backend: str | Sequence[str] | None
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    wanted = preference_of(backend, context.get(), os.environ.get(ENVIRONMENT_VARIABLE))
    for maker in _makers(type(phi).__name__, framework.name, wanted, registry.generation):
        made = maker.features(phi, x)
        if made is not None:
            yield maker.name, made


@functools.lru_cache(maxsize=64)
def _makers(phi: str, framework: str, wanted: Preference, generation: int) -> tuple[Backend, ...]:
    """The backends that say they make a map, in the order of the call's preference; ``generation`` is the registry's."""
    kinds: dict[str, Any] = {kind.name: kind for kind in registry.built_in} | registry.loaded
    names = [name for name in candidates(framework, wanted) if name in kinds and phi in kinds[name].maps]
    return tuple(_usable(name for name in names if framework in kinds[name].frameworks))


def _usable(names: Iterable[str]) -> Iterator[Backend]:
    for name in names:
        with suppress(BackendError):  # the call itself says what is wrong with it
            yield registry.load(name)
