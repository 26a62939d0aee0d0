"""Input maps in float64 and their pull-backs: what a model's projections become before the recurrence sees them.

``q, k ← x (Σ x² + ε)^{-1/2}``; ``g`` by a gate, whose parameters are arrays named ``gate.…``; ``beta ← σ(beta)``, or twice it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .recurrence import Array

__all__ = ["apply", "asked", "pull_back"]

EPSILON = 1e-6
MAPS = ("qk_norm", "gate", "beta_map")


def asked(options: Mapping[str, Any]) -> bool:
    """Whether the options ask for a map."""
    return any(options.get(name) is not None for name in MAPS)


def apply(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays that the recurrence takes, and the options without maps."""
    mapped = {name: x for name, x in arrays.items() if not name.startswith("gate.")}
    if options.get("qk_norm"):
        mapped |= {name: arrays[name] * inverse_length(arrays[name]) for name in ("q", "k")}
    if options.get("gate"):
        mapped["g"] = gate_of(arrays, options).decay
    if options.get("beta_map"):
        mapped["beta"] = factor(options) * sigmoid(arrays["beta"])
    return mapped, {name: value for name, value in options.items() if name not in MAPS}


def pull_back(arrays: Mapping[str, Any], options: Mapping[str, Any], gradients: Mapping[str, Array]) -> dict[str, Array]:
    """Gradients of the arrays given, and of a gate's parameters, from those of what :func:`apply` made of them."""
    found = dict(gradients)
    if options.get("qk_norm"):
        found |= {name: _length_vjp(arrays[name], gradients[name]) for name in ("q", "k")}
    if options.get("gate"):
        gate, dg = gate_of(arrays, options), gradients["g"]
        for name, slope in gate.slopes.items():
            found[name] = over_tokens(dg * slope, arrays[name].shape) if name != "g" else dg * slope
    if options.get("beta_map"):
        s = sigmoid(arrays["beta"])
        found["beta"] = factor(options) * s * (1 - s) * gradients["beta"]
    return found


def inverse_length(x: Array) -> Array:
    """``(Σ x² + ε)^{-1/2}`` along the last axis."""
    return ((x * x).sum(-1, keepdims=True) + EPSILON) ** -0.5


def _length_vjp(x: Array, d: Array) -> Array:
    r = inverse_length(x)
    return r * d - r**3 * x * (x * d).sum(-1, keepdims=True)


def factor(options: Mapping[str, Any]) -> float:
    """What multiplies the sigmoid of ``beta``."""
    return 2.0 if options["beta_map"] == "2sigmoid" else 1.0


def sigmoid(x: Array) -> Array:
    """``1 / (1 + e^{-x})`` without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


class GateOf(NamedTuple):
    """Log decays, and their derivatives by ``g`` and by each parameter, element by element."""

    decay: Array
    slopes: dict[str, Array]


def gate_of(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> GateOf:
    """What the gate of ``options`` makes of ``arrays["g"]``."""
    kind, g = options["gate"], arrays["g"]
    given = {name: beside(arrays[f"gate.{name}"], g) for name in kind.parameters}
    decay, by_g, slopes = KINDS[kind.name](g, kind.value, **given)
    return GateOf(decay, {"g": by_g, **{f"gate.{name}": slope for name, slope in slopes.items()}})


def beside(x: Array, g: Array) -> Array:
    """A parameter ``[]``, ``[heads]`` or ``[heads, K]`` so shaped that it meets ``g``."""
    return x[..., None] if x.ndim and g.ndim - 2 > x.ndim else x


def over_tokens(slopes: Array, shape: tuple[int, ...]) -> Array:
    """The sum over batch and tokens, and over what the parameter shares."""
    total = slopes.sum((0, 1))
    return total.sum(tuple(range(len(shape), total.ndim)))


def softplus_gate(g: Array, value: None, A_log: Array, dt_bias: Array | float = 0.0) -> tuple[Array, Array, dict[str, Array]]:
    """``−e^A softplus(g + b)``."""
    x = g + dt_bias
    decay, by_g = -np.exp(A_log) * np.logaddexp(0.0, x), -np.exp(A_log) * sigmoid(x)
    return decay, by_g, {"A_log": decay, "dt_bias": by_g} if np.ndim(dt_bias) else {"A_log": decay}


def bounded_sigmoid(g: Array, value: float, A_log: Array, dt_bias: Array) -> tuple[Array, Array, dict[str, Array]]:
    """``lower_bound · σ(e^A (g + b))``."""
    x, rate = g + dt_bias, np.exp(A_log)
    s = sigmoid(rate * x)
    by_g = value * s * (1 - s) * rate
    return value * s, by_g, {"A_log": by_g * x, "dt_bias": by_g}


def log_sigmoid(g: Array, value: float) -> tuple[Array, Array, dict[str, Array]]:
    """``logσ(g) / τ``."""
    return -np.logaddexp(0.0, -g) / value, sigmoid(-g) / value, {}


def negative_exp(g: Array, value: None, bias: Array | float = 0.0) -> tuple[Array, Array, dict[str, Array]]:
    """``−e^{g + b}``."""
    decay = -np.exp(g + bias)
    return decay, decay, {"bias": decay} if np.ndim(bias) else {}


KINDS: dict[str, Callable[..., tuple[Array, Array, dict[str, Array]]]] = {
    "Softplus": softplus_gate,
    "BoundedSigmoid": bounded_sigmoid,
    "LogSigmoid": log_sigmoid,
    "NegExp": negative_exp,
}
