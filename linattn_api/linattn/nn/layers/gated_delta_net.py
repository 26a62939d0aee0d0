# pyright: basic
"""Gated DeltaNet (Yang et al. 2025)."""

from __future__ import annotations

from typing import Any

from ... import gates
from ..grouped import SharedByValues
from ..initial import decay_rates, inverse_softplus_steps
from ..mixer import choice
from ..span import Span


class GatedDeltaNet(SharedByValues):
    """Gated DeltaNet: ``S' = e^g S⁻``, ``S = S' + kᵀ β (v − k S')``, ``g = −e^A softplus(x W_a + b)``, ``β = σ(x W_b)``
    (Yang et al. 2025, "Gated Delta Networks", eq. 10 and figure 1).

    ``6 D²`` parameters where ``num_heads · head_dim = 0.75 D``. Rates ``e^A`` are drawn uniformly from 0 to 16, steps
    ``softplus(b)`` log-uniformly from 0.001 to 0.1 (as in Mamba-2), matrices uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 2048.
        expand_v: Width of a value over that of a key. Default 2.
        head_dim: Width of a key. Default 256.
        num_heads: Heads of queries and keys. Default 6.
        num_v_heads: Heads of values, a multiple of ``num_heads``. Default ``num_heads``.
        use_gate: Whether the output is gated. Default True.
        use_short_conv: Whether short convolutions follow the projections; else SiLU does. Default True.
        allow_neg_eigval: ``β = 2σ(x W_b)`` (Grazzi et al. 2024). Default False.
        conv_size: Width ``W`` of the convolutions. Default 4.
        conv_bias: Whether they have a bias. Default False.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        output_gate_activation: ``"silu"`` (or ``"swish"``, the same) or ``"sigmoid"``. Default ``"silu"``.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "gated_delta_rule", "Yang et al. 2025, eq. 10"

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        expand_v: float = 2.0,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "silu",
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        gates_by = ("silu", "swish", "sigmoid")
        activation = choice("GatedDeltaNet", "output_gate_activation", output_gate_activation, gates_by)
        convolution = (conv_size, conv_bias) if use_short_conv else None
        values = self.project(make, head_dim, expand_v, num_heads, num_v_heads, convolution)
        self.use_gate, self.allow_neg_eigval = use_gate, allow_neg_eigval
        self.a_proj = make.linear(hidden_size, self.num_v_heads)
        self.A_log = make.parameter(decay_rates(make, self.num_v_heads, 0.0, 16.0), wide=True)
        self.dt_bias = make.parameter(inverse_softplus_steps(make, self.num_v_heads), wide=True)
        if use_gate:
            self.g_proj = make.linear(hidden_size, values)
            act = "sigmoid" if activation == "sigmoid" else "silu"
            self.o_norm = make.part("GatedRMSNorm", self.head_v_dim, norm_eps, act)
        else:
            self.o_norm = make.part("RMSNorm", self.head_v_dim, norm_eps)

    def mix(self, x: Any, span: Span) -> Any:
        q, k, v = self.split(x, span)
        o = span.attend(
            "gated_delta_rule",
            q,
            k,
            v,
            self.a_proj(x),
            self.b_proj(x),
            qk_norm="l2",
            gate=gates.Softplus(self.value(self.A_log), self.value(self.dt_bias)),
            beta_map="2sigmoid" if self.allow_neg_eigval else "sigmoid",
        )
        o = self.o_norm(o, self.heads(self.g_proj(x), self.head_v_dim)) if self.use_gate else self.o_norm(o)
        return self.o_proj(self.flat(o))
