"""The few places where JAX versions differ, or may."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu


def compiler_params(*dimension_semantics: str) -> Any:
    """How the grid's axes may be run."""
    return pltpu.CompilerParams(dimension_semantics=dimension_semantics)


def out_shape(shape: tuple[int, ...], dtype: Any, *inputs: Any) -> jax.ShapeDtypeStruct:
    """Of an output of a kernel, marked as differing between the devices of a ``shard_map`` wherever an input does."""
    marks = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=marks))
