"""Feature maps of queries and keys, before a call: made by a backend that has a way of its own, or as they are written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from . import preference
from .errors import BackendError
from .feature_maps import FeatureMap
from .frameworks import Framework
from .plugin import Backend
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
    for maker in _makers(type(phi).__name__, framework.name, backend):
        made = maker.features(phi, x)
        if made is not None:
            yield maker.name, made


def _makers(phi: str, framework: str, backend: str | Sequence[str] | None) -> tuple[Backend, ...]:
    """The backends that say they make a map, in the order of the call's preference."""
    context = preference.context.get()
    environment = os.environ.get(preference.ENVIRONMENT_VARIABLE) if backend is None and context is None else None
    wanted = preference.preference_of(backend, context, environment).backends
    key = phi, framework, wanted, registry.generation
    if key not in _known:
        _known.clear()  # of another generation, or of a handful of maps and preferences
        _known[key] = tuple(_looked_up(phi, framework, wanted))
    return _known[key]


_known: dict[tuple[Any, ...], tuple[Backend, ...]] = {}


def _looked_up(phi: str, framework: str, wanted: Sequence[str]) -> Iterator[Backend]:
    kinds: dict[str, Any] = {kind.name: kind for kind in registry.built_in} | registry.loaded
    for one in wanted:
        for name in registry.order(framework) if one == "auto" else (one,):
            kind = kinds.get(name)
            if kind is None or phi not in kind.maps or framework not in kind.frameworks:
                continue
            try:
                yield registry.load(name)
            except BackendError:  # the call itself says what is wrong with it
                continue
