"""Unit lower triangular systems ``(I + L) x = r``; ``L [..., HV, C, C]`` strictly lower triangular, ``C`` a power of two."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from .compat import Array, varying
from .tree import grown, matmul


def unit_lower_inverse(L: Array) -> Array:
    """``(I + L)⁻¹``, blocks merged from single tokens up: ``[[X, 0], [−Y L₂₁ X, Y]]``; never by powers of ``L``.

    Those of all heads are one row of blocks, as in :mod:`.tree`.
    """
    C = L.shape[-1]
    squares = [lax.stop_gradient(L)]
    while squares[-1].shape[-1] > 1:
        squares.append(split(squares[-1]))
    X = jnp.ones_like(squares.pop())
    b = 1
    while b < C:
        left, right = X[..., ::2, :, :], X[..., 1::2, :, :]
        X = grown(X, -matmul(matmul(right, squares.pop()[..., b:, :b]), left))
        b *= 2
    return X


def solve(L: Array, inverse: Array, r: Array) -> Array:
    """``x = (I + L)⁻¹ r``; differentiated as the solution of a system, not through the inverse."""
    inverse = lax.stop_gradient(inverse)
    return lax.custom_linear_solve(
        lambda x: x + matmul(L, x),
        r,
        solve=lambda _, y: matmul(inverse, y),
        transpose_solve=lambda _, y: matmul(inverse.mT, y),
    )


def solve_by_column(L: Array, beta: Array, r: Array) -> Array:
    """``x = beta ∘ (r − L x)``, ``beta [..., C, V]`` of its own for every column: token by token."""
    fixed_L, fixed_beta = lax.stop_gradient(L), lax.stop_gradient(beta)
    return lax.custom_linear_solve(
        lambda x: x + beta * matmul(L, x),
        beta * r,
        solve=lambda _, y: substitute(fixed_L, fixed_beta, y),
        transpose_solve=lambda _, y: substitute_transposed(fixed_L, fixed_beta, y),
    )


def substitute(L: Array, beta: Array, y: Array) -> Array:
    """``x = y − beta ∘ (L x)``, from the first token to the last."""

    def token(x: Array, t: Array) -> tuple[Array, None]:
        row = lax.dynamic_slice_in_dim(L, t, 1, -2)
        found = lax.dynamic_slice_in_dim(y, t, 1, -2) - lax.dynamic_slice_in_dim(beta, t, 1, -2) * matmul(row, x)
        return lax.dynamic_update_slice_in_dim(x, found, t, -2), None

    return lax.scan(token, varying(jnp.zeros_like(y), L, beta, y), jnp.arange(L.shape[-1]))[0]


def substitute_transposed(L: Array, beta: Array, y: Array) -> Array:
    """``x = y − Lᵀ (beta ∘ x)``, from the last token to the first."""

    def token(x: Array, t: Array) -> tuple[Array, None]:
        column = lax.dynamic_slice_in_dim(L, t, 1, -1)
        found = lax.dynamic_slice_in_dim(y, t, 1, -2) - matmul(column.mT, beta * x)
        return lax.dynamic_update_slice_in_dim(x, found, t, -2), None

    return lax.scan(token, varying(jnp.zeros_like(y), L, beta, y), jnp.arange(L.shape[-1]), reverse=True)[0]


def split(a: Array) -> Array:
    """The two blocks on the diagonal of each ``[..., n, 2b, 2b]``, as ``[..., 2n, b, b]``."""
    b = a.shape[-1] // 2
    both = jnp.stack([a[..., :b, :b], a[..., b:, b:]], -3)
    return both.reshape(*a.shape[:-3], -1, b, b)
