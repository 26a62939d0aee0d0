"""``jax.jit``, its gradient, ``jax.vmap``, ``jax.eval_shape`` and derivatives of derivatives on one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..checks.derivatives import compare_second, compare_tangents, direction, directions, values_of

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


def jitted(run: Run) -> None:
    """One compiled program; a second call with other values runs the same one."""
    call, arrays = jax.jit(function_of(run)), run.arrays()
    call({name: jnp.zeros_like(x) if name.startswith("initial_state") else x for name, x in arrays.items()})
    run.compare(call(arrays), run.truth.outputs)


def jitted_gradient(run: Run) -> None:
    """``jax.jit`` of ``jax.grad`` of a scalar."""
    arrays, cotangents, call = run.arrays(), run.cotangents(), function_of(run)
    floats = {name: arrays[name] for name in run.problem.floats}
    others = {name: x for name, x in arrays.items() if name not in floats}

    def loss(floats: Arrays, others: Arrays) -> Any:
        outputs = call({**floats, **others})
        return sum((outputs[name].astype(float) * x.astype(float)).sum() for name, x in cotangents.items())

    run.compare(jax.jit(jax.grad(loss))(floats, others), run.true_gradients)


def vmapped(run: Run) -> None:
    """Two calls as one: the second has the rows of the batch in reverse order."""
    rows = {name: symbols[0] in ("B", "N") for name, symbols in run.problem.symbols.items()}
    stacked = {name: jnp.stack([x, jnp.flip(x, 0) if rows[name] else x]) for name, x in run.arrays().items()}
    outputs = jax.vmap(function_of(run))(stacked)
    run.compare({name: x[0] for name, x in outputs.items()}, run.truth.outputs)
    run.compare({name: jnp.flip(x[1], 0) for name, x in outputs.items()}, run.truth.outputs)


def shapes(run: Run) -> None:
    """Shapes and dtypes without data."""
    outputs = jax.eval_shape(function_of(run), run.arrays())
    for name, quantity in run.truth.outputs.items():
        empty = jax.device_put(jnp.zeros(outputs[name].shape, outputs[name].dtype), run.adapter.place)
        run.check_kind(name, empty, quantity)


def moving(run: Run, along: tuple[str, ...]) -> tuple[Arrays, Arrays, Arrays]:
    """Float arrays, the direction of some of them, and the other arrays."""
    arrays, moved = run.compact(), direction(run, along)
    floats = {name: arrays[name] for name in run.problem.floats}
    others = {name: x for name, x in arrays.items() if name not in floats}
    return floats, {name: jnp.asarray(moved[name], x.dtype) for name, x in floats.items()}, others


def tangents(run: Run) -> None:
    """``jax.jvp``."""
    floats, moved, others = moving(run, values_of(run))

    def call(floats: Arrays) -> Arrays:
        return {name: x for name, x in run.outputs({**floats, **others}).items() if jnp.issubdtype(x.dtype, jnp.floating)}

    compare_tangents(run, lambda: jax.jvp(call, (floats,), (moved,))[1])


def twice(run: Run) -> None:
    """Second derivatives along each direction whose truth is known."""
    for along in directions(run):
        twice_along(run, along)


def twice_along(run: Run, along: tuple[str, ...]) -> None:
    """The tangents of gradients, and the gradient of a product with gradients."""
    floats, moved, others = moving(run, along)
    cotangents = run.cotangents()

    def loss(floats: Arrays) -> Any:
        outputs = run.outputs({**floats, **others})
        return sum((outputs[name].astype(float) * x.astype(float)).sum() for name, x in cotangents.items())

    def product(floats: Arrays) -> Any:
        found = jax.grad(loss)(floats)
        return sum((found[name].astype(float) * moved[name].astype(float)).sum() for name in floats)

    compare_second(run, along, lambda: jax.jvp(jax.grad(loss), (floats,), (moved,))[1], forward=True)
    compare_second(run, along, lambda: jax.grad(product)(floats), forward=False)


TRANSFORMS: dict[str, Callable[[Any], None]] = {
    "jit": jitted,
    "jit-gradient": jitted_gradient,
    "vmap": vmapped,
    "eval-shape": shapes,
    "jvp": tangents,
    "second": twice,
}
