"""The model around a mixer: the same embeddings, convolution, norms and head for all, and as many parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import linattn
import torch
from linattn.nn.torch import SwiGLU  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.nn.functional import pad

Carried = dict[str, Tensor]


class ScaleNorm(nn.Module):
    """``g · x / |x|`` with one number ``g``, at first ``√D`` (Nguyen & Salazar 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Block(nn.Module):
    """``x + mixer(conv(norm(x)))``, then ``x + mlp(norm(x))``, the MLP as wide as leaves ``12 D²`` parameters.

    The convolution, over four tokens and channel by channel, is that of every mixer: none has one of its own.
    """

    def __init__(self, width: int, mixer: nn.Module, convolution: bool, norm: Callable[[int], nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.norm, self.mixer = norm(width), mixer
        self.taps = nn.Parameter(torch.empty(width, 4).uniform_(-0.5, 0.5)) if convolution else None
        hidden = round((12 * width**2 - sum(p.numel() for p in mixer.parameters())) / (3 * width))
        self.mlp_norm, self.mlp = (norm(width), SwiGLU(width, hidden)) if hidden > width // 8 else (None, None)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        h = self.norm(x)
        if self.taps is not None:
            h = convolved(h, self.taps)
        x = x + (self.mixer(h) if cache is None else self.mixer(h, cache=cache))
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x))


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """:func:`linattn.short_conv` of ``x [B, T, D]``, written out: stacked models have other taps each, which the operator takes
    one after the other."""
    T, width = x.shape[1], taps.shape[-1]
    padded = pad(x, (0, 0, width - 1, 0))
    return sum(padded[:, i : i + T] * taps[:, i] for i in range(width))


class Model(nn.Module):
    """Embedding, blocks, norm, and a head that shares the embedding.

    Args:
        symbols: Tokens that there are.
        width: ``D``.
        mixers: One for each block.
        convolution: Whether blocks have one.
        carries: Whether it leaves its states to the next segment; then blocks have no convolution.
        norm: Of the blocks. Default RMS norm.
        half: Whether who trains it is to call it with its parameters as bfloat16.
    """

    def __init__(
        self,
        symbols: int,
        width: int,
        mixers: list[nn.Module],
        convolution: bool,
        carries: bool = False,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        half: bool = False,
    ) -> None:
        super().__init__()
        self.half = half
        if carries and convolution:
            raise ValueError("Model: a convolution leaves no state to the next segment: make it with convolution=False")
        self.embedding, self.carries = nn.Embedding(symbols, width), carries
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(Block(width, mixer, convolution, norm) for mixer in mixers)
        self.norm = norm(width)

    def forward(self, ids: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        """Logits ``[B, T, symbols]`` of ``ids [B, T]``, and the states after them."""
        cache = linattn.nn.Cache.from_state_dict(carried) if self.carries else None
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cache)
        return self.norm(x) @ self.embedding.weight.mT, {} if cache is None else cache.state_dict()


def of(mixer: Callable[..., nn.Module], **options: Any) -> Callable[[Any, Any], nn.Module]:
    """What makes a model of a setting and a task: ``mixer(setting, layer_idx)`` in each of its blocks."""

    def make(setting: Any, task: Any) -> nn.Module:
        mixers = [mixer(setting, i) for i in range(setting.depth)]
        return Model(task.symbols, setting.width, mixers, setting.convolution, half=setting.half, **options)

    return make
