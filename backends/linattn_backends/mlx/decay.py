"""Decays inside one chunk: the factors ``e^{sum of g over (s, t]}`` and the products of tokens under them.

Arrays are ``[..., C, W]``: ``C`` tokens (a power of two), ``W`` channels. A decay ``Γ[t, s]`` answers four questions:

* ``start`` ``e^{P}``, what a token reads of the state before the chunk (``start_exclusive`` if it reads ``S⁻``);
* ``end`` ``e^{Q}``, what is left of a token at the chunk's end;
* ``total`` ``e^{P + Q}``, what is left of the state, ``[..., W, 1]``;
* ``pairs`` ``A[t, s] = Σ_k x[t,k] y[s,k] Γ[t,s,k]``, what token ``t`` reads of token ``s ≤ t`` (``s < t`` if exclusive).

One gate a token makes ``Γ`` one ``C × C`` matrix; a gate per channel goes through the tree of :mod:`.tree`. MLX has no branch
on data inside a graph, so there is no second way for weak gates.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .tree import Pairs, causal, exp, levels, pairs_of_levels, transposed, values_of_levels

NOTHING_LEFT = -1e30  # stands for -inf: e to either is 0, but this one times 0 is 0


class Decayed(NamedTuple):
    """What a chunk's gates make of its tokens; ``None`` stands for ones."""

    pairs: Pairs
    start: mx.array | None = None
    start_exclusive: mx.array | None = None
    end: mx.array | None = None
    total: mx.array | None = None


def decayed(g: mx.array | None, readers: list[mx.array], writers: list[mx.array], exclusive: tuple[bool, ...]) -> Decayed:
    """All that a core needs of a gate ``g [..., C, K]``, ``[..., C, 1]`` or ``None``."""
    if g is None:
        return Decayed([[causal(x @ transposed(y), e) for y in writers] for x, e in zip(readers, exclusive, strict=True)])
    g = mx.maximum(g, NOTHING_LEFT)
    if g.shape[-1] == 1 and not any(exclusive):
        return scalar_decayed(g, readers, writers)
    found, sums = levels(g, any(exclusive))
    return Decayed(
        pairs_of_levels(found, readers, writers, exclusive),
        start=exp(sums.through),
        start_exclusive=None if sums.before is None else exp(sums.before),
        end=exp(sums.after),
        total=transposed(exp(sums.total)),
    )


def scalar_decayed(g: mx.array, readers: list[mx.array], writers: list[mx.array]) -> Decayed:
    """Under one gate a token, ``g [..., C, 1]``."""
    between = sums_between(g)
    gamma = exp(between)
    start = exp(between[..., :1] + g[..., :1, :])  # the sum over (0, t], and g_0
    pairs = [[causal(x @ transposed(y), False) * gamma for y in writers] for x in readers]
    return Decayed(pairs, start, None, transposed(gamma[..., -1:, :]), start[..., -1:, :])


def sums_between(g: mx.array) -> mx.array:
    """``Σ g_r`` over ``s < r ≤ t``, ``[..., C, C]``; zero beyond the diagonal. Only ever adds what lies between."""
    C = g.shape[-2]
    through = causal(mx.broadcast_to(transposed(g), (*g.shape[:-1], C)), False)  # [t, r]: g_r where r ≤ t
    return through @ mx.tri(C, k=-1, dtype=g.dtype)


class DecayedValues(NamedTuple):
    """What value gates ``gv`` make of ``v`` and of what ``A`` reads of it, channel by channel after the product."""

    read: mx.array
    start: mx.array
    end: mx.array
    total: mx.array


def decayed_values(gv: mx.array, A: mx.array, v: mx.array) -> DecayedValues:
    """``read[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ v[s]``, and the factors at the chunk's edges."""
    found, sums = levels(mx.maximum(gv, NOTHING_LEFT), False)
    return DecayedValues(values_of_levels(found, A, v), exp(sums.through), exp(sums.after), exp(sums.total))
