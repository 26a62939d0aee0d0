"""Mixers that several studies compare. All have states of one size: ``K = D / 2H``, ``V = D / H``."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..mixers import Attention, layer
from ..protocol import Setting

HALF = {"expand_k": 0.5, "expand_v": 1.0}


def softmax(s: Setting, i: int) -> nn.Module:
    return Attention(s.width, s.heads)


def linear(s: Setting, i: int) -> nn.Module:
    return layer("LinearAttention", hidden_size=s.width, num_heads=s.heads, layer_idx=i, **HALF)


def retnet(s: Setting, i: int) -> nn.Module:
    return layer("RetNet", hidden_size=s.width, num_heads=s.heads, layer_idx=i, **HALF)


def gla(s: Setting, i: int) -> nn.Module:
    return layer("GatedLinearAttention", hidden_size=s.width, num_heads=s.heads, layer_idx=i)


def mamba2(s: Setting, i: int) -> nn.Module:
    K, V = s.width // s.heads // 2, s.width // s.heads
    return layer("Mamba2", hidden_size=s.width, head_dim=V, state_size=K, expand=1, conv_kernel=1, layer_idx=i)


def delta_net(s: Setting, i: int) -> nn.Module:
    options: dict[str, Any] = {"num_heads": s.heads, "use_short_conv": False, "layer_idx": i, **HALF}
    return layer("DeltaNet", hidden_size=s.width, **options)


def gated_delta_net(s: Setting, i: int) -> nn.Module:
    options: dict[str, Any] = {"num_heads": s.heads, "head_dim": s.width // s.heads // 2, "use_short_conv": False}
    return layer("GatedDeltaNet", hidden_size=s.width, layer_idx=i, **options)
