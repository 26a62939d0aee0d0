"""Runs ``summary_*``: what a span of tokens does to the state, ``S_out = A ∘ S_in + b``.

A backend with a method ``summary_{family}`` makes both. For any other they are read off the final state of its chunk form, on
values with a few columns more (:mod:`linattn.ops._summary`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import dispatch
from .feature_maps import FeatureMap
from .ops._summary import widen
from .spec import OpSpec

__all__ = ["run"]


def run(
    spec: OpSpec,
    form: str,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | FeatureMap | None,
    backend: str | Sequence[str] | None,
) -> tuple[Any, Any]:
    """Run one call and return ``(A, b)``; arguments as those of :func:`linattn.dispatch.run`."""
    function, rewriting, xp, arrays, keywords = dispatch.resolve(spec, form, arrays, keywords, feature_map, backend)
    if rewriting is None:
        return function(*arrays, **keywords)
    if rewriting.form == form:
        return dispatch.run_rewritten(function, rewriting, xp, arrays, keywords)
    named = {arg.name: x for arg, x in zip(spec.args, arrays, strict=True)}
    wider = widen(xp, spec.name, named, keywords)
    given = tuple([wider.arrays.get(name) for name in rewriting.given])
    _, state = dispatch.run_rewritten(function, rewriting, xp, given, wider.options)
    return wider.read(state)
