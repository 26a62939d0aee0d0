"""``mx.compile``, around a gradient too, and ``mx.vmap`` on one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from ..calls import Run

__all__ = ["TRANSFORMS"]

Arrays = dict[str, Any]


def function_of(run: Run) -> Callable[[Arrays], Arrays]:
    """The call, from arrays by name to outputs by name; unlike ``run.call`` it can be traced."""
    from ..bounds import structured
    from ..calls import outputs_of

    function = run.function()
    static = {**run.problem.options, "backend": run.backend.name}

    def call(arrays: Arrays) -> Arrays:
        return outputs_of(run.case, function(**structured(arrays), **static))

    return call


def compiled(run: Run) -> None:
    """One compiled function of outputs and, if there are any, gradients; a second call with other values runs the same one."""
    call, arrays = function_of(run), run.arrays()
    cotangents = {} if run.declares_no_gradient(arrays) else run.cotangents()

    def both(arrays: Arrays) -> tuple[Arrays, Arrays]:
        def wanted(*floats: Any) -> list[Any]:
            outputs = call({**arrays, **dict(zip(run.problem.floats, floats, strict=True))})
            return [outputs[name] for name in cotangents]

        if not cotangents:
            return call(arrays), {}
        _, found = mx.vjp(wanted, [arrays[name] for name in run.problem.floats], list(cotangents.values()))
        return call(arrays), dict(zip(run.problem.floats, found, strict=True))

    function = mx.compile(both)
    function({name: mx.zeros_like(x) if name.startswith("initial_state") else x for name, x in arrays.items()})
    outputs, gradients = function(arrays)
    run.compare(outputs, run.truth.outputs)
    run.compare(gradients, run.true_gradients if cotangents else {})


def vmapped(run: Run) -> None:
    """Two calls as one: the second has the rows of the batch in reverse order."""
    rows = {name: symbols[0] in ("B", "N") for name, symbols in run.problem.symbols.items()}
    stacked = {name: mx.stack([x, x[::-1] if rows[name] else x]) for name, x in run.arrays().items()}
    outputs = mx.vmap(function_of(run))(stacked)
    run.compare({name: x[0] for name, x in outputs.items()}, run.truth.outputs)
    run.compare({name: x[1][::-1] for name, x in outputs.items()}, run.truth.outputs)


TRANSFORMS: dict[str, Callable[[Any], None]] = {"compile": compiled, "vmap": vmapped}
