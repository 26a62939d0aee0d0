"""Pairs of tokens under any gate: a tree of blocks, from single tokens to the chunk.

For a block of ``b`` tokens let ``P[t]`` be the sum of gates from its start through ``t`` and ``Q[s]`` the sum after ``s`` to
its end. Of ``r`` neighbouring blocks, one level up, token ``t`` of block ``i`` reads token ``s`` of block ``j < i`` under

    ``Γ[t, s] = e^{P[t]} · e^{Q[s] + Σ_{j<l<i} total_l}``

the right factor one array for each ``i``: every block reads all before it by one matmul, ``r`` of them a level. Both exponents
are ``≤ 0`` and sums of just the gates between; none is a difference of sums, forward or backward, so any gate down to ``-inf``
is exact and so is its gradient. A product with a token on the other side of the diagonal is dropped, not multiplied by zero.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .compat import Array

RADIX = 4

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
    """``r`` blocks of ``b`` tokens become one. The first of them reads none of the others, and the last is read by none.

    With ``i = 1 … r−1`` over readers and ``j = 0 … r−2`` over writers, factors of readers are ``[..., n, i, b, W]``, and those
    of writers ``[..., n, i, j, b, W]``.
    """

    read: Array
    read_exclusive: Array
    write: Array
    before: np.ndarray  # [i, j, 1, 1] bool: j comes before i

    @property
    def sizes(self) -> tuple[int, int]:
        """``r`` and ``b``."""
        return self.read.shape[-3] + 1, self.read.shape[-2]


def radices(C: int) -> list[int]:
    """Whose product is ``C``, from the leaves up."""
    found = []
    while C > 1:
        found.append(min(C, RADIX))
        C //= found[-1]
    return found


def grouped(x: Array, r: int, b: int) -> Array:
    """``[..., C, W]`` as ``[..., n, r, b, W]``."""
    return x.reshape(*x.shape[:-2], -1, r, b, x.shape[-1])


def levels(g: Array) -> tuple[list[Level], Sums]:
    """The factors of every level, and the sums over the whole chunk."""
    C, W = g.shape[-2:]
    lead = g.shape[:-2]
    sums = Sums(g, jnp.zeros_like(g), jnp.zeros_like(g), g)  # kept as [..., C, W]; the totals as [..., blocks, W]
    found, b = [], 1
    for r in radices(C):
        through, before, after = (grouped(x, r, b) for x in sums[:3])
        totals = sums.total.reshape(*lead, -1, r, W)
        i, j, l = np.ogrid[:r, :r, :r]
        gap = selected(((j < l) & (l < i))[1:, :-1], totals)[..., None, :]  # [..., n, i, j, 1, W]
        write = jnp.exp(gap + after[..., None, :-1, :, :])
        earlier = (j < i)[1:, :-1, :, None]
        found.append(Level(jnp.exp(through[..., 1:, :, :]), jnp.exp(before[..., 1:, :, :]), write, earlier))
        ahead, behind = (selected(which, totals)[..., None, :] for which in (j[0] > l[0], j[0] < l[0]))
        whole = (x.reshape(*lead, C, W) for x in (through + ahead, before + ahead, after + behind))
        sums = Sums(*whole, totals.sum(-2))
        b *= r
    return found, sums._replace(total=sums.total.reshape(*lead, W))


def selected(which: np.ndarray, totals: Array) -> Array:
    """Sums of ``totals [..., r, W]`` over the blocks that ``which [..., r]`` names; a tiny product that needs no matmul."""
    spread = totals.reshape(*totals.shape[:-2], *(1,) * (which.ndim - 1), *totals.shape[-2:])
    return jnp.where(which[..., None], spread, 0).sum(-2)


def written(y: Array, level: Level) -> Array:
    """A writer's factors for the readers of each block: ``[..., n, i, (r−1)·b, W]``."""
    r, b = level.sizes
    x = jnp.where(level.before, grouped(y, r, b)[..., None, :-1, :, :] * level.write, 0)
    return x.reshape(*x.shape[:-3], (r - 1) * b, x.shape[-1])


def pairs_of_levels(found: list[Level], readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Pairs:
    """Causal products of every reader with every writer."""
    A = [[diagonal(x, y, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)]
    for level in found:
        ys = [written(y, level) for y in writers]
        for row, x, e in zip(A, readers, exclusive, strict=True):
            read = grouped(x, *level.sizes)[..., 1:, :, :] * (level.read_exclusive if e else level.read)
            row[:] = [grown(a, matmul(read, y.mT), *level.sizes) for a, y in zip(row, ys, strict=True)]
    return [[a[..., 0, :, :] for a in row] for row in A]


def diagonal(x: Array, y: Array, exclusive: bool) -> Array:
    """``A[t, t]`` as blocks of one token, ``[..., C, 1, 1]``."""
    products = x * y
    return (jnp.zeros_like(products) if exclusive else products).sum(-1)[..., None, None]


def grown(a: Array, cross: Array, r: int, b: int) -> Array:
    """Blocks ``[..., n·r, b, b]`` on the diagonal, ``cross [..., n, i, b, (r−1)·b]`` below it: ``[..., n, r·b, r·b]``."""
    below = padded(padded(cross.reshape(*cross.shape[:-1], r - 1, b), -4, first=True), -2, first=False)
    a = a.reshape(*below.shape[:-2], 1, b)
    return jnp.where(own_block(r), a, below).reshape(*below.shape[:-4], r * b, r * b)


def own_block(r: int) -> np.ndarray:
    """``[r, 1, r, 1]`` bool: reader and writer are of one block."""
    return np.eye(r, dtype=bool)[:, None, :, None]


def padded(x: Array, axis: int, first: bool) -> Array:
    """One more entry along an axis, of zeros: the first or the last."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (1, 0) if first else (0, 1)
    return jnp.pad(x, widths)


def values_of_levels(found: list[Level], A: Array, v: Array) -> Array:
    """``o[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``: the tree from the chunk down to its tokens."""
    o = jnp.zeros_like(v)
    a = A[..., None, :, :]
    for level in reversed(found):
        r, b = level.sizes
        a = a.reshape(*a.shape[:-2], r, b, r, b)
        cross = a[..., 1:, :, :-1, :].reshape(*a.shape[:-4], r - 1, b, (r - 1) * b)
        read = matmul(cross, written(v, level)) * level.read
        o = o + padded(read, -3, first=True).reshape(v.shape)
        a = jnp.where(own_block(r), a, 0).sum(-2)
        a = a.reshape(*a.shape[:-4], -1, b, b)
    return o + a[..., 0] * v
