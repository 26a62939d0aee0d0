# pyright: basic
"""Initial values that several layers draw: decay rates, step sizes, matrices."""

from __future__ import annotations

import math
from typing import Any

from ..frameworks import framework_of

__all__ = ["decay_rates", "inverse_softplus_steps", "xavier"]


def decay_rates(make: Any, heads: int, least: float, most: float) -> Any:
    """Logs of rates drawn uniformly from ``least`` to ``most`` (Mamba-2, Dao & Gu 2024, §7): ``[heads]``."""
    rates = make.uniform((heads,), least, most)
    return framework_of(rates).log(at_least(rates, 1e-6))  # a rate of zero has no logarithm


def inverse_softplus_steps(make: Any, number: int, least: float = 1e-3, most: float = 0.1, floor: float = 1e-4) -> Any:
    """Biases whose softplus is a step drawn log-uniformly from ``least`` to ``most`` (Mamba, Gu & Dao 2023, §3.6)."""
    logs = make.uniform((number,), math.log(least), math.log(most))
    xp = framework_of(logs)
    steps = at_least(xp.exp(logs), floor)
    return steps + xp.log(-xp.expm1(-steps))


def at_least(x: Any, floor: float) -> Any:
    """``x``, and ``floor`` where it is below."""
    xp = framework_of(x)
    return xp.where(x < floor, xp.zeros_like(x) + floor, x)


def xavier(make: Any, outputs: int, inputs: int, gain: float) -> Any:
    """A matrix drawn uniformly from ``±gain · √(6 / (in + out))`` (Glorot & Bengio 2010, eq. 16): ``[outputs, inputs]``."""
    bound = gain * math.sqrt(6 / (inputs + outputs))
    return make.uniform((outputs, inputs), -bound, bound)
