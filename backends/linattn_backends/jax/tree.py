"""Pairs of tokens under any gate: a tree of blocks, from single tokens to the chunk.

For a block of ``b`` tokens let ``P[t]`` be the sum of gates from its start through ``t`` and ``Q[s]`` the sum after ``s`` to
its end. Of two neighbouring blocks, one level up, token ``t`` of the right one reads token ``s`` of the left one under

    ``Γ[t, s] = e^{P[t]} · e^{Q[s]}``

one matmul a level. Both exponents are ``≤ 0`` and sums of just the gates between; none is a difference of sums, forward or
backward, so any gate down to ``-inf`` is exact and so is its gradient. A product with a token on the other side of the diagonal
is never made.

The chunks of all heads are one row of blocks, ``[..., blocks, b, W]``: no block is longer than a chunk, so none spans two. It
also keeps the number of dimensions low, at five and one more for each ``vmap``: XLA's CPU library corrupts memory above six in
some sums (jaxlib 0.10.2).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
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
    """Of a whole chunk of weak gates: the sums after a token are a difference.

    Ones below the diagonal are made here: a constant array from outside would be marked twice as differing between devices when
    a gradient of ``vmap`` is taken in ``shard_map``, which JAX refuses.
    """
    through = matmul(jnp.tri(g.shape[-2], dtype=g.dtype), g)
    total = through[..., -1, :]
    return Sums(through, through - g, total[..., None, :] - through, total)


class Level(NamedTuple):
    """Pairs of blocks of ``b`` tokens become one: factors of the right one's readers and the left one's writers,
    ``[..., blocks, b, W]``."""

    read: Array
    read_exclusive: Array
    write: Array


def row(x: Array) -> Array:
    """The tokens of one head after those of another: ``[..., HV·C, W]`` of ``x [..., HV, C, W]``."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def halves(x: Array, b: int) -> tuple[Array, Array]:
    """The left and the right block of every pair, ``[..., n, b, W]``, of ``x [..., n·2b, W]``."""
    pairs = x.reshape(*x.shape[:-2], -1, 2 * b, x.shape[-1])
    return pairs[..., :b, :], pairs[..., b:, :]


def joined(left: Array, right: Array) -> Array:
    """The inverse of :func:`halves`."""
    return row(jnp.concatenate([left, right], -2))


def levels(g: Array) -> tuple[list[Level], Sums]:
    """The factors of every level, and the sums over the whole chunk, of ``g [..., HV, C, W]``."""
    tokens = row(g)
    sums = Sums(tokens, jnp.zeros_like(tokens), jnp.zeros_like(tokens), tokens)  # totals as [..., blocks, W]
    found, b = [], 1
    while b < g.shape[-2]:
        (P_left, P_right), (X_left, X_right), (Q_left, Q_right) = (halves(x, b) for x in sums[:3])
        left, right = halves(sums.total, 1)
        found.append(Level(jnp.exp(P_right), jnp.exp(X_right), jnp.exp(Q_left)))
        through, before, after = joined(P_left, P_right + left), joined(X_left, X_right + left), joined(Q_left + right, Q_right)
        sums = Sums(through, before, after, (left + right)[..., 0, :])
        b *= 2
    through, before, after = (x.reshape(g.shape) for x in sums[:3])
    return found, Sums(through, before, after, sums.total)


def pairs_of_levels(found: list[Level], readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Pairs:
    """Causal products of every reader with every writer, ``[..., HV, C, C]``."""
    readers, writers = [row(x) for x in readers], [row(y) for y in writers]
    A = [[diagonal(x, y, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)]
    for level in found:
        b = level.write.shape[-2]
        ys = [halves(y, b)[0] * level.write for y in writers]
        for blocks, x, e in zip(A, readers, exclusive, strict=True):
            read = halves(x, b)[1] * (level.read_exclusive if e else level.read)
            blocks[:] = [grown(a, matmul(read, y.mT)) for a, y in zip(blocks, ys, strict=True)]
    return A


def diagonal(x: Array, y: Array, exclusive: bool) -> Array:
    """``A[t, t]`` as blocks of one token, ``[..., HV·C, 1, 1]``."""
    products = x * y
    return (jnp.zeros_like(products) if exclusive else products).sum(-1)[..., None, None]


def grown(a: Array, cross: Array) -> Array:
    """Blocks ``[..., 2n, b, b]`` on the diagonal, ``cross [..., n, b, b]`` below it: ``[..., n, 2b, 2b]``."""
    left, right = a[..., ::2, :, :], a[..., 1::2, :, :]
    above = jnp.concatenate([left, jnp.zeros_like(left)], -1)
    return jnp.concatenate([above, jnp.concatenate([cross, right], -1)], -2)


def values_of_levels(found: list[Level], A: Array, v: Array) -> Array:
    """``o[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``: the tree from the chunk down to its tokens."""
    tokens = row(v)
    o = jnp.zeros_like(tokens)
    a = A
    for level in reversed(found):
        b = level.write.shape[-2]
        read = matmul(a[..., b:, :b], halves(tokens, b)[0] * level.write) * level.read
        o = o + joined(jnp.zeros_like(read), read)
        blocks = jnp.stack([a[..., :b, :b], a[..., b:, b:]], -3)
        a = blocks.reshape(*blocks.shape[:-4], -1, b, b)
    return (o + a[..., 0] * tokens).reshape(v.shape)
