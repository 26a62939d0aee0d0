# pyright: basic
"""RWKV-7, "Goose" (Peng et al. 2025)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OptionError
from ..mixer import Mixer, width
from ..span import Span
from .rwkv6 import place

SLOWEST = -0.6065306597126334
"""``−e^{−1/2}``: the least log decay."""


class RWKV7(Mixer):
    """RWKV-7's time mixing: ``S = Diag(e^g) S⁻ + (κ ∘ a)ᵀ (−κ S⁻) + kᵀv`` with keys ``κ`` of length one and
    ``g = −e^{−1/2} σ(w)`` (Peng et al. 2025, "RWKV-7 Goose", §4).

    Each projection is of a token mixed with the one before by learned weights; decay, in-context rate of learning ``a``, the
    mixing with the first layer's values and the gate come from projections of low rank. The output of each head is normed,
    what the present token adds by itself comes on top, and all is gated and projected. Every parameter starts as the authors
    set it, by the place of the layer in the model; the last projection starts at zero.

    Args:
        hidden_size: ``D``. Default 1024.
        head_dim: Width of a head's key. Default 64.
        num_heads: Heads, where ``head_dim`` is ``None``.
        value_dim: Width of all values. Default ``hidden_size``.
        decay_low_rank_dim: Rank of the decay's projection. Default by width, as the authors have it.
        gate_low_rank_dim: Of the gate's; likewise.
        a_low_rank_dim: Of the rate of learning's; likewise.
        v_low_rank_dim: Of the mixing with the first layer's values; likewise.
        elementwise_affine: Whether the norm has weight and bias. Default True.
        norm_eps: ``ε`` of the norm over ``head_dim``. Default 1e-5.
        num_hidden_layers: Layers of the model. Default 1.
        layer_idx: Index of the layer in its model; the first leaves its values to the others in ``shared``. Default 0.
    """

    operator, paper = "dplr", "Peng et al. 2025, §4"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        head_dim: int | None = 64,
        num_heads: int | None = None,
        value_dim: int | None = None,
        decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None,
        a_low_rank_dim: int | None = None,
        v_low_rank_dim: int | None = None,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        num_hidden_layers: int = 1,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        if head_dim is None and num_heads is None:
            raise OptionError("RWKV7: give head_dim or num_heads")
        self.num_heads: int = hidden_size // head_dim if head_dim else (num_heads or 1)
        values = width(
            "RWKV7", "value_dim / hidden_size", hidden_size, (value_dim or hidden_size) / hidden_size, self.num_heads
        )
        self.head_dim = width("RWKV7", "1", hidden_size, 1.0, self.num_heads) // self.num_heads
        self.head_v_dim = values // self.num_heads

        def rank(given: int | None, factor: float, scaled: bool = True) -> int:
            by_width = factor * hidden_size**0.5 * (self.head_dim / 64 if scaled else 1) / 32
            return given or max(32, round(by_width) * 32)

        zeros = make.full((1, 1, hidden_size), 0.0)
        for name in "rwkvag":
            setattr(self, f"x_{name}", make.parameter(zeros))
        self.k_k = make.parameter(make.full((hidden_size,), 0.0))
        self.k_a = make.parameter(make.full((hidden_size,), 1.02))
        self.r_k = make.parameter(make.full((self.num_heads, self.head_dim), -0.04))
        self.r_proj = make.linear(hidden_size, hidden_size)
        self.k_proj = make.linear(hidden_size, hidden_size)
        self.v_proj = make.linear(hidden_size, values)
        self.o_proj = make.linear(values, hidden_size)
        self.w_lora = make.part("LowRank", hidden_size, hidden_size, rank(decay_low_rank_dim, 2.5))
        if layer_idx:
            self.v_lora = make.part("LowRank", hidden_size, values, rank(v_low_rank_dim, 1.7), activation=None)
        self.a_lora = make.part("LowRank", hidden_size, hidden_size, rank(a_low_rank_dim, 2.5), activation=None)
        gate_rank = rank(gate_low_rank_dim, 5, scaled=False)
        self.g_lora = make.part("LowRank", hidden_size, values, gate_rank, bias=False, activation="sigmoid")
        self.g_norm = make.part("GroupNorm", self.num_heads, values, self.head_dim * norm_eps, elementwise_affine)
        self._initialise(make, num_hidden_layers, values)

    def _initialise(self, make: Any, layers: int, values: int) -> None:
        """As the authors do."""
        D, K, layer = self.hidden_size, self.head_dim, self.layer_idx
        rising, falling = place(layer, layers)
        channel = np.arange(D)
        line = channel / max(D - 1, 1) - 0.5
        zigzag = (channel % K - (K - 1) / 2) / max((K - 1) / 2, 0.5)
        zigzag = zigzag * abs(zigzag)
        for name, power in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
            mixed = 1 - (channel / D) ** (power * falling)
            make.assign(getattr(self, f"x_{name}"), mixed.reshape(1, 1, D).astype(np.float32))
        decay = -6 + 6 * (channel / max(D - 1, 1)) ** (1 + rising**0.3)
        make.assign(self.w_lora.lora["2"].bias, (decay + 0.5 + 2.5 * zigzag).astype(np.float32))
        make.assign(self.a_lora.lora["2"].bias, (-0.19 + 0.3 * zigzag + 0.4 * line).astype(np.float32))
        make.assign(self.k_k, (0.71 - 0.1 * line).astype(np.float32))
        if layer:
            line_of_values = np.arange(values) / max(values - 1, 1) - 0.5
            make.assign(self.v_lora.lora["2"].bias, (0.73 - 0.4 * line_of_values).astype(np.float32))
        if self.g_norm.weight is not None:
            make.assign(self.g_norm.weight, make.full((values,), ((layer + 1) / layers) ** 0.7))
        make.assign(self.r_proj.weight, make.orthogonal((D, D)))
        make.assign(self.k_proj.weight, make.orthogonal((D, D), 0.1))
        make.assign(self.v_proj.weight, make.orthogonal((values, D)))
        make.assign(self.o_proj.weight, make.full((D, values), 0.0))

    def mix(self, x: Any, span: Span) -> Any:
        xr, xw, xk, xv, xa, xg = span.mixed(x, [self.value(getattr(self, f"x_{name}")) for name in "rwkvag"])
        sigmoid, multiply_add, xp = self.functions.sigmoid, self.functions.multiply_add, span.xp
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.values(self.v_proj(xv), xv, span)
        w, a = SLOWEST * sigmoid(self.w_lora(xw)), sigmoid(self.a_lora(xa))
        reads = self.functions.unit(self.heads(k * -self.value(self.k_k), self.head_dim), 1e-24)  # -κ
        k_a = self.value(self.k_a)
        k = k * multiply_add(1 - k_a, a, k_a)
        r, w, k, a = (self.heads(y, self.head_dim) for y in (r, w, k, a))
        v = self.heads(v, self.head_v_dim)
        k, v, reads, a = (xp.astype(y, xp.dtype(r)) for y in (k, v, reads, a))
        o = span.attend("dplr", r, k, v, w, reads, reads * -a, scale=1.0)
        own = (r * k * self.value(self.r_k)).sum(-1)[..., None]
        o = multiply_add(self.heads(self.g_norm(o), self.head_v_dim), own, v)
        return self.o_proj(self.flat(o) * self.g_lora(xg))

    def values(self, v: Any, xv: Any, span: Span) -> Any:
        """Values ``[B, T, HV·V]``, mixed with those of the first layer."""
        if self.layer_idx == 0:
            span.shared["v_first"] = v
            return v
        if "v_first" not in span.shared:
            raise OptionError(
                f"RWKV7 with layer_idx={self.layer_idx} mixes in the values of the first layer: pass the dict that layer 0 was "
                "called with as shared=, as LanguageModel does"
            )
        return v + (span.shared["v_first"] - v) * self.functions.sigmoid(self.v_lora(xv))
