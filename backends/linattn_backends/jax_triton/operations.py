"""The tensor operations that host code does between launches, on JAX arrays: dense arguments, as PyTorch's own operators take
them, and ``like``, a tensor of the result's shape and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

__all__ = ["ALLOCATIONS", "OPERATIONS"]

Array = Any

ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty"})
"""Operators whose result has no values yet."""


def _same(x: Array, *_: Any, **__: Any) -> Array:
    return x


def _arange(*range_: int, like: Any, **_: Any) -> Array:
    return jnp.arange(*range_)


def _sum(x: Array, axes: list[int], keepdim: bool = False, *, like: Any, **_: Any) -> Array:
    kind = jnp.float32 if x.dtype in (jnp.bfloat16, jnp.float16) else x.dtype
    return x.astype(kind).sum(tuple(axes), keepdims=keepdim)


def _searchsorted(sorted_: Array, x: Array, *, right: bool = False, like: Any, **_: Any) -> Array:
    return jnp.searchsorted(sorted_, x, side="right" if right else "left")


def _clamp(x: Array, low: Any = None, high: Any = None, *, like: Any) -> Array:
    return jnp.clip(x, low, high)


def _index(x: Array, at: list[Any], *, like: Any) -> Array:
    return x[tuple(slice(None) if i is None else i for i in at)]


OPERATIONS: dict[str, Callable[..., Array]] = {
    "_to_copy": _same,
    "add": lambda x, y, alpha=1, *, like: x + alpha * y,
    "arange": _arange,
    "bitwise_not": lambda x, *, like: ~x,
    "cat": lambda parts, axis=0, *, like: jnp.concatenate(parts, axis),
    "clamp_": _clamp,
    "clone": _same,
    "copy_": lambda x, y, *_, like: y,
    "cumsum": lambda x, axis, *, like, **_: jnp.cumsum(x, axis),
    "floor_divide": lambda x, y, *, like: x // y,
    "full_like": lambda x, value, *, like, **_: value,
    "index": _index,
    "lt": lambda x, y, *, like: x < y,
    "masked_fill": lambda x, mask, value, *, like: jnp.where(mask, value, x),
    "new_zeros": lambda *_, like, **__: 0,
    "remainder": lambda x, y, *, like: x % y,
    "searchsorted": _searchsorted,
    "sub": lambda x, y, alpha=1, *, like: x - alpha * y,
    "sum": _sum,
    "where": lambda mask, x, y, *, like: jnp.where(mask, x, y),
    "zeros": lambda *_, like, **__: 0,
    "zeros_like": lambda *_, like, **__: 0,
}
