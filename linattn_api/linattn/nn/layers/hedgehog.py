# pyright: basic
"""Hedgehog attention (Zhang et al. 2024)."""

from __future__ import annotations

from typing import Any, Self

from ... import feature_maps
from ..mixer import Mixer, choice, width
from ..span import Span


class Hedgehog(Mixer):
    """Hedgehog attention: linear attention whose feature map ``φ(x) = [exp(x W), exp(−x W)]``, ``W [K, K]`` a head, learns to
    give the weights of softmax (Zhang et al. 2024, eqs. 3-4).

    Trained from scratch it is a layer like any other. To convert a model, make it :meth:`from_attention`, minimise
    :meth:`distillation_loss` on hidden states of the model (only the map learns), then put it in the attention's place.
    ``4 D² + D K`` parameters; ``W`` starts as the identity, other matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 1024.
        num_heads: Heads. Default 8.
        causal: Whether a token sees those before it only; else there is no cache. Default True.
        activation: ``"exp"``, or ``"softmax"``: features that stay below one. Default ``"exp"``.
        rotary: Whether queries and keys get rotary positions. Default True.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "linear_attn", "Zhang et al. 2024, eqs. 3-4"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        num_heads: int = 8,
        causal: bool = True,
        activation: str = "exp",
        rotary: bool = True,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        self.head_dim = width("Hedgehog", "1", hidden_size, 1.0, num_heads) // num_heads
        self.num_heads, self.causal, self.rotary = num_heads, causal, rotary
        self.activation = choice("Hedgehog", "activation", activation, ("exp", "softmax"))
        self.q_proj = make.linear(hidden_size, hidden_size)
        self.k_proj = make.linear(hidden_size, hidden_size)
        self.v_proj = make.linear(hidden_size, hidden_size)
        self.o_proj = make.linear(hidden_size, hidden_size)
        self.W = make.parameter(feature_maps.Hedgehog.init(num_heads, self.head_dim)["W"])

    @classmethod
    def from_attention(cls, attention: Any, num_heads: int, **options: Any) -> Self:
        """A layer with the projections of softmax attention, shared with it, and an untrained map.

        Args:
            attention: A module with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``, all ``[D, D]`` without bias.
            num_heads: Its heads.
            options: Others of the layer.
        """
        layer = cls(attention.q_proj.weight.shape[1], num_heads=num_heads, **options)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer, name, getattr(attention, name))
        return layer

    @property
    def map(self) -> feature_maps.Hedgehog:
        """The feature map, with the parameters of the layer."""
        return feature_maps.Hedgehog(self.value(self.W), softmax=self.activation == "softmax")

    def mix(self, x: Any, span: Span) -> Any:
        q, k = self.queries_and_keys(x, span)
        v = self.heads(self.v_proj(x), self.head_dim)
        direction = {} if self.causal else self.whole(span)
        o = span.attend("linear_attn", q, k, v, feature_map=self.map, normalize=True, **direction)
        return self.o_proj(self.flat(o))

    def queries_and_keys(self, x: Any, span: Span) -> tuple[Any, Any]:
        """``[B, T, H, K]`` each."""
        q, k = self.heads(self.q_proj(x), self.head_dim), self.heads(self.k_proj(x), self.head_dim)
        if not self.rotary:
            return q, k
        positions = span.positions()
        return self.rotated(q, positions), self.rotated(k, positions)

    def distillation_loss(self, x: Any) -> Any:
        """Cross entropy between the weights of softmax and the map's on hidden states ``x [B, T, D]`` (eq. 4): gradients reach
        the map alone."""
        q, k = self.queries_and_keys(x, Span(self, x, None, None, {}, False))
        return feature_maps.distillation_loss(self.map, self.constant(q), self.constant(k), causal=self.causal)
