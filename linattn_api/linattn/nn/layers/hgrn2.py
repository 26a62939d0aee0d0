# pyright: basic
"""HGRN-2 (Qin et al. 2024)."""

from __future__ import annotations

from typing import Any

from ... import gates
from ...errors import OptionError
from ..grouped import make_projections
from ..mixer import Mixer
from ..span import Span


class HGRN2(Mixer):
    """HGRN-2: ``S = Diag(f) S⁻ + (1 − f)ᵀ i``, ``f = b + (1 − b) σ(x W_f)``: what a channel forgets makes room for what is new
    (Qin et al. 2024, "HGRN2: Gated Linear RNNs with State Expansion", eqs. 4-6).

    The output is normed over all heads and projected: ``4 D²`` parameters. Matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 1024.
        expand_ratio: Width of a head's key: ``D / expand_ratio`` heads. Default 128.
        num_heads: Heads, where ``expand_ratio`` is ``None``.
        use_short_conv: Whether short convolutions follow the projections. Default False.
        conv_size: Their width ``W``. Default 4.
        conv_bias: Whether they have a bias. Default False.
        lower_bound: ``b``, the least decay, in ``[0, 1)``: 0 in the first layer, larger in later ones (§3.1). Default 0.
        elementwise_affine: Whether the norm has a weight. Default True.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "gla", "Qin et al. 2024 (HGRN2), eqs. 4-6"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand_ratio: int | None = 128,
        num_heads: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        lower_bound: float = 0.0,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        if expand_ratio is None and num_heads is None:
            raise OptionError("HGRN2: give expand_ratio or num_heads")
        self.head_f_dim = expand_ratio or hidden_size // (num_heads or 1)
        self.num_heads = hidden_size // self.head_f_dim
        if not self.num_heads or hidden_size % self.num_heads:
            raise OptionError(
                f"HGRN2: hidden_size / expand_ratio must be a whole number of heads, got {hidden_size} / {expand_ratio}"
            )
        self.head_i_dim, self.lower_bound = hidden_size // self.num_heads, lower_bound
        self.use_short_conv = use_short_conv
        keys = self.num_heads * self.head_f_dim
        convolution = (conv_size, conv_bias) if use_short_conv else None
        make_projections(self, make, (keys, keys, hidden_size), convolution, "qfi", (None, None, None))
        self.g_norm = make.part("RMSNorm", hidden_size, norm_eps, elementwise_affine)
        self.o_proj = make.linear(hidden_size, hidden_size)

    def mix(self, x: Any, span: Span) -> Any:
        q, f, i = self.projected(x, span, "qfi")
        xp = span.xp
        g, k = gates.hgrn2(self.heads(xp.astype(f, xp.accumulation(f)), self.head_f_dim), self.lower_bound)
        q = self.heads(self.functions.silu(q), self.head_f_dim)
        o = span.attend("gla", q, xp.astype(k, xp.dtype(q)), self.heads(i, self.head_i_dim), g)
        return self.o_proj(self.g_norm(self.flat(o)))
