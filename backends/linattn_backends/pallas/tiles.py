"""What a chunk is computed with: products on the matrix unit, and the few moves between rows and columns that Mosaic compiles.

Everything here works on one chunk in VMEM, two dimensions at a time, in float32, and can be differentiated inside a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

Array = Any
Kind = Literal["nn", "nt", "tn"]

_CONTRACTED: dict[Kind, tuple[int, int]] = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


class Passes(NamedTuple):
    """How a product uses a matrix unit that multiplies bfloat16: in how many such terms it takes each operand.

    Products of terms too small to matter are left out: ``i + j`` of term ``i`` by term ``j`` is less than the larger number.
    """

    left: int
    right: int


ONE = Passes(1, 1)  # operands rounded to bfloat16
THREE = Passes(2, 2)  # to 16 bits
SUMS = Passes(3, 1)  # exact to float32, where the right operand is zeros and ones
EXACT = None  # float32, by all the passes that it takes: at its default precision the unit would round operands to bfloat16


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def product(x: Array, y: Array, kind: Kind, passes: Passes | None) -> Array:
    """``x y``, ``x yᵀ`` or ``xᵀ y`` in float32."""
    if passes is None:
        return _product(x, y, kind, lax.Precision.HIGHEST)
    left, right = terms(x, passes.left), terms(y, passes.right)
    pairs = [(a, b) for i, a in enumerate(left) for j, b in enumerate(right) if i + j < max(passes)]
    return sum(_product(a, b, kind, lax.Precision.DEFAULT) for a, b in reversed(pairs))


def _product(x: Array, y: Array, kind: Kind, precision: Any) -> Array:
    left, right = _CONTRACTED[kind]
    dimensions = (((left,), (right,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def terms(x: Array, n: int) -> list[Array]:
    """``n`` bfloat16 arrays whose sum is ``x`` but for what is left after ``8 n`` bits.

    Every one but the last is cut, not rounded: a compiler may take a rounding and its way back for nothing.
    """
    found = []
    for _ in range(n - 1):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536), jnp.float32)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*found, x.astype(jnp.bfloat16)]


def _product_forward(x: Array, y: Array, kind: Kind, passes: Passes | None) -> tuple[Array, tuple[Array, Array]]:
    return product(x, y, kind, passes), (x, y)


def _product_backward(kind: Kind, passes: Passes | None, kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    """Again one of the three kinds each, so that no operand is transposed in memory."""
    x, y = kept
    if kind == "nn":
        return product(d, y, "nt", passes), product(x, d, "tn", passes)
    if kind == "nt":
        return product(d, y, "nn", passes), product(d, x, "tn", passes)
    return product(y, d, "nt", passes), product(x, d, "nn", passes)


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


def unit_lower_inverse(L: Array, passes: Passes | None) -> Array:
    """``(I + L)⁻¹`` of ``L [C, C]``, strictly lower triangular: ``X − X L X`` for blocks of 1, 2, 4 … tokens."""
    C = L.shape[0]
    X = jnp.where(rows(C) == columns(C), 1.0, 0.0) - jnp.where(neighbours(C, 1), L, 0.0)
    b = 2
    while b < C:
        X = X - product(product(X, jnp.where(neighbours(C, b), L, 0.0), "nn", passes), X, "nn", passes)
        b *= 2
    return X


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def solved(L: Array, r: Array, passes: Passes | None) -> Array:
    """``x`` of ``(I + L) x = r``; differentiated as a system, not through the inverse."""
    return _solved_forward(L, r, passes)[0]


def _solved_forward(L: Array, r: Array, passes: Passes | None) -> tuple[Array, tuple[Array, Array]]:
    inverse = unit_lower_inverse(L, passes)
    x = product(inverse, r, "nn", passes)
    return x, (inverse, x)


def _solved_backward(passes: Passes | None, kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    inverse, x = kept
    d_r = product(inverse, d, "tn", passes)
    return -product(d_r, x, "nt", passes), d_r


solved.defvjp(_solved_forward, _solved_backward)
