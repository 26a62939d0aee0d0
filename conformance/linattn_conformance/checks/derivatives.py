"""Forward-mode and second derivatives against the truth of outputs and of gradients.

Outputs are linear in values and states together, and so are the gradients of all other inputs: along that direction each is its
own derivative, so that its truth is known without a second derivative of the oracle. Of many calls the same is true of queries,
and of keys and states together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from linattn.errors import BackendError
from numpy.typing import NDArray

from ..bounds import distance
from ..calls import Failure, Run
from .values import is_value, signs

__all__ = ["compare_second", "compare_tangents", "direction", "directions", "values_of"]

Derivative = Callable[[], Mapping[str, Any]]
Names = tuple[str, ...]

QUERIES, KEYS = ("q", "C"), ("k", "B")
"""Arrays that play these parts, whatever an operator calls them."""
AFFINE = ("D", "qk_norm.l2", "normalize")
"""Flags of calls that are linear in neither: something is added to what comes of them, or they are divided by their length."""
REWRITING = ("delta_rule", "gated_delta_rule", "kda")
"""Families whose keys also take away from the state."""


def values_of(run: Run) -> Names:
    """The values and states of a case."""
    return tuple(name for name in run.problem.floats if is_value(run, name))


def directions(run: Run) -> list[Names]:
    """The arrays of each direction that gradients of all others are linear in."""
    values, queries, keys = values_of(run), of(run, *QUERIES), of(run, *KEYS)
    flags = {*run.case.flags}
    if flags.intersection(AFFINE) or any(flag.startswith("phi.") for flag in flags):
        return [values]
    found = [values]
    if queries and ("loss.o" in flags or not flags & {"state", "final"}):  # a final state holds none
        found.append(queries)
    if keys and run.case.op not in REWRITING:
        found.append(keys + of(run, "initial_state"))
    return found


def of(run: Run, *names: str) -> Names:
    """Those of these arrays that a case has and that can have a gradient."""
    return tuple(name for name in names if name in run.problem.floats)


def direction(run: Run, along: Names) -> dict[str, NDArray[Any]]:
    """Some arrays of a case, without sums of keys, and zeros for its other float arrays."""
    return {name: moved(run, name) if name in along else np.zeros_like(run.values[name]) for name in run.problem.floats}


def moved(run: Run, name: str) -> NDArray[Any]:
    """An array, or of a state what is a sum of values."""
    x = run.values[name]
    return np.where(signs(run, name, x) < 0, x, 0.0) if is_value(run, name) else x


def compare_tangents(run: Run, derivative: Derivative) -> None:
    """Tangents of the outputs are the outputs."""
    if not run.backend.forward_mode:
        must_refuse(derivative, "forward-mode derivatives")
        return
    found = derivative()
    for name, want in run.truth.outputs.items():
        if name == "o" or is_value(run, name):
            run.check_kind(name, found[name], want)
            sums = run.problem.options.get("normalize") and name != "o"
            rows = (..., slice(None, -1)) if sums else ...
            run.note(f"the tangent of {name}", distance(run.adapter.to_float64(found[name])[rows], want, rows))


def compare_second(run: Run, along: Names, derivative: Derivative, forward: bool) -> None:
    """Derivatives of the gradients are the gradients, of all but those it is ``along``; ``forward`` if they are tangents.

    A backend may refuse a gradient of a gradient, and tangents if it declares so; it may not return something else.
    """
    if forward and not run.backend.forward_mode:
        must_refuse(derivative, "forward-mode derivatives")
        return
    try:
        found = derivative()
    except (RuntimeError, TypeError, NotImplementedError, BackendError):
        if forward:
            raise
        return
    wanted = {name: want for name, want in run.true_gradients.items() if name not in along}
    prefix = f"the derivative along {' and '.join(along)} of the gradient of "
    run.compare({name: found[name] for name in wanted}, wanted, prefix=prefix)


def must_refuse(derivative: Derivative, what: str) -> None:
    """What a backend declares that it has not it must not return."""
    try:
        derivative()
    except Exception:
        return
    raise Failure(f"declares that it has no {what}, and returns some")
