# pyright: basic
"""Multi-scale retention, the layer of RetNet (Sun et al. 2023)."""

from __future__ import annotations

from typing import Any

from ... import gates
from ..grouped import SharedByQueries
from ..span import Span


class RetNet(SharedByQueries):
    """Multi-scale retention: ``S = γ_h S⁻ + kᵀv`` with a fixed decay ``γ_h = 1 − 2^{−5−h}`` a head, and rotary positions
    (RetNet, Sun et al. 2023, eqs. 6-8).

    The output of each head is normed (RMS norm in the place of the paper's group norm, as fla has it), gated by
    ``silu(x W_g)`` and projected: ``8 D²`` parameters at the defaults. Matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 1024.
        expand_k: Width of all keys over ``D``. Default 1.
        expand_v: Width of all values over ``D``. Default 2.
        num_heads: Heads of queries. Default 8.
        num_kv_heads: Heads of keys and values, each shared by a group of queries. Default ``num_heads``.
        feature_map: Map of rotated queries and keys, a name or an object of :mod:`linattn.feature_maps`, whose arrays are
            the first values of parameters of the layer. Default none.
        use_short_conv: Whether short convolutions follow the projections. Default False.
        conv_size: Their width ``W``. Default 4.
        conv_bias: Whether they have a bias. Default False.
        use_output_gate: Whether the output is gated. Default True.
        elementwise_affine: Whether the norm has a weight. Default True.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "simple_gla", "Sun et al. 2023, eqs. 6-8"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand_k: float = 1.0,
        expand_v: float = 2.0,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        feature_map: Any = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        convolution = (conv_size, conv_bias) if use_short_conv else None
        _, values = self.project(make, expand_k, expand_v, num_heads, num_kv_heads, convolution, even=True)
        self.make_map(make, feature_map)
        self.make_norm(make, values, use_output_gate, norm_eps, elementwise_affine)

    def mix(self, x: Any, span: Span) -> Any:
        q, k, v = self.projected(x, span, "qkv")
        positions = span.positions()
        q, k = (self.rotated(self.heads(y, self.head_k_dim), positions) for y in (q, k))
        v = self.heads(v, self.head_v_dim)
        k, v = self.grouped(k, q.shape[2]), self.grouped(v, q.shape[2])
        g = gates.retnet(self.num_heads, like=x)
        o = span.attend("simple_gla", q, k, v, g, feature_map=self.phi(span))
        return self.output(o, x)
