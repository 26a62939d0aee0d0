"""One chunk of every family: what it puts out and what it makes of the state.

With ``P_t`` the sum of gates over ``(0, t]``, ``Q_s`` that over ``(s, C]``, ``Γ[t, s]`` the decay ``e^{sum over (s, t]}`` and
``A[t, s] = Σ_k q_tk k_sk Γ[t, s]_k`` for ``s ≤ t``:

* gates only: ``o = (q e^P) S + A v``, ``S ← e^{P_C} S + (k e^Q)ᵀ v``;
* ``rwkv6`` reads the state before the token: ``Γ`` and ``P`` stop before ``t``, and the bonus ``u`` is the diagonal of ``A``;
* delta families: the values written are ``x = beta ∘ (v − (k e^P) S − tril(pairs(k, k), −1) x)``, a unit lower triangular
  system; then as above with ``x`` for ``v``.

Every exponent is a sum of gates over tokens that lie between, so none is positive, and any gate down to ``-inf`` is exact.
Tokens are rows: ``q, k, g [C, K]``, ``v [C, V]``. What is one number a token comes as a row: ``g, beta [1, C]``. The state is
held value-first, ``[V, K]``, so that key channels decay along lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from .tiles import EXACT, SUMS, THREE, Array, Passes, column, columns, neighbours, product, rows, solved, swapped

Operands = dict[str, Array]

NOTHING_LEFT = -1e30  # stands for -inf: e to either is 0, but this one times 0 is 0


class Decay(NamedTuple):
    """What a chunk's gates make of its tokens; ``None`` stands for ones.

    Attributes:
        pairs: ``A`` of readers and writers ``[C, K]``.
        start: What a token reads of the state, ``e^P``.
        end: What is left of a token at the end, ``e^Q``.
        total: What is left of the state, ``[1, K]`` or ``[1, 1]``.
    """

    pairs: Callable[[Array, Array], Array]
    start: Array | None = None
    end: Array | None = None
    total: Array | None = None


def chunk(x: Operands, S: Array, passes: Passes | None) -> tuple[Array, Array]:
    """``(o [C, V], S [V, K])`` of float32 operands; ``passes`` is :data:`~.tiles.ONE` for those that were bfloat16."""
    q, k, v, u = x["q"], x["k"], x["v"], x.get("u")
    gate = decay(x.get("g"), q.shape[0], u is not None, passes)
    if "beta" in x:
        v = written(gate, k, v, column(x["beta"]), S, passes)
    o = product(times(q, gate.start), S, "nt", passes) + product(gate.pairs(q, k), v, "nn", passes)
    if u is not None:
        o = o + jnp.sum(q * u * k, axis=1, keepdims=True) * v
    return o, times(S, gate.total) + product(v, times(k, gate.end), "tn", passes)


def written(gate: Decay, k: Array, v: Array, beta: Array, S: Array, passes: Passes | None) -> Array:
    """The values that the delta rule writes."""
    C = k.shape[0]
    L = jnp.where(rows(C) > columns(C), gate.pairs(k, k) * beta, 0.0)
    r = beta * (v - product(times(k, gate.start), S, "nt", passes))
    return solved(L, r, EXACT if passes is EXACT else THREE)


def times(x: Array, factor: Array | None) -> Array:
    """``x ∘ factor``; ``None`` is one."""
    return x if factor is None else x * factor


def decay(g: Array | None, C: int, exclusive: bool, passes: Passes | None) -> Decay:
    """Of gates ``[C, K]``, ``[1, C]`` or none; ``exclusive`` readers read the state before their token."""
    if g is None:
        return Decay(lambda x, y: jnp.where(rows(C) >= columns(C), product(x, y, "nt", passes), 0.0))
    g = jnp.maximum(g, NOTHING_LEFT)
    return of_tokens(g, passes) if g.shape[0] == 1 else of_channels(g, exclusive, passes)


def of_tokens(g: Array, passes: Passes | None) -> Decay:
    """One gate a token: ``Γ`` is one matrix for all channels."""
    C = g.shape[1]
    t, s = rows(C), columns(C)
    through = jnp.where(t >= s, g, 0.0)  # [t, r]: the gate of r where r ≤ t
    between = product(through, jnp.where(t > s, 1.0, 0.0), "nn", SUMS)  # [t, s]: Σ over s < r ≤ t
    gamma = jnp.where(t >= s, jnp.exp(between), 0.0)
    start, after = (jnp.sum(x, axis=1, keepdims=True) for x in (through, jnp.where(t < s, g, 0.0)))
    total = jnp.sum(g, axis=1, keepdims=True)
    return Decay(lambda x, y: product(x, y, "nt", passes) * gamma, jnp.exp(start), jnp.exp(after), jnp.exp(total))


def of_channels(g: Array, exclusive: bool, passes: Passes | None) -> Decay:
    """A gate per key channel: pairs of blocks of 1, 2, 4 … tokens, each factored about the border between its two blocks.

    ``total`` is the sum over a token's block, ``read`` that from the block's start to the token, ``write`` from there to its
    end; doubling the block adds the total of the other half.
    """
    C = g.shape[0]
    token = jnp.broadcast_to(rows(C)[:, :1], g.shape)
    total, read, write = g, jnp.zeros_like(g) if exclusive else g, jnp.zeros_like(g)
    levels = []
    b = 1
    while b < C:
        levels.append((b, jnp.exp(read), jnp.exp(write)))
        other, odd = swapped(total, b), token & b != 0
        read, write, total = read + jnp.where(odd, other, 0.0), write + jnp.where(odd, 0.0, other), total + other
        b *= 2
    t, s = rows(C), columns(C)

    def pairs(x: Array, y: Array) -> Array:
        A = jnp.zeros((C, C), jnp.float32) if exclusive else jnp.where(t == s, jnp.sum(x * y, axis=1, keepdims=True), 0.0)
        for b, readers, writers in levels:
            A = jnp.where(neighbours(C, b), product(x * readers, y * writers, "nt", passes), A)
        return A

    return Decay(pairs, jnp.exp(read), jnp.exp(write), jnp.exp(total[:1]))
