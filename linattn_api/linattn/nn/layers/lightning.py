# pyright: basic
"""Lightning attention (Qin et al. 2024)."""

from __future__ import annotations

from typing import Any

from ... import gates
from ..mixer import Mixer, choice
from ..span import Span


class Lightning(Mixer):
    """Lightning attention: ``S = e^{−s_h} S⁻ + kᵀv``, ``o = q S``, with a fixed decay a head that is slower in later layers
    (Lightning Attention-2, Qin et al. 2024, eq. 2; the layer as MiniMax-01, 2025, figure 3, has it).

    Queries, keys and values go through SiLU; the output is normed over all heads, gated by ``σ(x W_g)`` and projected.
    Matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 1024.
        num_heads: Heads. Default 8.
        head_dim: Width of a head. Default ``hidden_size / num_heads``.
        decay: ``"lightning"``: ``s_h = (8/H)(1 − layer/layers) h``; or ``"minimax"``:
            ``s_h = 2^{−8(h+1)/H} (1 − layer/(layers−1))``, as in MiniMax-01. Default ``"lightning"``.
        norm_eps: ``ε`` of the norm. Default 1e-6.
        num_hidden_layers: Layers of the model. Default 1.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "simple_gla", "Qin et al. 2024 (Lightning Attention-2), eq. 2"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        num_heads: int = 8,
        head_dim: int | None = None,
        decay: str = "lightning",
        norm_eps: float = 1e-6,
        num_hidden_layers: int = 1,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        self.num_heads, self.head_dim = num_heads, head_dim or hidden_size // num_heads
        self.num_hidden_layers = num_hidden_layers
        self.decay = choice("Lightning", "decay", decay, ("lightning", "minimax"))
        values = num_heads * self.head_dim
        self.qkv_proj = make.linear(hidden_size, 3 * values)
        self.norm = make.part("RMSNorm", values, norm_eps)
        self.output_gate = make.linear(hidden_size, values)
        self.out_proj = make.linear(values, hidden_size)

    def mix(self, x: Any, span: Span) -> Any:
        qkv = self.heads(self.functions.silu(self.qkv_proj(x)), 3 * self.head_dim)
        o = span.attend("simple_gla", *span.xp.split(qkv, (self.head_dim,) * 3), self.decays(x, span), scale=1.0)
        return self.out_proj(self.functions.sigmoid(self.output_gate(x)) * self.norm(self.flat(o)))

    def decays(self, x: Any, span: Span) -> Any:
        """Log decays ``[H]``."""
        H, layer, layers = self.num_heads, self.layer_idx, self.num_hidden_layers
        if self.decay == "lightning":
            return gates.lightning(H, layer, layers, like=x)
        factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        return span.xp.numbers([-(2.0 ** (-8 * (h + 1) / H)) * factor for h in range(H)], like=x)
