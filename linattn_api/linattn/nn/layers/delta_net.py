# pyright: basic
"""DeltaNet (Schlag et al. 2021; Yang et al. 2024)."""

from __future__ import annotations

from typing import Any

from ...frameworks import framework_of
from ..grouped import make_projections
from ..mixer import Mixer, choice, width
from ..span import Span


class DeltaNet(Mixer):
    """DeltaNet: ``S = S⁻ + kᵀ β (v − k S⁻)``, ``β = σ(x W_b)``, keys of length one
    (Schlag et al. 2021, eq. 24; Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", §3).

    Matrices are drawn uniformly from ``±1/√in``, so ``β`` starts near a half.

    Args:
        hidden_size: ``D``. Default 1024.
        expand_k: Width of all keys over ``D``. Default 1.
        expand_v: Width of all values over ``D``. Default 1.
        num_heads: Heads. Default 4.
        use_beta: Whether ``β`` comes from the data; else it is 1. Default True.
        use_gate: Whether the output is gated. Default False.
        use_short_conv: Whether short convolutions follow the projections. Default True.
        conv_size: Their width ``W``. Default 4.
        conv_bias: Whether they have a bias. Default False.
        allow_neg_eigval: ``β = 2σ(x W_b)`` (Grazzi et al. 2024). Default False.
        qk_activation: ``"silu"``, ``"relu"``, ``"elu"`` (which is ``elu + 1``) or ``"identity"``. Default ``"silu"``.
        qk_norm: ``"l2"``, or ``"sum"``: keys sum to one. Default ``"l2"``.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "delta_rule", "Yang et al. 2024 (delta rule), §3"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        use_beta: bool = True,
        use_gate: bool = False,
        use_short_conv: bool = True,
        conv_size: int = 4,
        conv_bias: bool = False,
        allow_neg_eigval: bool = False,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        owner = type(self).__name__
        keys = width(owner, "expand_k", hidden_size, expand_k, num_heads)
        values = width(owner, "expand_v", hidden_size, expand_v, num_heads)
        self.head_k_dim, self.head_v_dim, self.num_heads = keys // num_heads, values // num_heads, num_heads
        self.qk_activation = choice(owner, "qk_activation", qk_activation, ("silu", "relu", "elu", "identity"))
        self.qk_norm = choice(owner, "qk_norm", qk_norm, ("l2", "sum"))
        self.use_beta, self.use_gate, self.allow_neg_eigval = use_beta, use_gate, allow_neg_eigval
        self.use_short_conv = use_short_conv

        activation = "silu" if qk_activation == "silu" else None
        convolution = (conv_size, conv_bias) if use_short_conv else None
        make_projections(self, make, (keys, keys, values), convolution, activations=(activation, activation, "silu"))
        if use_beta:
            self.b_proj = make.linear(hidden_size, num_heads)
        if use_gate:
            self.g_proj = make.linear(hidden_size, values)
            self.o_norm = make.part("GatedRMSNorm", self.head_v_dim, norm_eps)
        else:
            self.o_norm = make.part("RMSNorm", self.head_v_dim, norm_eps)
        self.o_proj = make.linear(values, hidden_size)

    def mix(self, x: Any, span: Span) -> Any:
        q, k, v = self.projected(x, span, "qkv")
        if not self.use_short_conv:
            v = self.functions.silu(v)
            q, k = (self.functions.silu(y) if self.qk_activation == "silu" else y for y in (q, k))
        q, k = (self.activated(self.heads(y, self.head_k_dim)) for y in (q, k))
        v = self.heads(v, self.head_v_dim)
        o = span.attend("delta_rule", q, k, v, **self.writing(x, q))
        o = self.o_norm(o, self.heads(self.g_proj(x), self.head_v_dim)) if self.use_gate else self.o_norm(o)
        return self.o_proj(self.flat(o))

    def activated(self, x: Any) -> Any:
        """Queries or keys ``[B, T, H, K]`` with their activation, and with the sum that is asked for."""
        if self.qk_activation == "relu":
            x = self.functions.relu(x)
        elif self.qk_activation == "elu":
            x = framework_of(x).where(x > 0, x + 1, framework_of(x).exp(framework_of(x).minimum(x, 0)))
        return x / x.sum(-1)[..., None] if self.qk_norm == "sum" else x

    def writing(self, x: Any, q: Any) -> dict[str, Any]:
        """``beta`` and what maps it, and the norm of queries and keys."""
        norm = "l2" if self.qk_norm == "l2" else None
        if self.use_beta:
            return {"beta": self.b_proj(x), "beta_map": "2sigmoid" if self.allow_neg_eigval else "sigmoid", "qk_norm": norm}
        return {"beta": q[..., 0] * 0 + (2.0 if self.allow_neg_eigval else 1.0), "qk_norm": norm}
