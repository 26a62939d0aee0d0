# pyright: basic
"""What the layers for Flax and for Equinox share: initial values from a key, activations, and the cache as a pytree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .cache import Cache
from .expressions import Expressions

__all__ = ["Functions", "Values", "flat_names"]

Array = Any


class Functions(Expressions):
    """Activations, and what else layers compute with."""

    silu = staticmethod(jax.nn.silu)
    sigmoid = staticmethod(jax.nn.sigmoid)
    tanh = staticmethod(jnp.tanh)
    relu = staticmethod(jax.nn.relu)


class Values:
    """Initial values of parameters, in float32.

    Args:
        key: Gives another key each time it is called.
    """

    def __init__(self, key: Callable[[], Array]) -> None:
        self.key = key

    def full(self, shape: tuple[int, ...], value: float) -> Array:
        """A constant."""
        return jnp.full(shape, value, jnp.float32)

    def uniform(self, shape: tuple[int, ...], least: float, most: float) -> Array:
        """Numbers between two."""
        return jax.random.uniform(self.key(), shape, jnp.float32, least, most)

    def normal(self, shape: tuple[int, ...], deviation: float) -> Array:
        """Numbers around zero."""
        return deviation * jax.random.normal(self.key(), shape, jnp.float32)

    def orthogonal(self, shape: tuple[int, int], gain: float = 1.0) -> Array:
        """A matrix of orthogonal rows or columns."""
        return jax.nn.initializers.orthogonal(gain)(self.key(), shape, jnp.float32)


def flat_names(nested: Any, prefix: str = "") -> dict[str, Array]:
    """The arrays of nested dictionaries by the names of their places, joined with dots."""
    if not isinstance(nested, dict):
        return {} if nested is None else {prefix: nested}
    found: dict[str, Array] = {}
    for name, x in nested.items():
        found |= flat_names(x, f"{prefix}.{name}" if prefix else str(name))
    return found


def _flatten(cache: Cache) -> tuple[list[Array], tuple[tuple[int, tuple[str, ...]], ...]]:
    names = tuple((index, tuple(arrays)) for index, arrays in sorted(cache.layers.items()))
    return [cache.layers[index][name] for index, of_layer in names for name in of_layer], names


def _unflatten(names: tuple[tuple[int, tuple[str, ...]], ...], arrays: Any) -> Cache:
    rest = iter(arrays)
    return Cache({index: {name: next(rest) for name in of_layer} for index, of_layer in names})


jax.tree_util.register_pytree_node(Cache, _flatten, _unflatten)
