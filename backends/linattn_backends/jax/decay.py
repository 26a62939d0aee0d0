"""Decays inside one chunk: the factors ``e^{sum of g over (s, t]}`` and the products of tokens under them.

Arrays are ``[..., C, W]``: ``C`` tokens (a power of two), ``W`` channels. A decay ``Γ[t, s]`` answers four questions:

* ``start`` ``e^{P}``, what a token reads of the state before the chunk (``start_exclusive`` if it reads ``S⁻``);
* ``end`` ``e^{Q}``, what is left of a token at the chunk's end;
* ``total`` ``e^{P + Q}``, what is left of the state, ``[..., W, 1]``;
* ``pairs`` ``A[t, s] = Σ_k x[t,k] y[s,k] Γ[t,s,k]``, what token ``t`` reads of token ``s ≤ t`` (``s < t`` if exclusive).

With ``P`` the sum from the start of a block through ``t`` and ``Q`` the sum after ``s`` to the block's end, two neighbouring
blocks of ``b`` tokens make one of ``2b``: ``P`` grows by the left total in the right half, ``Q`` by the right total in the left
half, and a pair across the middle has the decay ``P[t] + Q[s]``, both ``≤ 0``: a plain matmul of ``x e^P`` and ``y e^Q``. No
sum of gates is subtracted from another on the way, and none is differentiated through a difference, so any gate down to ``-inf``
is exact. Pairs inside a leaf of the tree are factored about the leaf's middle; a leaf is one token unless its gates are weak.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .compat import Array, checkpoint_in_scan

LEAF = 16
MOST_DECAY = 16.0  # of a leaf: its factors are within e^±8
MOST_GATE = 6.0  # of a token: what passes a gate is at least e^-6 of what flows beside it
NOTHING_LEFT = -1e30  # stands for -inf: e to either is 0, but this one times 0 is 0

matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

Pairs = list[list[Array]]


class Decayed(NamedTuple):
    """What a chunk's gates make of its tokens; ``None`` stands for ones."""

    pairs: Pairs
    start: Array | None
    start_exclusive: Array | None
    end: Array | None
    total: Array | None


