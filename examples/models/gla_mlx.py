"""The GLA Transformer of :mod:`models.gla` in MLX, as ``mlx.nn`` modules.

``model(ids, states=None) -> (logits, states)``, as in PyTorch; GLA needs no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import linattn
import mlx.core as mx
from mlx import nn

RANK = 16


class GatedLinearAttention(nn.Module):
    """``y = (swish(x W_r) ∘ norm(o)) W_o``, ``o = GLA(x W_q, x W_k, x W_v, logsigmoid(x W_1 W_2 + b)/τ)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width // 2, bias=False)
        self.k = nn.Linear(width, width // 2, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.decay_in = nn.Linear(width, RANK, bias=False)
        self.decay_out = nn.Linear(RANK, width // 2)
        self.norm = nn.LayerNorm(width // heads)

    def __call__(self, x: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        B, T, D = x.shape
        q, k, v = (linear(x).reshape(B, T, self.heads, -1) for linear in (self.q, self.k, self.v))
        g = linattn.gates.gla(self.decay_out(self.decay_in(x)).reshape(q.shape))
        o, state = linattn.gla(q, k, v, g, initial_state=state, output_final_state=True)
        return self.out(nn.silu(self.gate(x)) * self.norm(o).reshape(B, T, D)), state


class SwiGLU(nn.Module):
    """``(swish(x U) ∘ x V) W``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(nn.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_mixer, self.mixer = nn.RMSNorm(width, eps=1e-6), GatedLinearAttention(width, heads)
        self.norm_mlp, self.mlp = nn.RMSNorm(width, eps=1e-6), SwiGLU(width)

    def __call__(self, x: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        mixed, state = self.mixer(self.norm_mixer(x), state)
        x = x + mixed
        return x + self.mlp(self.norm_mlp(x)), state


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and a head that shares the embedding."""

    def __init__(self, symbols: int, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = [Block(width, heads) for _ in range(depth)]
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def __call__(self, ids: mx.array, states: Sequence[Any] | None = None) -> tuple[mx.array, list[mx.array]]:
        """Logits ``[B, T, symbols]`` of what follows each of ``ids [B, T]``, and the states after the last."""
        x, after = self.embed(ids), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state)
            after.append(state)
        return self.embed.as_linear(self.norm(x)), after
