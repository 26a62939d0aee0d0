"""Gate objects: how a raw projection becomes log decays, as a value that an operator takes as ``gate=``.

A kernel may apply the map while it loads ``g``; for a backend that does not, the same object is called first. Its parameters
are arrays of the caller's framework, and it is differentiable in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

from .errors import OptionError
from .frameworks import Framework, framework_of

__all__ = ["BoundedSigmoid", "Gate", "GateKind", "LogSigmoid", "NegExp", "Softplus"]


class GateKind(NamedTuple):
    """What is static of a gate object: what a plan may rest on, and never data.

    Attributes:
        name: Name of its class, e.g. ``"Softplus"``.
        parameters: Names of the parameters that are given, e.g. ``("A_log", "dt_bias")``.
        value: Its number: ``tau`` or ``lower_bound``; ``None`` where it has none.
    """

    name: str
    parameters: tuple[str, ...]
    value: float | None = None

    def __repr__(self) -> str:
        value = () if self.value is None else (f"{GATES[self.name].number}={self.value:g}",)
        return f"{self.name}({', '.join((*self.parameters, *value))})"


class Gate:
    """Base class of gate objects: ``gate(g)`` turns a raw projection into log decays of at least float32.

    Attributes:
        shapes: Symbolic shapes of each parameter, alternatives separated by ``|``; ``G`` is the number of heads of ``g``.
        number: Name of its static number; empty where it has none.
    """

    shapes: ClassVar[dict[str, str]] = {}
    number: ClassVar[str] = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are given."""
        return tuple([name for name in self.shapes if getattr(self, name) is not None])

    @property
    def leaves(self) -> list[Any]:
        """The arrays of those parameters, in the same order."""
        return [getattr(self, name) for name in self.parameters]

    @property
    def kind(self) -> GateKind:
        """What is static of it."""
        return GateKind(type(self).__name__, self.parameters, getattr(self, self.number) if self.number else None)

    def __call__(self, g: Any) -> Any:
        """Log decays of a raw projection ``g``: ``[B, T, heads]``, or ``[B, T, heads, K]``; float32, or float64 for float64."""
        xp = framework_of(g, "g")
        return self.decays_of(xp, xp.astype(g, xp.accumulation(g)))

    def decays_of(self, xp: Framework, g: Any) -> Any:
        """Log decays of ``g``, which is float32 or float64."""
        raise NotImplementedError(f"{type(self).__name__} must define decays_of")

    def _given(self, xp: Framework, g: Any, name: str) -> Any:
        """A parameter in the dtype of ``g``, so shaped that it meets ``g`` head by head."""
        x = xp.astype(getattr(self, name), xp.dtype(g))
        missing = len(g.shape) - 2 - len(x.shape)
        return x[..., None] if x.shape and missing == 1 else x


@dataclass(frozen=True, eq=False)
class Softplus(Gate):
    """``g ← −exp(A_log) · softplus(g + dt_bias)`` (Mamba-2, Dao & Gu 2024; Gated DeltaNet; Kimi Linear per key channel).

    Args:
        A_log: Log of the decay rate: one number for each head of ``g``, ``[heads]``, or one number ``[]``.
        dt_bias: ``[heads]`` or, where ``g`` has a number a key channel, ``[heads, K]``; or none.
    """

    A_log: Any
    dt_bias: Any = None

    shapes: ClassVar[dict[str, str]] = {"A_log": "G|", "dt_bias": "G|G K"}

    def decays_of(self, xp: Framework, g: Any) -> Any:
        """Log decays of ``g``, which is float32 or float64."""
        if self.dt_bias is not None:
            g = g + self._given(xp, g, "dt_bias")
        return -xp.exp(self._given(xp, g, "A_log")) * xp.softplus(g)


@dataclass(frozen=True, eq=False)
class BoundedSigmoid(Gate):
    """``g ← lower_bound · sigmoid(exp(A_log) · (g + dt_bias))``: decays that never fall below ``lower_bound``.

    Args:
        A_log: Log of the slope: ``[heads]`` of ``g``, or one number ``[]``.
        dt_bias: ``[heads]`` or, where ``g`` has a number a key channel, ``[heads, K]``.
        lower_bound: The least log decay, below zero.

    Raises:
        OptionError: ``lower_bound`` is no number below zero.
    """

    A_log: Any
    dt_bias: Any
    lower_bound: float

    shapes: ClassVar[dict[str, str]] = {"A_log": "G|", "dt_bias": "G|G K"}
    number: ClassVar[str] = "lower_bound"

    def __post_init__(self) -> None:
        _check_number("BoundedSigmoid", "lower_bound", self.lower_bound, "negative", self.lower_bound_fits)

    @staticmethod
    def lower_bound_fits(value: float) -> bool:
        """Whether a number can be the bound."""
        return -float("inf") < value < 0

    def decays_of(self, xp: Framework, g: Any) -> Any:
        """Log decays of ``g``, which is float32 or float64."""
        slope = xp.exp(self._given(xp, g, "A_log"))
        return self.lower_bound * xp.exp(xp.log_sigmoid(slope * (g + self._given(xp, g, "dt_bias"))))


@dataclass(frozen=True, eq=False)
class LogSigmoid(Gate):
    """``g ← logsigmoid(g) / tau`` (GLA, Yang et al. 2024, §4.4).

    Args:
        tau: Temperature; larger keeps more. Default 16.

    Raises:
        OptionError: ``tau`` is no positive number.
    """

    tau: float = 16.0

    number: ClassVar[str] = "tau"

    def __post_init__(self) -> None:
        _check_number("LogSigmoid", "tau", self.tau, "positive", self.tau_fits)

    @staticmethod
    def tau_fits(value: float) -> bool:
        """Whether a number can be the temperature."""
        return 0 < value < float("inf")

    def decays_of(self, xp: Framework, g: Any) -> Any:
        """Log decays of ``g``, which is float32 or float64."""
        return xp.log_sigmoid(g) / self.tau


@dataclass(frozen=True, eq=False)
class NegExp(Gate):
    """``g ← −exp(g + bias)`` (RWKV-6, Peng et al. 2024, eq. 14).

    Args:
        bias: ``[heads]`` of ``g`` or, where that has a number a key channel, ``[heads, K]``; or none.
    """

    bias: Any = None

    shapes: ClassVar[dict[str, str]] = {"bias": "G|G K"}

    def decays_of(self, xp: Framework, g: Any) -> Any:
        """Log decays of ``g``, which is float32 or float64."""
        return -xp.exp(g if self.bias is None else g + self._given(xp, g, "bias"))


GATES: dict[str, type[Gate]] = {kind.__name__: kind for kind in (Softplus, BoundedSigmoid, LogSigmoid, NegExp)}
"""Every kind of gate object by name."""


def _check_number(owner: str, name: str, value: Any, what: str, fits: Any) -> None:
    """A static number of a gate object."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
        raise OptionError(f"{owner}: {name} must be a {what} number, got {value!r}")
