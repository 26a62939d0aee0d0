"""Decays inside one chunk: the factors ``e^{sum of g over (s, t]}`` and the products of tokens under them.

Arrays are ``[..., C, W]``: ``C`` tokens (a power of two), ``W`` channels. A decay ``Γ[t, s]`` answers four questions:

* ``start`` ``e^{P}``, what a token reads of the state before the chunk (``start_exclusive`` if it reads ``S⁻``);
* ``end`` ``e^{Q}``, what is left of a token at the chunk's end;
* ``total`` ``e^{P + Q}``, what is left of the state, ``[..., W, 1]``;
* ``pairs`` ``A[t, s] = Σ_k x[t,k] y[s,k] Γ[t,s,k]``, what token ``t`` reads of token ``s ≤ t`` (``s < t`` if exclusive).

Where gates are weak all over a chunk, pairs are factored about its middle (:func:`near`): one plain matmul. Elsewhere they come
from a tree of blocks (:mod:`.tree`) that is exact for any gate down to ``-inf``. Which of the two is a look at the data, made
anew for every segment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .compat import Array, checkpoint_in_scan
from .tree import Pairs, Sums, causal, levels, matmul, pairs_of_levels, sums_of_tokens, values_of_levels

MOST_DECAY = 16.0  # of a chunk whose pairs are factored about its middle: the factors are within e^±8
MOST_GATE = 6.0  # of a token there: what passes a gate is at least e^-6 of what flows beside it
NOTHING_LEFT = -1e30  # stands for -inf: e to either is 0, but this one times 0 is 0


class Decayed(NamedTuple):
    """What a chunk's gates make of its tokens; ``None`` stands for ones."""

    pairs: Pairs
    start: Array | None = None
    start_exclusive: Array | None = None
    end: Array | None = None
    total: Array | None = None


def decayed(g: Array | None, readers: list[Array], writers: list[Array], exclusive: tuple[bool, ...]) -> Decayed:
    """All that a core needs of a gate ``g [..., C, K]``, ``[..., C, 1]`` or ``None``."""
    if g is None:
        return Decayed([[causal(x, y, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)])
    g = jnp.maximum(g, NOTHING_LEFT)
    if g.shape[-1] == 1 and not any(exclusive):
        return scalar_decayed(g, readers, writers)

    def far_pairs(g: Array, readers: list[Array], writers: list[Array]) -> Decayed:
        found, sums = levels(g)
        return edges(pairs_of_levels(found, readers, writers, exclusive), sums, any(exclusive))

    def near_pairs(g: Array, readers: list[Array], writers: list[Array]) -> Decayed:
        sums = sums_of_tokens(g)
        read, read_exclusive, write = near(sums)
        written = [y * write for y in writers]
        by = [x * (read_exclusive if e else read) for x, e in zip(readers, exclusive, strict=True)]
        return edges([[causal(x, y, e) for y in written] for x, e in zip(by, exclusive, strict=True)], sums, any(exclusive))

    return near_or_far(g, near_pairs, far_pairs, readers, writers)


def near_or_far(g: Array, near: Callable[..., Any], far: Callable[..., Any], *operands: Any) -> Any:
    """``near(g, …)`` if every chunk decays little enough for it, else ``far(g, …)``; computed again in the backward pass."""
    fixed = lax.stop_gradient(g)
    weak = (jnp.min(fixed) >= -MOST_GATE) & (jnp.min(fixed.sum(-2)) >= -MOST_DECAY)
    return lax.cond(weak, checkpoint_in_scan(near), checkpoint_in_scan(far), g, *operands)


def edges(pairs: Pairs, sums: Sums, exclusive: bool) -> Decayed:
    """With the factors at the edges of the chunk."""
    start_exclusive = jnp.exp(sums.before) if exclusive else None
    return Decayed(pairs, jnp.exp(sums.through), start_exclusive, jnp.exp(sums.after), jnp.exp(sums.total)[..., None])


def near(sums: Sums) -> tuple[Array, Array, Array]:
    """Factors of readers, exclusive readers and writers about the middle; finite even for gates they are not used for."""
    middle = sums.total[..., None, :] * 0.5
    offset, offset_before = sums.through - middle, sums.before - middle
    most = MOST_DECAY / 2 + 1
    read, read_exclusive, write = (jnp.exp(jnp.clip(x, -most, most)) for x in (offset, offset_before, -offset))
    return read, read_exclusive, write


# One gate a token: Γ is one C × C matrix for all channels.


def scalar_decayed(g: Array, readers: list[Array], writers: list[Array]) -> Decayed:
    """Under ``g [..., C, 1]``."""
    between = sums_between(g)
    gamma = jnp.exp(between)
    start = jnp.exp(between[..., :1] + g[..., :1, :])  # the sum over (0, t], and g_0
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


# Decay on the value side: what is read is weighed channel by channel after the product.


class DecayedValues(NamedTuple):
    """What value gates ``gv`` make of ``v`` and of what ``A`` reads of it."""

    read: Array
    start: Array
    end: Array
    total: Array


def decayed_values(gv: Array, A: Array, v: Array) -> DecayedValues:
    """``read[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``, and the factors at the chunk's edges."""

    def far_values(gv: Array, A: Array, v: Array) -> DecayedValues:
        found, sums = levels(gv)
        return value_edges(values_of_levels(found, A, v), sums)

    def near_values(gv: Array, A: Array, v: Array) -> DecayedValues:
        sums = sums_of_tokens(gv)
        read, _, write = near(sums)
        return value_edges(matmul(A, v * write) * read, sums)

    return near_or_far(jnp.maximum(gv, NOTHING_LEFT), near_values, far_values, A, v)


def value_edges(read: Array, sums: Sums) -> DecayedValues:
    """With the factors at the edges of the chunk."""
    return DecayedValues(read, jnp.exp(sums.through), jnp.exp(sums.after), jnp.exp(sums.total)[..., None, :])
