# pyright: basic
"""Gated linear attention (Yang et al. 2024)."""

from __future__ import annotations

from typing import Any

from ... import gates
from ..grouped import SharedByQueries
from ..span import Span


class GatedLinearAttention(SharedByQueries):
    """Gated linear attention: ``S = Diag(e^g) S⁻ + kᵀv``, ``g = logsigmoid(x W₁ W₂ + b) / τ`` (GLA, Yang et al. 2024, §4.4).

    The output of each head is normed, gated by ``silu(x W_g)`` and projected: ``4 D²`` parameters at the defaults. Every
    matrix is drawn uniformly from ``±1/√in``; with ``b`` near zero and ``τ = 16`` a channel keeps 0.96 of its state a token.

    Args:
        hidden_size: ``D``. Default 1024.
        expand_k: Width of all keys over ``D``. Default 0.5.
        expand_v: Width of all values over ``D``. Default 1.
        num_heads: Heads of queries. Default 4.
        num_kv_heads: Heads of keys and values, each shared by a group of queries. Default ``num_heads``.
        feature_map: Map of queries and keys that keeps their width, as ``feature_map=`` of :func:`linattn.gla`; its arrays
            are the first values of parameters of the layer. Default none.
        use_short_conv: Whether short convolutions follow the projections. Default False.
        conv_size: Their width ``W``. Default 4.
        conv_bias: Whether they have a bias. Default False.
        use_output_gate: Whether the output is gated. Default True.
        elementwise_affine: Whether the norm has a weight. Default True.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        gate_logit_normalizer: ``τ``. Default 16.
        gate_low_rank_dim: Rank of the gate's projection. Default 16.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "gla", "Yang et al. 2024, §4.4"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: Any = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: float = 16,
        gate_low_rank_dim: int = 16,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        convolution = (conv_size, conv_bias) if use_short_conv else None
        keys, values = self.project(make, expand_k, expand_v, num_heads, num_kv_heads, convolution)
        self.make_map(make, feature_map)
        self.gate_logit_normalizer = gate_logit_normalizer
        first, last = make.linear(hidden_size, gate_low_rank_dim), make.linear(gate_low_rank_dim, keys, True)
        self.gk_proj = make.chain({"0": first, "1": last})
        self.make_norm(make, values, use_output_gate, norm_eps, elementwise_affine)

    def mix(self, x: Any, span: Span) -> Any:
        q, k, v = self.projected(x, span, "qkv")
        g = self.heads(self.gk_proj["1"](self.gk_proj["0"](x)), self.head_k_dim)
        q, k, v = self.heads(q, self.head_k_dim), self.heads(k, self.head_k_dim), self.heads(v, self.head_v_dim)
        k, v, g = (self.grouped(y, q.shape[2]) for y in (k, v, g))
        gate = gates.LogSigmoid(self.gate_logit_normalizer)
        o = span.attend("gla", q, k, v, g, gate=gate, feature_map=self.phi(span))
        return self.output(o, x)
