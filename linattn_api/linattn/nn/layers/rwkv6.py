# pyright: basic
"""RWKV-6, "Finch" (Peng et al. 2024)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import gates
from ..initial import xavier
from ..mixer import Mixer, width
from ..span import Span

MIXED = 5
"""Receptance, decay, key, value and gate are each of a token mixed with the one before."""


class RWKV6(Mixer):
    """RWKV-6's time mixing: ``S = Diag(e^g) S⁻ + kᵀv``, ``o = r (S⁻ + Diag(u) kᵀv)``, ``g = −e^{w}``
    (Peng et al. 2024, "Eagle and Finch", §4).

    Each projection is of a token mixed with the one before, by weights that depend on the data through a projection of low
    rank. The output of each head is normed, gated by SiLU and projected. Decays, bonus and mixing weights start as the authors
    set them, by the place of the layer in the model; matrices are drawn as by Xavier with gain ``2^{−2.5}``.

    Args:
        hidden_size: ``D``. Default 1024.
        expand_k: Width of all keys over ``D``. Default 0.5.
        expand_v: Width of all values over ``D``. Default 1.
        num_heads: Heads. Default 4.
        proj_low_rank_dim: Rank of the mixing weights. Default 32.
        gate_low_rank_dim: Rank of the decay's projection. Default 64.
        elementwise_affine: Whether the norm has weight and bias. Default True.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        num_hidden_layers: Layers of the model. Default 1.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "rwkv6", "Peng et al. 2024, §4"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        num_hidden_layers: int = 1,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        keys = width("RWKV6", "expand_k", hidden_size, expand_k, num_heads)
        values = width("RWKV6", "expand_v", hidden_size, expand_v, num_heads)
        self.num_heads, self.head_k_dim, self.head_v_dim = num_heads, keys // num_heads, values // num_heads
        self.rank = proj_low_rank_dim

        first = make.part("LerpLinear", hidden_size, MIXED * proj_low_rank_dim, learned=True)
        last = make.linear(MIXED * proj_low_rank_dim, hidden_size)
        make.assign(first.linear.weight, make.full((MIXED * proj_low_rank_dim, hidden_size), 0.0))
        make.assign(last.weight, make.uniform((hidden_size, MIXED * proj_low_rank_dim), -0.01, 0.01))
        self.x_proj = make.chain({"0": first, "2": last})
        mu, x_bias = mixing(hidden_size, layer_idx, num_hidden_layers)
        make.assign(first.mu, mu)
        self.x_bias = make.parameter(x_bias)
        self.r_proj = self._projection(make, hidden_size, keys)
        self.w_proj = make.part("LerpLinear", hidden_size, keys, gate_low_rank_dim)
        self.k_proj = self._projection(make, hidden_size, keys)
        self.v_proj = self._projection(make, hidden_size, values)
        self.g_proj = self._projection(make, hidden_size, values)
        speed, bonus = decay_and_bonus(keys, layer_idx, num_hidden_layers)
        make.assign(self.w_proj.linear.lora["2"].bias, speed)
        self.bonus = make.parameter(bonus.reshape(num_heads, -1))
        self.g_norm = make.part("GroupNorm", num_heads, values, norm_eps, elementwise_affine)
        self.o_proj = make.linear(values, hidden_size)
        make.assign(self.o_proj.weight, xavier(make, hidden_size, values, 2**-2.5))

    @staticmethod
    def _projection(make: Any, inputs: int, outputs: int) -> Any:
        made = make.part("LerpLinear", inputs, outputs)
        make.assign(made.linear.weight, xavier(make, outputs, inputs, 2**-2.5))
        return made

    def mix(self, x: Any, span: Span) -> Any:
        delta = span.step(x)
        r, w, k, v, g = (
            getattr(self, f"{name}_proj")(x, delta, mu) for name, mu in zip("rwkvg", self.weights(x, delta), strict=True)
        )
        r, w, k = (self.heads(y, self.head_k_dim) for y in (r, w, k))
        gate = gates.NegExp()
        o = span.attend("rwkv6", r, k, self.heads(v, self.head_v_dim), w, self.value(self.bonus), gate=gate, scale=1.0)
        return self.o_proj(self.g_norm(o) * self.functions.silu(g))

    def weights(self, x: Any, delta: Any) -> list[Any]:
        """How much of the token before goes into each of the five projections, ``[B, T, D]`` each."""
        low = self.functions.tanh(self.x_proj["0"](x, delta)).reshape(*x.shape[:2], MIXED, self.rank)
        matrices = self.value(self.x_proj["2"].weight).reshape(-1, MIXED, self.rank)
        bias = self.value(self.x_bias)
        return [low[:, :, i] @ matrices[:, i].T + bias[i] for i in range(MIXED)]


def place(layer: int, layers: int) -> tuple[float, float]:
    """The layer's place: from 0 to 1, and from 1 to nearly 0."""
    return layer / max(layers - 1, 1), 1.0 - layer / layers


def mixing(width: int, layer: int, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """First weights of the token before: of all ``[D]``, and of each projection ``[5, D]`` (receptance, decay, key, value,
    gate)."""
    rising, falling = place(layer, layers)
    channel = np.arange(width) / width
    slow, fast = 1 - channel**falling, 1 - channel ** (0.5 * falling)
    return slow.astype(np.float32), np.stack([fast, slow, slow, slow - 0.3 * rising, fast]).astype(np.float32)


def decay_and_bonus(width: int, layer: int, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """First decays, before ``−exp``, and bonus of every key channel ``[width]``."""
    rising, _ = place(layer, layers)
    channel = np.arange(width) / max(width - 1, 1)
    zigzag = ((np.arange(width) + 1) % 3 - 1) * 0.1
    speed = -6 + 5 * channel ** (0.7 + 1.3 * rising)
    return speed.astype(np.float32), (rising * (1 - channel) + zigzag).astype(np.float32)
