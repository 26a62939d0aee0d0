"""The GLA layer (Yang et al. 2024, §4.4), and the same layer with one gate a head, with RetNet's fixed decays, and with none.

``o = GLA(x W_q, x W_k, x W_v, g)``, ``g = logsigmoid(x W_1 W_2 + b)/16``, ``y = (swish(x W_r) ∘ norm(o)) W_o``: keys have half
the width of values, and the whole has about ``4 D²`` parameters, as softmax attention does.
"""

from __future__ import annotations

from typing import Any

import linattn
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from .blocks import rotary

RANK = 16


class LinearMixer(nn.Module):
    """Projections, normalised heads and output gate; subclasses say what happens between them in ``attend``."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width // 2, bias=False)
        self.k = nn.Linear(width, width // 2, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width // heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        q, k, v = (self.split(linear(x)) for linear in (self.q, self.k, self.v))
        o, state = self.attend(x, q, k, v, state, position)
        return self.out(silu(self.gate(x)) * self.norm(o).flatten(2)), state

    def split(self, x: Tensor) -> Tensor:
        """``[B, T, D]`` to ``[B, T, H, D/H]``."""
        return x.unflatten(-1, (self.heads, -1))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        """``(o, state)``: ``o`` is ``[B, T, H, V]``."""
        raise NotImplementedError


class GatedLinearAttention(LinearMixer):
    """A decay for each key channel, from the data through a projection of rank 16."""

    def __init__(self, width: int, heads: int = 4, tau: float = 16.0) -> None:
        super().__init__(width, heads)
        self.tau = tau
        self.decay = nn.Sequential(nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width // 2))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        g = linattn.gates.gla(self.split(self.decay(x)), tau=self.tau)
        return linattn.gla(q, k, v, g, initial_state=state, output_final_state=True)


class ScalarGate(LinearMixer):
    """One decay a head, from the data, as in Mamba-2 (Dao & Gu 2024) and gated RetNet."""

    def __init__(self, width: int, heads: int = 4, tau: float = 16.0) -> None:
        super().__init__(width, heads)
        self.tau = tau
        self.decay = nn.Linear(width, heads)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        g = linattn.gates.gla(self.decay(x), tau=self.tau)
        return linattn.simple_gla(q, k, v, g, initial_state=state, output_final_state=True)


class RetNet(LinearMixer):
    """One fixed decay a head, and rotary positions (Sun et al. 2023)."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__(width, heads)
        self.register_buffer("decay", torch.from_numpy(linattn.gates.retnet(heads)), persistent=False)

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        q, k = rotary(q, position), rotary(k, position)
        return linattn.simple_gla(q, k, v, self.decay, initial_state=state, output_final_state=True)


class Ungated(LinearMixer):
    """Linear attention that forgets nothing. The norm of each head takes the place of the normaliser (Qin et al. 2022)."""

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, position: int) -> tuple[Tensor, Any]:
        return linattn.linear_attn(q, k, v, initial_state=state, output_final_state=True)
