"""The few places where JAX versions differ, or may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu
from linattn.plugin import has_tangents


def compiler_params(*dimension_semantics: str) -> Any:
    """How the grid's axes may be run."""
    return pltpu.CompilerParams(dimension_semantics=dimension_semantics)


def alike(tree: Any) -> Any:
    """The arrays of a tree, each marked as differing between the devices of a ``shard_map`` along every axis that any of them
    differs along: a kernel's operands must agree, and so must gradients and what they are of."""
    axes = _varying(jax.tree.leaves(tree))

    def promoted(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying([x])))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(promoted, tree)


def _varying(arrays: list[Any]) -> frozenset[str]:
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def refuse_forward_mode(backend: str, arrays: Iterable[Any]) -> None:
    """An error for arrays that ``jax.jvp`` is pushing tangents along with: a kernel has a gradient and nothing else.

    Where they went into ``jit`` first they do not show it, and JAX refuses in its own words.
    """
    if has_tangents(arrays):
        raise NotImplementedError(
            f"the {backend} backend has no forward-mode derivatives: pass backend='jax' for jvp and jacfwd"
        )


def out_shape(shape: tuple[int, ...], dtype: Any, *inputs: Any) -> jax.ShapeDtypeStruct:
    """Of an output of a kernel, marked as differing between the devices of a ``shard_map`` wherever an input does."""
    marks = jax.sharding.ManualAxisType(varying=_varying(list(inputs)))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=marks)
