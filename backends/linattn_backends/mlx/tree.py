"""Pairs of tokens under any gate: a tree of blocks, from single tokens to the chunk.

For a block of ``b`` tokens let ``P[t]`` be the sum of gates from its start through ``t`` and ``Q[s]`` the sum after ``s`` to
its end. Of two neighbouring blocks, token ``t`` of the right one reads token ``s`` of the left one under

    ``Γ[t, s] = e^{P[t]} · e^{Q[s]}``

which is a plain matmul of ``x e^P`` and ``y e^Q``. Levels ``b = 1, 2, 4 … C/2`` cover every pair. Both exponents are ``≤ 0``
and sums of just the gates between; none is a difference of sums, forward or backward, so any gate down to ``-inf`` is exact
and so is its gradient. Arrays are ``[..., n, b, W]``: ``n`` blocks of ``b`` tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx

Pairs = list[list[mx.array]]


def transposed(x: mx.array) -> mx.array:
    """The last two axes exchanged."""
    return x.swapaxes(-1, -2)


def exp(x: mx.array) -> mx.array:
    """``e^x``. MLX's own is a float32 approximation for float64 as well (up to 0.32 at least); its power is not."""
    return mx.power(mx.array(math.e, mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)


def causal(A: mx.array, exclusive: bool) -> mx.array:
    """``A[t, s]`` where ``s ≤ t``, or ``s < t``; what lies elsewhere is dropped, infinite or not."""
    return mx.where(mx.tri(A.shape[-1], k=-1 if exclusive else 0, dtype=mx.bool_), A, 0)


# -- blocks ----------------------------------------------------------------------------------------------------------


def halves(x: mx.array) -> tuple[mx.array, mx.array]:
    """Left and right of neighbouring blocks, ``[..., n/2, b, W]`` each."""
    n, b, W = x.shape[-3:]
    left, right = mx.split(x.reshape(*x.shape[:-3], n // 2, 2, b, W), 2, axis=-3)
    return left.squeeze(-3), right.squeeze(-3)


def joined(x: mx.array) -> mx.array:
    """``[..., n, 2, b, W]`` as ``[..., 2n, b, W]``."""
    return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])


def merged(a: mx.array, cross: mx.array) -> mx.array:
    """``[[left, 0], [cross, right]]`` of neighbouring square blocks, ``[..., n/2, 2b, 2b]``."""
    left, right = halves(a)
    top = mx.concatenate([left, mx.zeros_like(left)], -1)
    return mx.concatenate([top, mx.concatenate([cross, right], -1)], -2)


# -- the tree --------------------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """Two blocks of ``b`` tokens become one: factors of readers in the right one and of writers in the left one."""

    read: mx.array
    read_exclusive: mx.array | None
    write: mx.array


class Sums(NamedTuple):
    """Sums of gates in a chunk: ``[..., C, W]`` through a token, before it, after it; ``[..., 1, W]`` of all."""

    through: mx.array
    before: mx.array | None
    after: mx.array
    total: mx.array


def levels(g: mx.array, exclusive: bool) -> tuple[list[Level], Sums]:
    """The factors of every level, and the sums over the whole chunk."""
    P = total = g[..., None, :]
    Q = mx.zeros_like(P)
    X = Q if exclusive else None
    found = []
    while P.shape[-3] > 1:
        (P_left, P_right), (Q_left, Q_right), (left, right) = halves(P), halves(Q), halves(total)
        X_halves = None if X is None else halves(X)
        read_exclusive = None if X_halves is None else exp(X_halves[1])
        found.append(Level(exp(P_right), read_exclusive, exp(Q_left)))
        P = mx.concatenate([P_left, P_right + left], -2)
        Q = mx.concatenate([Q_left + right, Q_right], -2)
        X = None if X_halves is None else mx.concatenate([X_halves[0], X_halves[1] + left], -2)
        total = left + right
    return found, Sums(*(None if x is None else x.squeeze(-3) for x in (P, X, Q, total)))


def pairs_of_levels(found: list[Level], readers: list[mx.array], writers: list[mx.array], exclusive: tuple[bool, ...]) -> Pairs:
    """Causal products of every reader with every writer."""
    A = [[diagonal(x, y, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)]
    xs, ys = [x[..., None, :] for x in readers], [y[..., None, :] for y in writers]
    for level in found:
        written = [transposed(halves(y)[0] * level.write) for y in ys]
        for row, x, e in zip(A, xs, exclusive, strict=True):
            read = halves(x)[1] * (level.read_exclusive if e else level.read)
            row[:] = [merged(a, read @ y) for a, y in zip(row, written, strict=True)]
        xs, ys = [paired(x) for x in xs], [paired(y) for y in ys]
    return [[a.squeeze(-3) for a in row] for row in A]


def paired(x: mx.array) -> mx.array:
    """Neighbouring blocks as one, ``[..., n/2, 2b, W]``."""
    n, b, W = x.shape[-3:]
    return x.reshape(*x.shape[:-3], n // 2, 2 * b, W)


def diagonal(x: mx.array, y: mx.array, exclusive: bool) -> mx.array:
    """``A[t, t]`` as blocks of one token, ``[..., C, 1, 1]``."""
    products = (x * y).sum(-1)[..., None, None]
    return mx.zeros_like(products) if exclusive else products


def values_of_levels(found: list[Level], A: mx.array, v: mx.array) -> mx.array:
    """``o[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``: the tree from the chunk down to its tokens."""
    o, a = mx.zeros_like(v), A[..., None, :, :]
    for level in reversed(found):
        top, bottom = mx.split(a, 2, axis=-2)
        (own_left, _), (corner, own_right) = mx.split(top, 2, axis=-1), mx.split(bottom, 2, axis=-1)
        n, b, _ = corner.shape[-3:]
        blocks = v.reshape(*v.shape[:-2], 2 * n, b, v.shape[-1])
        read = corner @ (halves(blocks)[0] * level.write) * level.read
        o = o + joined(mx.stack([mx.zeros_like(read), read], -3)).reshape(v.shape)
        a = joined(mx.stack([own_left, own_right], -3))
    return o + a.squeeze(-1) * v
