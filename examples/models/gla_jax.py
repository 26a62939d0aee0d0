"""The GLA Transformer of :mod:`models.gla` in JAX, as Equinox modules: a model is a pytree of arrays.

``model(ids, states=None) -> (logits, states)``, as in PyTorch; GLA needs no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import linattn
from jax import Array

RANK = 16


def matrix(key: Array, rows: int, columns: int) -> Array:
    """``[rows, columns]``, applied from the right."""
    return jax.random.normal(key, (rows, columns)) * rows**-0.5


def rms_norm(x: Array, weight: Array) -> Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * weight + bias


class GatedLinearAttention(eqx.Module):
    """``y = (swish(x W_r) ∘ norm(o)) W_o``, ``o = GLA(x W_q, x W_k, x W_v, logsigmoid(x W_1 W_2 + b)/τ)``."""

    q: Array
    k: Array
    v: Array
    gate: Array
    out: Array
    decay_in: Array
    decay_out: Array
    decay_bias: Array
    norm: Array
    norm_bias: Array
    heads: int = eqx.field(static=True)

    def __init__(self, key: Array, width: int, heads: int) -> None:
        keys, D = iter(jax.random.split(key, 7)), width
        self.heads = heads
        self.q, self.k = matrix(next(keys), D, D // 2), matrix(next(keys), D, D // 2)
        self.v, self.gate, self.out = (matrix(next(keys), D, D) for _ in range(3))
        self.decay_in, self.decay_out = matrix(next(keys), D, RANK), matrix(next(keys), RANK, D // 2)
        self.decay_bias = jnp.zeros(D // 2)
        self.norm, self.norm_bias = jnp.ones(D // heads), jnp.zeros(D // heads)

    def __call__(self, x: Array, state: Array | None) -> tuple[Array, Array]:
        B, T, D = x.shape
        q, k, v = ((x @ w).reshape(B, T, self.heads, -1) for w in (self.q, self.k, self.v))
        g = linattn.gates.gla((x @ self.decay_in @ self.decay_out + self.decay_bias).reshape(q.shape))
        o, state = linattn.gla(q, k, v, g, initial_state=state, output_final_state=True)
        o = layer_norm(o, self.norm, self.norm_bias).reshape(B, T, D)
        return (jax.nn.silu(x @ self.gate) * o) @ self.out, state


class SwiGLU(eqx.Module):
    """``(swish(x U) ∘ x V) W``."""

    gate: Array
    up: Array
    down: Array

    def __init__(self, key: Array, width: int) -> None:
        keys, hidden = jax.random.split(key, 3), 8 * width // 3
        self.gate, self.up = matrix(keys[0], width, hidden), matrix(keys[1], width, hidden)
        self.down = matrix(keys[2], hidden, width)

    def __call__(self, x: Array) -> Array:
        return (jax.nn.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Block(eqx.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    norm_mixer: Array
    mixer: GatedLinearAttention
    norm_mlp: Array
    mlp: SwiGLU

    def __init__(self, key: Array, width: int, heads: int) -> None:
        first, second = jax.random.split(key)
        self.norm_mixer, self.norm_mlp = jnp.ones(width), jnp.ones(width)
        self.mixer, self.mlp = GatedLinearAttention(first, width, heads), SwiGLU(second, width)

    def __call__(self, x: Array, state: Array | None) -> tuple[Array, Array]:
        mixed, state = self.mixer(rms_norm(x, self.norm_mixer), state)
        x = x + mixed
        return x + self.mlp(rms_norm(x, self.norm_mlp)), state


class LanguageModel(eqx.Module):
    """Embedding, blocks, norm, and a head that shares the embedding."""

    embed: Array
    blocks: list[Block]
    norm: Array

    def __init__(self, key: Array, symbols: int, width: int, depth: int, heads: int = 4) -> None:
        first, *others = jax.random.split(key, depth + 1)
        self.embed = jax.random.normal(first, (symbols, width)) * width**-0.5
        self.blocks = [Block(key, width, heads) for key in others]
        self.norm = jnp.ones(width)

    def __call__(self, ids: Array, states: Sequence[Any] | None = None) -> tuple[Array, list[Array]]:
        """Logits ``[B, T, symbols]`` of what follows each of ``ids [B, T]``, and the states after the last."""
        x, after = self.embed[ids], []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state)
            after.append(state)
        return rms_norm(x, self.norm) @ self.embed.T, after
