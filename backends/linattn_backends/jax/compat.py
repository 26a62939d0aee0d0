"""The few places where JAX versions differ, or may.

Everything else in this package is documented API of JAX 0.10.2 and later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

Array = Any  # jax.Array, or any tracer that stands for one


def varying(x: Array, *like: Array) -> Array:
    """``x``, marked as differing between the devices of a ``shard_map`` wherever one of ``like`` does.

    A ``scan`` wants its first carry to be marked as its later ones. How marks are read has changed from version to version;
    that a sum has the marks of its terms has not, and a sum over nothing is zero, whatever the values.
    """
    return x + sum(jnp.sum(y.reshape(-1)[:0]).astype(x.dtype) for y in like)


def checkpoint_in_scan(function: Any) -> Any:
    """``function``, computed again in the backward pass; for bodies of ``scan`` and branches of ``cond``."""
    return jax.checkpoint(function, prevent_cse=False)


def arrays_of(values: Iterable[Array | None]) -> list[Array]:
    """Those that are not ``None``."""
    return [x for x in values if x is not None]
