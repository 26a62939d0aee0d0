"""DeltaNet (Yang et al. 2024) and Gated DeltaNet (Yang et al. 2025) in the layer of :mod:`models.gla`.

Keys have length one, and what a key already stores is taken out before the new value goes in.
"""

from __future__ import annotations

from typing import Any

import linattn
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, silu

from .gla import LinearMixer


class DeltaNet(LinearMixer):
    """``S = S⁻ + kᵀ β (v − k S⁻)``, ``β = σ(x W_β)``."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__(width, heads)
        self.beta = nn.Linear(width, heads, bias=False)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        q, k, beta = normalize(silu(q), dim=-1), normalize(silu(k), dim=-1), self.beta(x).sigmoid()
        return self.update(x, q, k, v, beta, state)

    def update(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Any) -> tuple[Tensor, Any]:
        return linattn.delta_rule(q, k, v, beta, initial_state=state, output_final_state=True)


class GatedDeltaNet(DeltaNet):
    """The same after a decay ``g = −e^A softplus(x W_Δ + b)`` of the whole state."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__(width, heads)
        self.step = nn.Linear(width, heads, bias=False)
        self.step_bias = nn.Parameter(torch.full((heads,), -4.0))  # half of the state is left after some forty tokens
        self.rate = nn.Parameter(torch.zeros(heads))

    def update(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, state: Any) -> tuple[Tensor, Any]:
        g = linattn.gates.mamba2(self.step(x), self.rate, self.step_bias)
        return linattn.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
