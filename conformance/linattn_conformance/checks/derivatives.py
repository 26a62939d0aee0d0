"""Forward-mode and second derivatives against the truth of outputs and of gradients.

Outputs are linear in values and states together, and so are the gradients of all other inputs: along that direction each is its
own derivative, so that its truth is known without a second derivative of the oracle.
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

__all__ = ["compare_second", "compare_tangents", "direction"]

Derivative = Callable[[], Mapping[str, Any]]


def direction(run: Run) -> dict[str, NDArray[Any]]:
    """The values and states of a case, without sums of keys, and zeros for its other float arrays."""
    values = {name: run.values[name] for name in run.problem.floats}
    return {name: np.where(signs(run, name, x) < 0, x, 0.0) for name, x in values.items()}


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


def compare_second(run: Run, derivative: Derivative, forward: bool) -> None:
    """Derivatives of the gradients are the gradients, of all that is no value and no state; ``forward`` if they are tangents.

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
    wanted = {name: want for name, want in run.true_gradients.items() if not is_value(run, name)}
    run.compare({name: found[name] for name in wanted}, wanted, prefix="the derivative of the gradient of ")


def must_refuse(derivative: Derivative, what: str) -> None:
    """What a backend declares that it has not it must not return."""
    try:
        derivative()
    except Exception:
        return
    raise Failure(f"declares that it has no {what}, and returns some")
