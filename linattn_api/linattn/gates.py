"""From a model's raw projections to natural-log decays, on arrays of any framework.

Every gate returns ``g ≤ 0``, the argument ``g`` of the operators; the factor applied to the state is ``exp(g)``.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import OptionError
from .frameworks import framework_of

__all__ = ["gla", "hgrn2", "kda", "lightning", "mamba2", "retnet"]

A = TypeVar("A")


def _softplus(x: Any) -> Any:
    """``log(1 + e^x)`` without overflow, and with the right gradient at zero."""
    xp = framework_of(x, "x")
    return xp.logaddexp(x, xp.zeros_like(x))


def gla(x: A, tau: float = 16.0) -> A:
    """``logsigmoid(x) / τ`` (GLA, Yang et al. 2024, §4.4).

    Args:
        x: Gate projection ``[B, T, H, K]``.
        tau: Temperature; larger keeps more. Default 16.
    """
    raw: Any = x
    return -_softplus(-raw) / tau


def mamba2(dt: A, A_log: A, dt_bias: A) -> A:
    """``−exp(A_log) · softplus(dt + dt_bias)`` (Mamba-2, Dao & Gu 2024).

    Args:
        dt: Step projection ``[B, T, HV]``.
        A_log: Log of the decay rate ``[HV]``.
        dt_bias: ``[HV]``.
    """
    step: Any = dt
    return -framework_of(A_log, "A_log").exp(A_log) * _softplus(step + dt_bias)


def kda(x: A, A_log: A, dt_bias: A) -> A:
    """``−exp(A_log) · softplus(x + dt_bias)`` per key channel (Kimi Linear, 2025).

    Args:
        x: Gate projection ``[B, T, HV, K]``.
        A_log: Log of the decay rate ``[HV]``.
        dt_bias: ``[HV, K]``.
    """
    raw: Any = x
    rate: Any = framework_of(A_log, "A_log").exp(A_log)
    return -rate[:, None] * _softplus(raw + dt_bias)


def retnet(H: int) -> NDArray[np.float32]:
    """``log(1 − 2^{−5−h})`` for head ``h = 0 … H−1`` (RetNet, Sun et al. 2023, eq. 8). ``[H]`` float32, NumPy."""
    return np.log1p(-(2.0 ** (-5.0 - np.arange(_heads(H))))).astype(np.float32)


def lightning(H: int, layer: int, layers: int) -> NDArray[np.float32]:
    """``−(8/H)(1 − layer/layers) · h`` for head ``h = 0 … H−1`` (Lightning Attention-2, Qin et al. 2024). ``[H]``, NumPy.

    Args:
        H: Heads.
        layer: Index of this layer, ``0 ≤ layer < layers``.
        layers: Number of layers.
    """
    if not 0 <= layer < layers:
        raise OptionError(f"lightning: layer must be in 0 … layers-1 = {layers - 1}, got {layer}")
    return (-(8.0 / _heads(H)) * (1.0 - layer / layers) * np.arange(H)).astype(np.float32)


def hgrn2(x: A, lower_bound: float = 0.0) -> tuple[A, A]:
    """``(g, k)``: decay ``f = b + (1 − b) σ(x)`` with lower bound ``b``, ``g = log f`` and ``k = 1 − f`` (HGRN-2, Qin et al.
    2024, eq. 4).

    Args:
        x: Forget projection ``[B, T, H, K]``.
        lower_bound: Smallest decay, in ``[0, 1)``. Default 0.
    """
    if not 0.0 <= lower_bound < 1.0:
        raise OptionError(f"hgrn2: lower_bound must be in [0, 1), got {lower_bound}")
    raw: Any = x
    xp = framework_of(raw, "x")
    # 1 - f = (1 - b) σ(-x) needs no subtraction of nearly equal numbers, and neither does log f below
    k = (1.0 - lower_bound) * xp.exp(-_softplus(raw))
    if lower_bound == 0.0:
        return -_softplus(-raw), k
    bound = xp.zeros_like(raw) + math.log(lower_bound)
    return xp.logaddexp(bound, math.log1p(-lower_bound) - _softplus(-raw)), k


def _heads(H: int) -> int:
    if H < 1:
        raise OptionError(f"H must be at least 1, got {H}")
    return H
