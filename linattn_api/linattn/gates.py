"""From a model's raw projections to natural-log decays, on arrays of any framework.

Every gate gives ``g ≤ 0``, the argument ``g`` of the operators; the state is multiplied by ``exp(g)``. Functions do it at once;
objects (``Softplus``, ``BoundedSigmoid``, ``LogSigmoid``, ``NegExp``) go to an operator with the raw projection, as
``gate=``, and a kernel may apply them while it loads.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from .errors import OptionError
from .frameworks import framework_of
from .gate_maps import BoundedSigmoid, Gate, LogSigmoid, NegExp, Softplus

__all__ = [
    "BoundedSigmoid",
    "Gate",
    "LogSigmoid",
    "NegExp",
    "Softplus",
    "gla",
    "hgrn2",
    "kda",
    "lightning",
    "mamba2",
    "retnet",
]

Array = TypeVar("Array")


def _rounded(gate: Gate, x: Any) -> Any:
    """What a gate object makes of ``x``, in the dtype of ``x``."""
    xp = framework_of(x, "x")
    return xp.astype(gate(x), xp.dtype(x))


def gla(x: Array, tau: float = 16.0) -> Array:
    """``logsigmoid(x) / τ`` (GLA, Yang et al. 2024, §4.4).

    Args:
        x: Gate projection ``[B, T, H, K]``.
        tau: Temperature; larger keeps more. Default 16.
    """
    return _rounded(LogSigmoid(tau), x)


def mamba2(dt: Array, A_log: Array, dt_bias: Array) -> Array:
    """``−exp(A_log) · softplus(dt + dt_bias)`` (Mamba-2, Dao & Gu 2024).

    Args:
        dt: Step projection ``[B, T, HV]``.
        A_log: Log of the decay rate ``[HV]``.
        dt_bias: ``[HV]``.
    """
    return _rounded(Softplus(A_log, dt_bias), dt)


def kda(x: Array, A_log: Array, dt_bias: Array) -> Array:
    """``−exp(A_log) · softplus(x + dt_bias)`` per key channel (Kimi Linear, 2025).

    Args:
        x: Gate projection ``[B, T, HV, K]``.
        A_log: Log of the decay rate ``[HV]``.
        dt_bias: ``[HV, K]``.
    """
    return _rounded(Softplus(A_log, dt_bias), x)


@overload
def retnet(H: int) -> NDArray[np.float32]: ...


@overload
def retnet(H: int, like: Array) -> Array: ...


def retnet(H: int, like: Any = None) -> Any:
    """``log(1 − 2^{−5−h})`` for head ``h = 0 … H−1`` (RetNet, Sun et al. 2023, eq. 8). ``[H]`` float32.

    Args:
        H: Heads.
        like: An array, such as ``q``, whose framework and device the decays are to have. Default: NumPy's.

    Raises:
        OptionError: ``H`` is less than 1.
        FrameworkError: ``like`` is no array.
    """
    return _fixed(_retnet_decays(_heads(H)), like)


@overload
def lightning(H: int, layer: int, layers: int) -> NDArray[np.float32]: ...


@overload
def lightning(H: int, layer: int, layers: int, like: Array) -> Array: ...


def lightning(H: int, layer: int, layers: int, like: Any = None) -> Any:
    """``−(8/H)(1 − layer/layers) · h`` for head ``h = 0 … H−1`` (Lightning Attention-2, Qin et al. 2024). ``[H]`` float32.

    Args:
        H: Heads.
        layer: Index of this layer, ``0 ≤ layer < layers``.
        layers: Number of layers.
        like: An array, such as ``q``, whose framework and device the decays are to have. Default: NumPy's.

    Raises:
        OptionError: ``H`` is less than 1, or there is no such layer.
        FrameworkError: ``like`` is no array.
    """
    if not 0 <= layer < layers:
        raise OptionError(f"lightning: layer must be in 0 … layers-1 = {layers - 1}, got {layer}")
    return _fixed(_lightning_decays(_heads(H), layer, layers), like)


def _retnet_decays(H: int) -> tuple[float, ...]:
    return tuple(math.log1p(-(2.0 ** (-5.0 - h))) for h in range(H))


def _lightning_decays(H: int, layer: int, layers: int) -> tuple[float, ...]:
    return tuple(-(8.0 / H) * (1.0 - layer / layers) * h for h in range(H))


# Dynamo calls them with constants while it traces, and keeps the numbers.
_retnet_decays._dynamo_marked_constant = True  # type: ignore[attr-defined]
_lightning_decays._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fixed(decays: tuple[float, ...], like: Any) -> Any:
    """A new array: whoever makes a parameter of it may write to it."""
    return np.array(decays, np.float32) if like is None else framework_of(like, "like").numbers(decays, like)


def hgrn2(x: Array, lower_bound: float = 0.0) -> tuple[Array, Array]:
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
    k = (1.0 - lower_bound) * xp.exp(xp.log_sigmoid(-raw))
    if lower_bound == 0.0:
        return xp.log_sigmoid(raw), k
    bound = xp.zeros_like(raw) + math.log(lower_bound)
    return xp.logaddexp(bound, math.log1p(-lower_bound) + xp.log_sigmoid(raw)), k


def _heads(H: int) -> int:
    if H < 1:
        raise OptionError(f"H must be at least 1, got {H}")
    return H
