"""GAU, FLASH-Quad and FLASH (Hua et al. 2022).

A gated attention unit (§3, figure 2) is attention and MLP in one: ``u = φ(x W_u)`` and ``v = φ(x W_v)`` of width ``e = 2D``,
one narrow ``z = φ(x W_z)`` whose scales and offsets are queries and keys, ``y = (u ∘ A v) W_o``. ``φ`` is SiLU. With
``s = 128`` it has ``6 D² + 128 D`` parameters: two of them take the place of one Transformer block.

FLASH-Quad is a stack with ``A = relu²(q kᵀ/n + b)``; FLASH uses that inside chunks and linear attention across them (§4).
"""

from __future__ import annotations

from typing import Any

import linattn
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .blocks import LanguageModel, rotary


class GatedAttentionUnit(nn.Module):
    """One layer, its norm and residual included.

    Args:
        width: ``D``.
        chunk_size: ``C``.
        linear: Attend across chunks; without it, and with a chunk as long as the sequence, this is FLASH-Quad.
        quadratic: Attend within chunks.
        causal: Tokens see those before them only.
        keys: ``s``, width of queries and keys.
    """

    def __init__(
        self,
        width: int,
        chunk_size: int = 256,
        linear: bool = True,
        quadratic: bool = True,
        causal: bool = True,
        keys: int = 128,
    ) -> None:
        super().__init__()
        self.chunk_size, self.causal = chunk_size, causal
        self.scales = {"quad_scale": 1 / chunk_size if quadratic else 0.0, "lin_scale": 1 / chunk_size if linear else 0.0}
        self.norm = nn.LayerNorm(width)
        self.u = nn.Linear(width, 2 * width, bias=False)
        self.v = nn.Linear(width, 2 * width, bias=False)
        self.z = nn.Linear(width, keys, bias=False)
        self.out = nn.Linear(2 * width, width, bias=False)
        heads = 4 if linear else 2
        self.gamma = nn.Parameter(torch.ones(heads, keys) + 0.02 * torch.randn(heads, keys))
        self.beta = nn.Parameter(torch.zeros(heads, keys))
        self.bias = nn.Parameter(torch.zeros(2 * chunk_size - 1)) if quadratic else None

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        h = self.norm(x)
        u, v, z = silu(self.u(h)), silu(self.v(h)), silu(self.z(h))
        heads = rotary(z[:, :, None] * self.gamma + self.beta, position)
        q_quad, k_quad, *linear = heads.unsqueeze(3).unbind(2)
        q_lin, k_lin = linear or (q_quad, k_quad)  # FLASH-Quad has no others, and gives these no weight
        o, state = linattn.mixed_attn(
            q_quad, k_quad, q_lin, k_lin, v[:, :, None],
            bias=self.relative_bias(), chunk_size=self.chunk_size, causal=self.causal,
            initial_state=state, output_final_state=self.causal, **self.scales,
        )  # fmt: skip
        return x + self.out(u * o[:, :, 0]), state

    def relative_bias(self) -> Tensor | None:
        """``b_{i−j}`` as ``[1, C, C]``."""
        if self.bias is None:
            return None
        t = torch.arange(self.chunk_size, device=self.bias.device)
        return self.bias[t[:, None] - t + self.chunk_size - 1][None]


class QuadraticUnit(GatedAttentionUnit):
    """A unit of FLASH-Quad: its one chunk is the whole sequence, and what would not fit into it is refused."""

    def __init__(self, width: int, longest: int, **options: Any) -> None:
        super().__init__(width, longest, linear=False, **options)

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        length = position + x.shape[1]
        if length > self.chunk_size:
            raise ValueError(f"this FLASH-Quad is for sequences up to longest={self.chunk_size}, got {length} tokens")
        return super().forward(x, state, position)


def flash(symbols: int, width: int, depth: int, chunk_size: int = 256, **options: Any) -> LanguageModel:
    """FLASH: ``depth`` units that attend within chunks and across them."""
    return LanguageModel(symbols, width, [GatedAttentionUnit(width, chunk_size, **options) for _ in range(depth)])


def flash_quad(symbols: int, width: int, depth: int, longest: int, **options: Any) -> LanguageModel:
    """FLASH-Quad for sequences up to ``longest``: quadratic in their length."""
    return LanguageModel(symbols, width, [QuadraticUnit(width, longest, **options) for _ in range(depth)])
