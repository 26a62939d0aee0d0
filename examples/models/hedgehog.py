"""Hedgehog attention (Zhang et al. 2024): linear attention whose feature map learns to give the weights of softmax.

Trained from scratch it is a mixer like any other. To convert a model, build it :meth:`from_softmax`, minimise
:meth:`distillation_loss` on the hidden states of the model (only the map learns), then put it in the softmax's place.
"""

from __future__ import annotations

from typing import Any, Self

import linattn
import torch
from linattn.feature_maps import Hedgehog, distillation_loss
from torch import Tensor, nn

from .blocks import Attention, rotary


class HedgehogAttention(nn.Module):
    """Multi-head attention with ``φ(x) = [exp(x W), exp(−x W)]``, ``W [K, K]`` a head: ``4 D² + D K`` parameters."""

    def __init__(self, width: int, heads: int, causal: bool = True, softmax: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.softmax = heads, causal, softmax
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.W = nn.Parameter(torch.from_numpy(Hedgehog.init(heads, width // heads)["W"]))

    @classmethod
    def from_softmax(cls, attention: Attention, softmax: bool = False) -> Self:
        """The same projections, shared, and an untrained map."""
        converted = cls(attention.q.in_features, attention.heads, attention.causal, softmax)
        for name in ("q", "k", "v", "out"):
            setattr(converted, name, getattr(attention, name))
        return converted

    @property
    def map(self) -> Hedgehog:
        return Hedgehog(self.W, softmax=self.softmax)

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        q, k = self.queries_and_keys(x, position)
        v = self.v(x).unflatten(-1, (self.heads, -1))
        options = {"initial_state": state, "output_final_state": True} if self.causal else {"causal": False}
        o, state = linattn.linear_attn(q, k, v, feature_map=self.map, normalize=True, **options)
        return self.out(o.flatten(2)), state

    def distillation_loss(self, x: Tensor) -> Tensor:
        """Eq. 4 on hidden states ``x [B, T, D]``: gradients reach the map alone."""
        q, k = (y.detach() for y in self.queries_and_keys(x, 0))
        return distillation_loss(self.map, q, k, causal=self.causal)

    def queries_and_keys(self, x: Tensor, position: int) -> tuple[Tensor, Tensor]:
        q, k = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k))
        return rotary(q, position), rotary(k, position)
