"""What a chunk is computed with: products on the matrix unit, and the few moves between rows and columns that Mosaic compiles.

Everything here works on one chunk in VMEM, two dimensions at a time, in float32, and can be differentiated inside a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

Array = Any
Kind = Literal["nn", "nt", "tn"]

_CONTRACTED: dict[Kind, tuple[int, int]] = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: Array, y: Array, kind: Kind, dtype: Any) -> Array:
    """``x y``, ``x yᵀ`` or ``xᵀ y`` in float32, of operands rounded to ``dtype``.

    In one pass of the matrix unit for bfloat16. In float32 with all the passes that it takes: at its default precision the
    unit would round the operands to bfloat16.
    """
    left, right = _CONTRACTED[kind]
    return lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        (((left,), (right,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _product_forward(x: Array, y: Array, kind: Kind, dtype: Any) -> tuple[Array, tuple[Array, Array]]:
    return product(x, y, kind, dtype), (x, y)


def _product_backward(kind: Kind, dtype: Any, kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    """Again one of the three kinds each, so that no operand is transposed in memory."""
    x, y = kept
    if kind == "nn":
        return product(d, y, "nt", dtype), product(x, d, "tn", dtype)
    if kind == "nt":
        return product(d, y, "nn", dtype), product(d, x, "tn", dtype)
    return product(y, d, "nt", dtype), product(x, d, "nn", dtype)


product.defvjp(_product_forward, _product_backward)


def rows(C: int) -> Array:
    """Index of the token of each row, ``[C, C]``."""
    return lax.broadcasted_iota(jnp.int32, (C, C), 0)


def columns(C: int) -> Array:
    """Index of the token of each column, ``[C, C]``."""
    return lax.broadcasted_iota(jnp.int32, (C, C), 1)


def neighbours(C: int, b: int) -> Array:
    """``[C, C]`` bool: of two neighbouring blocks of ``b`` tokens, the row is in the second and the column in the first."""
    t, s = rows(C), columns(C)
    return ((t ^ s) < 2 * b) & (t & b != 0) & (s & b == 0)


def column(row: Array) -> Array:
    """``[1, C]`` as ``[C, 1]``."""
    C = row.shape[1]
    return jnp.sum(jnp.where(rows(C) == columns(C), row, 0.0), axis=1, keepdims=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def swapped(x: Array, b: int) -> Array:
    """``x [C, W]`` with every two neighbouring blocks of ``b`` tokens exchanged."""
    C = x.shape[0]
    odd = lax.broadcasted_iota(jnp.int32, x.shape, 0) & b != 0
    return jnp.where(odd, pltpu.roll(x, b, 0), pltpu.roll(x, C - b, 0))


swapped.defvjp(lambda x, b: (swapped(x, b), None), lambda b, _, d: (swapped(d, b),))


def unit_lower_inverse(L: Array) -> Array:
    """``(I + L)⁻¹`` of ``L [C, C]``, strictly lower triangular: ``X − X L X`` for blocks of 1, 2, 4 … tokens."""
    C = L.shape[0]
    X = jnp.where(rows(C) == columns(C), 1.0, 0.0)
    b = 1
    while b < C:
        X = X - product(product(X, jnp.where(neighbours(C, b), L, 0.0), "nn", jnp.float32), X, "nn", jnp.float32)
        b *= 2
    return X


@jax.custom_vjp
def solved(L: Array, r: Array) -> Array:
    """``x`` of ``(I + L) x = r``; differentiated as a system, not through the inverse."""
    return product(unit_lower_inverse(L), r, "nn", jnp.float32)


def _solved_forward(L: Array, r: Array) -> tuple[Array, tuple[Array, Array]]:
    inverse = unit_lower_inverse(L)
    x = product(inverse, r, "nn", jnp.float32)
    return x, (inverse, x)


def _solved_backward(kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    inverse, x = kept
    d_r = product(inverse, d, "tn", jnp.float32)
    return -product(d_r, x, "nt", jnp.float32), d_r


solved.defvjp(_solved_forward, _solved_backward)
