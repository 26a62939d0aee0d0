# pyright: basic
"""Kimi Delta Attention (Kimi Linear, 2025)."""

from __future__ import annotations

from typing import Any

from ... import gates
from ..grouped import SharedByValues
from ..initial import decay_rates, inverse_softplus_steps
from ..span import Span


class KimiDeltaAttention(SharedByValues):
    """Kimi Delta Attention: ``S' = Diag(e^g) S⁻``, ``S = S' + kᵀ β (v − k S')``, a decay per key channel from a projection of
    low rank, ``g = −e^A softplus(x W₁ W₂ + b)`` (Kimi Linear, Kimi Team 2025, §3).

    The output is normed and gated by ``σ(x G₁ G₂ + c)``. Rates ``e^A`` are drawn uniformly from 1 to 16, steps ``softplus(b)``
    log-uniformly from 0.001 to 0.1, matrices uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 2048.
        expand_v: Width of a value over that of a key. Default 1.
        head_dim: Width of a key. Default 128.
        num_heads: Heads of queries and keys. Default 16.
        num_v_heads: Heads of values, a multiple of ``num_heads``. Default ``num_heads``.
        use_short_conv: Whether short convolutions follow the projections; else SiLU does. Default True.
        allow_neg_eigval: ``β = 2σ(x W_b)`` (Grazzi et al. 2024). Default False.
        lower_bound: The least log decay, below zero: ``g = lower_bound · σ(e^A (x W₁ W₂ + b))``, with ``A`` zero at first.
            Default none: the softplus above.
        conv_size: Width ``W`` of the convolutions. Default 4.
        conv_bias: Whether they have a bias. Default False.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "kda", "Kimi Team 2025, §3"

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        convolution = (conv_size, conv_bias) if use_short_conv else None
        values = self.project(make, head_dim, expand_v, num_heads, num_v_heads, convolution)
        self.allow_neg_eigval, self.lower_bound = allow_neg_eigval, lower_bound
        decays = self.num_v_heads * head_dim
        low = self.head_v_dim
        self.f_proj = make.chain({"0": make.linear(hidden_size, low), "1": make.linear(low, decays)})
        rates = decay_rates(make, self.num_v_heads, 1.0, 16.0 if lower_bound is None else 1.0)
        self.A_log = make.parameter(rates, wide=True)
        self.dt_bias = make.parameter(inverse_softplus_steps(make, decays), wide=True)
        self.g_proj = make.chain({"0": make.linear(hidden_size, low), "1": make.linear(low, values, True)})
        self.o_norm = make.part("GatedRMSNorm", self.head_v_dim, norm_eps, "sigmoid")

    def mix(self, x: Any, span: Span) -> Any:
        q, k, v = self.split(x, span)
        g = self.heads(self.f_proj["1"](self.f_proj["0"](x)), self.head_k_dim)
        beta_map = "2sigmoid" if self.allow_neg_eigval else "sigmoid"
        o = span.attend("kda", q, k, v, g, self.b_proj(x), qk_norm="l2", gate=self.gate(), beta_map=beta_map)
        z = self.heads(self.g_proj["1"](self.g_proj["0"](x)), self.head_v_dim)
        return self.o_proj(self.flat(self.o_norm(o, z)))

    def gate(self) -> Any:
        """What makes log decays of their projection."""
        A_log, dt_bias = self.value(self.A_log), self.value(self.dt_bias).reshape(-1, self.head_k_dim)
        if self.lower_bound is None:
            return gates.Softplus(A_log, dt_bias)
        return gates.BoundedSigmoid(A_log, dt_bias, self.lower_bound)
