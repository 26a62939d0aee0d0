"""Mixers of tokens for the experiments: the layers of :mod:`linattn.nn`, with the same positions, and what is compared to them.

All are modules ``mixer(x, cache=None) -> y``, ``[B, T, D]`` both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import linattn
import torch
from linattn import feature_maps, gates
from linattn.feature_maps import FeatureMap
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from .by_head import by_head

GATES = ("none", "fixed", "scalar", "vector", "outer")


class Turned:
    """A layer whose queries and keys get rotary positions before its operator, and before its feature map."""

    operator: str

    def mix(self, x: Tensor, span: Any) -> Tensor:
        positions = span.positions()
        self.positions = positions[0] if positions.shape[0] == 1 else positions
        return super().mix(x, span)  # type: ignore[misc]

    def run(self, function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if function is getattr(linattn, self.operator):
            at = 3 if self.operator == "ssd" else 0  # x, Δ and A stand before B and C
            turned = (linattn.rotary(y, positions=self.positions) for y in arrays[at : at + 2])
            arrays = (*arrays[:at], *turned, *arrays[at + 2 :])
        return function(*arrays, **options)


def layer(name: str, rotary: bool = True, **options: Any) -> nn.Module:
    """A layer of :mod:`linattn.nn` with rotary positions, of which some have their own."""
    cls = getattr(linattn.nn, name)
    if rotary and name not in ("RetNet", "Hedgehog", "FLASH", "GAU"):
        cls = type(name, (Turned, cls), {})
    return cls(**options)


class Attention(nn.Module):
    """Multi-head softmax attention with rotary positions."""

    def __init__(self, width: int, heads: int, causal: bool = True, **unused: Any) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            raise ValueError("Attention: softmax carries no state from one segment to the next")
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        return self.out(by_head(self.attend, linattn.rotary(q), linattn.rotary(k), v).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)


class T2r(linattn.nn.Hedgehog):
    """Linear attention with the map of T2R, ``relu(x W)``, ``W`` a head."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        with torch.no_grad():
            self.W.copy_(torch.from_numpy(feature_maps.T2r.init(self.num_heads, self.head_dim)["W"]))

    @property
    def map(self) -> FeatureMap:
        return feature_maps.T2r(self.W)


one_sided = functools.partial(feature_maps.Hedgehog, negation=False)
"""Hedgehog's map as its equation 3 is printed: of the width of a head, without the negated half."""


class OneSidedHedgehog(linattn.nn.Hedgehog):
    """Linear attention with :func:`one_sided`."""

    @property
    def map(self) -> FeatureMap:
        return one_sided(self.W)


LEARNED = {"t2r": T2r, "hedgehog": linattn.nn.Hedgehog, "hedgehog, eq. 3": OneSidedHedgehog}


class GatedMixer(linattn.nn.GatedLinearAttention):
    """GLA's layer with another of :data:`GATES` (Yang et al. 2024, table 4), and rotary positions with every one.

    None; RetNet's fixed decays; a number a head from the data, as in Mamba-2; one a key channel, GLA's; and one a key channel
    and one a value channel besides, whose outer product decays the state (Mao 2022).
    """

    def __init__(self, width: int, num_heads: int, gate: str, **options: Any) -> None:
        super().__init__(width, num_heads=num_heads, **options)
        self.gate = gate
        if gate != "vector":
            del self.gk_proj
        if gate == "scalar":
            self.scalar = nn.Linear(width, num_heads)
        if gate == "outer":
            self.keys, self.values = (low_rank(width, heads * num_heads) for heads in (self.head_k_dim, self.head_v_dim))

    def mix(self, x: Tensor, span: Any) -> Tensor:
        q, k, v = self.projected(x, span, "qkv")
        positions = span.positions()
        q, k = (self.rotated(self.heads(y, self.head_k_dim), positions) for y in (q, k))
        return self.output(self.attend(span, x, q, k, self.heads(v, self.head_v_dim)), x)

    def attend(self, span: Any, x: Tensor, *qkv: Tensor) -> Tensor:
        tau = self.gate_logit_normalizer
        if self.gate == "none":
            return span.attend("linear_attn", *qkv)
        if self.gate == "fixed":
            return span.attend("simple_gla", *qkv, gates.retnet(self.num_heads, like=x))
        if self.gate == "scalar":
            return span.attend("simple_gla", *qkv, self.scalar(x), gate=gates.LogSigmoid(tau))
        if self.gate == "vector":
            g = self.heads(self.gk_proj["1"](self.gk_proj["0"](x)), self.head_k_dim)
            return span.attend("gla", *qkv, g, gate=gates.LogSigmoid(tau))
        g = self.heads(logsigmoid(self.keys(x)) / tau, self.head_k_dim)
        gv = self.heads(logsigmoid(self.values(x)) / tau, self.head_v_dim)
        return span.attend("gla", *qkv, g, gv)


def low_rank(width: int, outputs: int, rank: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, outputs))


class Unit(nn.Module):
    """Two gated attention units in the place of attention and MLP (Hua et al. 2022, §3), each with its residual and norm."""

    def __init__(self, width: int, make: Callable[[], nn.Module], norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.second = make(), norm(width), make()

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        y = self.first(x, cache=cache)
        return y + self.second(self.norm(x + y), cache=cache)


class ByHead:
    """A unit whose attention takes stacked models, each with a bias of distances of its own, as heads."""

    def run(self, function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if function is not linattn.mixed_attn:
            return function(*arrays, **options)
        bias = options.pop("bias")

        def attend(*of: Tensor) -> Tensor:
            return function(*of[:5], bias=None if bias is None else of[5], **options)[0]

        return by_head(attend, *arrays, *([] if bias is None else [bias])), None


class Flash(ByHead, linattn.nn.FLASH):
    """FLASH's layer."""


class Quad(ByHead, linattn.nn.GAU):
    """FLASH-Quad's."""


def flash(width: int, length: int, causal: bool = True, **options: Any) -> nn.Module:
    """A FLASH layer. Without causality the linear part sums over the whole sequence, and is divided by its length."""
    return Flash(width, causal=causal, lin_scale=None if causal else 1 / length, **options)


class MixedChunkAttention(nn.Module):
    """MC-TFM++: mixed chunk attention in the place of softmax in an ordinary block (Hua et al. 2022, §5.3).

    Heads have queries and keys of their own; scales and offsets of them give those within chunks and those across.
    """

    def __init__(self, width: int, heads: int, length: int, chunk_size: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.chunk, self.causal = heads, chunk_size, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gamma = nn.Parameter(1 + 0.02 * torch.randn(4, heads, width // heads))
        self.beta = nn.Parameter(torch.zeros(4, heads, width // heads))
        self.lin_scale = 1 / (chunk_size if causal else length)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        roles = (linattn.rotary(y * g + b) for y, g, b in zip((q, k, q, k), self.gamma, self.beta, strict=True))
        options = {"chunk_size": self.chunk, "lin_scale": self.lin_scale, "causal": self.causal}
        return self.out(by_head(lambda *of: linattn.mixed_attn(*of, **options)[0], *roles, v).flatten(2))
