"""Unit lower triangular systems ``(I + L) x = r``, ``L`` strictly lower triangular ``[..., C, C]``, ``C`` a power of two."""

from __future__ import annotations

import mlx.core as mx

from .tree import halves, joined, merged, transposed


def unit_lower_inverse(L: mx.array) -> mx.array:
    """``(I + L)⁻¹``, blocks merged from single tokens up: ``[[X, 0], [−Y L₂₁ X, Y]]``; never by powers of ``L``.

    No gradient: :func:`solve` has it.
    """
    L = mx.stop_gradient(L)[..., None, :, :]
    corners = []
    while L.shape[-1] > 1:
        b = L.shape[-1] // 2
        corners.append(L[..., b:, :b])
        L = joined(mx.stack([L[..., :b, :b], L[..., b:, b:]], -3))
    X = mx.ones_like(L)
    for corner in reversed(corners):
        left, right = halves(X)
        X = merged(X, -(right @ corner @ left))
    return X[..., 0, :, :]


@mx.custom_function
def solve(L: mx.array, inverse: mx.array, r: mx.array) -> mx.array:
    """``x = (I + L)⁻¹ r``; differentiated as the solution of a system, not through the inverse."""
    return inverse @ r


@mx.custom_function
def solve_transposed(L: mx.array, inverse: mx.array, r: mx.array) -> mx.array:
    """``x = (I + L)⁻ᵀ r``."""
    return transposed(inverse) @ r


@solve.vjp
def _(given, dx, x):
    L, inverse, _ = given
    y = solve_transposed(L, inverse, dx)
    return -(y @ transposed(x)), mx.zeros_like(inverse), y


@solve_transposed.vjp
def _(given, dx, x):
    L, inverse, _ = given
    y = solve(L, inverse, dx)
    return -(x @ transposed(y)), mx.zeros_like(inverse), y


@solve.jvp
def _(given, tangents):
    L, inverse, r = given
    dL, _, dr = tangents
    flow = mx.zeros_like(r) if dr is None else dr
    return solve(L, inverse, flow if dL is None else flow - dL @ solve(L, inverse, r))


@solve_transposed.jvp
def _(given, tangents):
    L, inverse, r = given
    dL, _, dr = tangents
    flow = mx.zeros_like(r) if dr is None else dr
    return solve_transposed(L, inverse, flow if dL is None else flow - transposed(dL) @ solve_transposed(L, inverse, r))
