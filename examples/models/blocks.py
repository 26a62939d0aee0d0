"""What the models share: a language model around mixers of tokens, its MLP, rotary positions, and the softmax baseline.

A mixer is a module ``mixer(x, state=None, position=0) -> (y, state)``: ``x`` and ``y`` are ``[B, T, D]``, ``position`` is
that of the first token. Called with the state that it returned, it goes on where it stopped, so decoding is a call with
``T = 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

Mixer = nn.Module


def rotary(x: Tensor, position: int = 0, base: float = 10_000.0) -> Tensor:
    """Rotate pairs of channels by angles that grow with the position (RoPE, Su et al. 2021): ``[B, T, H, K]``, ``K`` even."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (torch.arange(x.shape[1], device=x.device)[:, None] + position) * rates
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class SwiGLU(nn.Module):
    """``(swish(x U) ∘ x V) W`` (Shazeer 2020); ``8 D²`` parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Multi-head softmax attention with rotary positions; its state is every key and value so far. ``4 D²`` parameters."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        q, k = rotary(q, position), rotary(k, position)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        heads = (y.transpose(1, 2) for y in (q, k, v))
        if state is None:
            o = scaled_dot_product_attention(*heads, is_causal=self.causal)
        else:  # query i stands at the end of the keys: it sees those up to i places before the last
            T, S = q.shape[1], k.shape[1]
            o = scaled_dot_product_attention(*heads, attn_mask=torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T))
        return self.out(o.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, width: int, mixer: Mixer) -> None:
        super().__init__()
        self.norm_mixer, self.mixer = nn.RMSNorm(width), mixer
        self.norm_mlp, self.mlp = nn.RMSNorm(width), SwiGLU(width)

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        mixed, state = self.mixer(self.norm_mixer(x), state, position)
        x = x + mixed
        return x + self.mlp(self.norm_mlp(x)), state


class LanguageModel(nn.Module):
    """Embedding, layers, norm, and a head that shares the embedding.

    Args:
        symbols: Size of the vocabulary.
        width: ``D``.
        layers: Called with ``(x, state, position)`` one after another; a :class:`Block` adds the MLP to a mixer.
    """

    def __init__(self, symbols: int, width: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        nn.init.normal_(self.embed.weight, std=width**-0.5)
        self.layers, self.norm = nn.ModuleList(layers), nn.RMSNorm(width)

    def forward(self, ids: Tensor, states: Sequence[Any] | None = None, position: int = 0) -> tuple[Tensor, list[Any]]:
        """Logits ``[B, T, symbols]`` of what follows each of ``ids [B, T]``, and the states after the last."""
        x, after = self.embed(ids), []
        for layer, state in zip(self.layers, states or [None] * len(self.layers), strict=True):
            x, state = layer(x, state, position)
            after.append(state)
        return self.norm(x) @ self.embed.weight.mT, after


def transformer(symbols: int, width: int, depth: int, mixer: Callable[[], Mixer]) -> LanguageModel:
    """A language model of ``depth`` blocks, each with a mixer of its own."""
    return LanguageModel(symbols, width, [Block(width, mixer()) for _ in range(depth)])


@torch.no_grad()
def generate(model: LanguageModel, ids: Tensor, length: int) -> Tensor:
    """Continue ``ids [B, T]`` greedily: the prompt in one call, then token by token from the states."""
    logits, states = model(ids)
    for position in range(ids.shape[1], ids.shape[1] + length):
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        logits, states = model(ids[:, -1:], states, position)
    return ids


def parameter_count(module: nn.Module) -> int:
    """How many numbers a module learns."""
    return sum(p.numel() for p in module.parameters())