def decayed(g: Array | None, readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Decayed:
    """All that a core needs of a gate ``g [..., C, K]``, ``[..., C, 1]`` or ``None``."""
    if g is None:
        return Decayed([[causal(x, y, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)], *(None,) * 4)
    g = jnp.maximum(g, NOTHING_LEFT)
    if g.shape[-1] == 1 and not any(exclusive):
        return scalar_decayed(g, readers, writers)
    return vector_decayed(g, readers, writers, exclusive)


def causal(x: Array, y: Array, exclusive: bool) -> Array:
    """``x yᵀ`` where ``s ≤ t``, or ``s < t``; an infinite product elsewhere is dropped, not multiplied by zero."""
    return jnp.tril(matmul(x, y.mT), -1 if exclusive else 0)


# One gate a token: Γ is one C × C matrix for all channels.


def scalar_decayed(g: Array, readers: list[Array], writers: list[Array]) -> Decayed:
    """Under ``g [..., C, 1]``."""
    sums = sums_between(g)
    gamma = jnp.exp(sums)
    start = jnp.exp(sums[..., :1] + g[..., :1, :])  # the sum over (0, t], and g_0
    pairs = [[causal(x, y, False) * gamma for y in writers] for x in readers]
    return Decayed(pairs, start, None, gamma[..., -1, :, None], start[..., -1:, :])


def sums_between(g: Array) -> Array:
    """``Σ g_r`` over ``s < r ≤ t``, ``[..., C, C]``; zero beyond the diagonal. Only ever adds what lies between."""
    C = g.shape[-2]
    t, s = jnp.arange(C)[:, None], jnp.arange(C)
    if C > 256:  # fewer operations where chunks are long
        return jnp.cumsum(jnp.where(t > s, g, 0), axis=-2)
    through = jnp.where(t >= s, g.mT, 0)  # [t, r]: g_r where r ≤ t
    return matmul(through, (t > s).astype(g.dtype))


# One gate a token and channel: the tree.


def vector_decayed(g: Array, readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Decayed:
    """Under ``g [..., C, W]``: picks the leaf by a look at the gates."""
    C, least = g.shape[-2], min(LEAF, g.shape[-2])
    leaves = sorted({1, least, C})
    run = [checkpoint_in_scan(partial(tree, leaf, exclusive)) for leaf in leaves]
    if len(leaves) == 1:
        return Decayed(*run[0](g, readers, writers))
    weakest = jnp.min(lax.stop_gradient(g), initial=0) >= -MOST_GATE
    fits = [weakest & jnp.all(total_of_blocks(g, leaf) >= -MOST_DECAY) for leaf in leaves[1:]]
    choice = sum(fit.astype(jnp.int32) for fit in fits)
    return Decayed(*lax.switch(choice, run, g, readers, writers))


def total_of_blocks(g: Array, b: int) -> Array:
    """Sums over blocks of ``b`` tokens."""
    return lax.stop_gradient(blocks(g, b)).sum(-2)


def blocks(x: Array, b: int) -> Array:
    """``[..., C, W]`` as ``[..., C/b, b, W]``."""
    return x.reshape(*x.shape[:-2], -1, b, x.shape[-1])


def halves(x: Array) -> tuple[Array, Array]:
    """Left and right halves ``[..., n/2, b, W]`` of neighbouring blocks ``[..., n, b, W]``."""
    pairs = x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def joined(left: Array, right: Array) -> Array:
    """Blocks of ``2b`` from left and right halves ``[..., n, b, W]``."""
    return jnp.concatenate([left, right], -2)


class Sums(NamedTuple):
    """Sums of gates inside blocks ``[..., n, b, W]``: through a token, before it, after it."""

    through: Array
    before: Array
    after: Array


def sums_inside(g: Array, b: int) -> Sums:
    """In every block of ``b`` tokens."""
    x = blocks(g, b)
    if b == 1:
        return Sums(x, jnp.zeros_like(x), jnp.zeros_like(x))
    through = matmul(jnp.tril(jnp.ones((b, b), g.dtype)), x)
    before = matmul(jnp.tril(jnp.ones((b, b), g.dtype), -1), x)
    return Sums(through, before, through[..., -1:, :] - through)


def grown(sums: Sums) -> Sums:
    """From blocks of ``b`` tokens to blocks of ``2b``."""
    (left, right), (left_before, right_before) = halves(sums.through), halves(sums.before)
    left_after, right_after = halves(sums.after)
    left_total = left[..., -1:, :]
    return Sums(
        joined(left, right + left_total),
        joined(left_before, right_before + left_total),
        joined(left_after + right[..., -1:, :], right_after),
    )


def about_middle(sums: Sums) -> tuple[Array, Array, Array]:
    """Factors of readers, exclusive readers and writers inside a leaf; finite even for gates that no leaf is chosen for."""
    middle = sums.through[..., -1:, :] * 0.5
    offset, offset_before = sums.through - middle, sums.before - middle
    most = MOST_DECAY / 2 + 1
    factors = (jnp.exp(jnp.clip(x, -most, most)) for x in (offset, offset_before, -offset))
    return tuple(factors)  # type: ignore[return-value]


def tree(leaf: int, exclusive: tuple[bool, ...], g: Array, readers: list[Array], writers: list[Array]) -> tuple[Any, ...]:
    """The fields of :class:`Decayed`, from leaves of ``leaf`` tokens up."""
    C = g.shape[-2]
    sums = sums_inside(g, leaf)
    A = leaf_pairs(leaf, sums, readers, writers, exclusive)
    b = leaf
    while b < C:
        read, read_exclusive = jnp.exp(halves(sums.through)[1]), jnp.exp(halves(sums.before)[1])
        write = jnp.exp(halves(sums.after)[0])
        written = [halves(blocks(y, b))[0] * write for y in writers]
        for row, x, e in zip(A, readers, exclusive, strict=True):
            right = halves(blocks(x, b))[1] * (read_exclusive if e else read)
            row[:] = [merged(a, matmul(right, y.mT)) for a, y in zip(row, written, strict=True)]
        sums = grown(sums)
        b *= 2
    pairs = [[a[..., 0, :, :] for a in row] for row in A]
    through, before, after = (x[..., 0, :, :] for x in sums)
    total = jnp.exp(through[..., -1, :, None])
    return pairs, jnp.exp(through), jnp.exp(before) if any(exclusive) else None, jnp.exp(after), total


def leaf_pairs(leaf: int, sums: Sums, readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Pairs:
    """``A`` inside the leaves, ``[..., C/leaf, leaf, leaf]`` each."""
    if leaf == 1:
        return [
            [blocks((jnp.zeros_like(x) if e else x * y).sum(-1, keepdims=True), 1) for y in writers]
            for x, e in zip(readers, exclusive, strict=True)
        ]
    read, read_exclusive, write = about_middle(sums)
    written = [blocks(y, leaf) * write for y in writers]
    read_by = [blocks(x, leaf) * (read_exclusive if e else read) for x, e in zip(readers, exclusive, strict=True)]
    return [[causal(x, y, e) for y in written] for x, e in zip(read_by, exclusive, strict=True)]


def merged(a: Array, cross: Array) -> Array:
    """``[[left, 0], [cross, right]]`` of neighbouring blocks on the diagonal, ``[..., n, b, b]``."""
    left, right = halves(a)
    top = jnp.concatenate([left, jnp.zeros_like(left)], -1)
    return joined(top, jnp.concatenate([cross, right], -1))


# Decay on the value side: what is read is weighed channel by channel after the product.


class DecayedValues(NamedTuple):
    """What value gates ``gv`` make of ``v`` and of what ``A`` reads of it."""

    read: Array
    start: Array
    end: Array
    total: Array


def decayed_values(gv: Array, A: Array, v: Array) -> DecayedValues:
    """``read[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``, and the factors at the chunk's edges."""
    gv = jnp.maximum(gv, NOTHING_LEFT)
    C, least = gv.shape[-2], min(LEAF, gv.shape[-2])
    leaves = sorted({1, least, C})
    run = [checkpoint_in_scan(partial(value_tree, leaf)) for leaf in leaves]
    if len(leaves) == 1:
        return DecayedValues(*run[0](gv, A, v))
    weakest = jnp.min(lax.stop_gradient(gv), initial=0) >= -MOST_GATE
    fits = [weakest & jnp.all(total_of_blocks(gv, leaf) >= -MOST_DECAY) for leaf in leaves[1:]]
    choice = sum(fit.astype(jnp.int32) for fit in fits)
    return DecayedValues(*lax.switch(choice, run, gv, A, v))


def value_tree(leaf: int, gv: Array, A: Array, v: Array) -> tuple[Array, ...]:
    """The fields of :class:`DecayedValues`."""
    C = gv.shape[-2]
    squares = [A[..., None, :, :]]  # blocks of A on the diagonal, from the whole of it down to the leaves
    while squares[-1].shape[-1] > leaf:
        squares.append(split(squares[-1]))
    sums = sums_inside(gv, leaf)
    if leaf == 1:
        read = squares.pop() * blocks(v, 1)
    else:
        reader, _, writer = about_middle(sums)
        read = matmul(squares.pop(), blocks(v, leaf) * writer) * reader
    b = leaf
    while b < C:
        cross = squares.pop()[..., b:, :b]
        written = halves(blocks(v, b))[0] * jnp.exp(halves(sums.after)[0])
        left, right = halves(read)
        read = joined(left, right + matmul(cross, written) * jnp.exp(halves(sums.through)[1]))
        sums = grown(sums)
        b *= 2
    through, _, after = (x[..., 0, :, :] for x in sums)
    return read[..., 0, :, :], jnp.exp(through), jnp.exp(after), jnp.exp(through[..., -1, None, :])


def split(a: Array) -> Array:
    """The two blocks on the diagonal of each ``[..., n, 2b, 2b]``, as ``[..., 2n, b, b]``."""
    b = a.shape[-1] // 2
    both = jnp.stack([a[..., :b, :b], a[..., b:, b:]], -3)
    return both.reshape(*a.shape[:-3], -1, b, b)
