"""Pairs of tokens under any gate: a tree of blocks, from single tokens to the chunk.

For a block of ``b`` tokens let ``P[t]`` be the sum of gates from its start through ``t`` and ``Q[s]`` the sum after ``s`` to
its end. Of two neighbouring blocks, one level up, token ``t`` of the right one reads token ``s`` of the left one under

    ``Γ[t, s] = e^{P[t]} · e^{Q[s]}``

one matmul a level. Both exponents are ``≤ 0`` and sums of just the gates between; none is a difference of sums, forward or
backward, so any gate down to ``-inf`` is exact and so is its gradient. A product with a token on the other side of the diagonal
is never made.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .compat import Array

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

Pairs = list[list[Array]]


def causal(x: Array, y: Array, exclusive: bool) -> Array:
    """``x yᵀ`` where ``s ≤ t``, or ``s < t``; what lies elsewhere is dropped, infinite or not."""
    return jnp.tril(matmul(x, y.mT), -1 if exclusive else 0)


class Sums(NamedTuple):
    """Sums of gates inside blocks: ``[..., b, W]`` through a token, before it, after it; ``[..., W]`` of all."""

    through: Array
    before: Array
    after: Array
    total: Array


def sums_of_tokens(g: Array) -> Sums:
    """Of a whole chunk of weak gates: the sums after a token are a difference."""
    through = matmul(np.tri(g.shape[-2], dtype=g.dtype), g)
    total = through[..., -1, :]
    return Sums(through, through - g, total[..., None, :] - through, total)


class Level(NamedTuple):
    """Pairs of blocks of ``b`` tokens become one: factors of the right one's readers and the left one's writers,
    ``[..., n, b, W]``."""

    read: Array
    read_exclusive: Array
    write: Array


def halves(x: Array, b: int) -> tuple[Array, Array]:
    """The left and the right block of every pair, ``[..., n, b, W]``, of ``x [..., n·2b, W]``."""
    pairs = x.reshape(*x.shape[:-2], -1, 2, b, x.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def joined(left: Array, right: Array) -> Array:
    """The inverse of :func:`halves`."""
    pairs = jnp.stack([left, right], -3)
    return pairs.reshape(*pairs.shape[:-4], -1, pairs.shape[-1])


def levels(g: Array) -> tuple[list[Level], Sums]:
    """The factors of every level, and the sums over the whole chunk."""
    C = g.shape[-2]
    sums = Sums(g, jnp.zeros_like(g), jnp.zeros_like(g), g)  # kept as [..., C, W]; the totals as [..., blocks, W]
    found, b = [], 1
    while b < C:
        (P_left, P_right), (X_left, X_right), (Q_left, Q_right) = (halves(x, b) for x in sums[:3])
        left, right = halves(sums.total, 1)
        found.append(Level(jnp.exp(P_right), jnp.exp(X_right), jnp.exp(Q_left)))
        through, before, after = joined(P_left, P_right + left), joined(X_left, X_right + left), joined(Q_left + right, Q_right)
        sums = Sums(through, before, after, (left + right)[..., 0, :])
        b *= 2
    return found, sums._replace(total=sums.total[..., 0, :])


def pairs_of_levels(found: list[Level], readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Pairs:
    """Causal products of every reader with every writer."""
    A = [[diagonal(x, y, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)]
    for level in found:
        b = level.write.shape[-2]
        ys = [halves(y, b)[0] * level.write for y in writers]
        for row, x, e in zip(A, readers, exclusive, strict=True):
            read = halves(x, b)[1] * (level.read_exclusive if e else level.read)
            row[:] = [grown(a, matmul(read, y.mT)) for a, y in zip(row, ys, strict=True)]
    return [[a[..., 0, :, :] for a in row] for row in A]


def diagonal(x: Array, y: Array, exclusive: bool) -> Array:
    """``A[t, t]`` as blocks of one token, ``[..., C, 1, 1]``."""
    products = x * y
    return (jnp.zeros_like(products) if exclusive else products).sum(-1)[..., None, None]


def grown(a: Array, cross: Array) -> Array:
    """Blocks ``[..., 2n, b, b]`` on the diagonal, ``cross [..., n, b, b]`` below it: ``[..., n, 2b, 2b]``."""
    a = a.reshape(*cross.shape[:-2], 2, *cross.shape[-2:])
    left, right = a[..., 0, :, :], a[..., 1, :, :]
    above = jnp.concatenate([left, jnp.zeros_like(left)], -1)
    return jnp.concatenate([above, jnp.concatenate([cross, right], -1)], -2)


def values_of_levels(found: list[Level], A: Array, v: Array) -> Array:
    """``o[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``: the tree from the chunk down to its tokens."""
    o = jnp.zeros_like(v)
    a = A[..., None, :, :]
    for level in reversed(found):
        b = level.write.shape[-2]
        read = matmul(a[..., b:, :b], halves(v, b)[0] * level.write) * level.read
        o = o + joined(jnp.zeros_like(read), read)
        blocks = jnp.stack([a[..., :b, :b], a[..., b:, b:]], -3)
        a = blocks.reshape(*blocks.shape[:-4], -1, b, b)
    return o + a[..., 0] * v
