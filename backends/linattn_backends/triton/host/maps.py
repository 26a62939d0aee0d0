"""A call's input maps as kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..lib.input_maps import BOUNDED, LOG_SIGMOID, NEG_EXP, NONE, SOFTPLUS

__all__ = ["NO_MAPS", "GateMap", "Maps"]

KINDS = {"Softplus": SOFTPLUS.value, "BoundedSigmoid": BOUNDED.value, "LogSigmoid": LOG_SIGMOID.value, "NegExp": NEG_EXP.value}
FACTORS = {None: 0.0, "sigmoid": 1.0, "2sigmoid": 2.0}


class GateMap(NamedTuple):
    """A gate object's parameters, and what is static of it.

    Attributes:
        A_log: ``[heads]`` or ``[]``, or ``None``.
        bias: ``[heads]`` or ``[heads, K]``, or ``None``.
        kind: One of the constants of :mod:`..lib.input_maps`; that for none if there is no gate object.
        number: Its lower bound, or ``1/τ``.
    """

    A_log: Tensor | None
    bias: Tensor | None
    kind: int
    number: float

    @classmethod
    def of(cls, gate: Any) -> GateMap:
        """What kernels take of an object of ``linattn.gates``, or of ``None``."""
        if gate is None:
            return cls(None, None, NONE.value, 0.0)
        name, _, value = gate.kind
        number = 0.0 if value is None else 1.0 / value if name == "LogSigmoid" else float(value)
        bias = getattr(gate, "dt_bias", getattr(gate, "bias", None))
        return cls(getattr(gate, "A_log", None), bias, KINDS[name], number)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Of heads of ``A_log``, heads of the bias, and channels of the bias; 0 where one number serves all."""
        A_log, bias = (() if x is None else x.stride() for x in (self.A_log, self.bias))
        return (*A_log, 0)[0], *(*bias, 0, 0)[:2]


class Maps(NamedTuple):
    """The input maps of a call.

    Attributes:
        gate: That of ``g``.
        factor: What multiplies the sigmoid of ``beta``; 0 if it has no map.
        unit: Whether ``q`` and ``k`` are to have unit length.
    """

    gate: GateMap
    factor: float
    unit: bool

    @classmethod
    def of(cls, gate: Any = None, beta_map: str | None = None, qk_norm: str | None = None) -> Maps:
        """The maps of a call's options."""
        if gate is None and beta_map is None:
            return UNIT_ROWS if qk_norm is not None else NO_MAPS
        return cls(GateMap.of(gate), FACTORS[beta_map], qk_norm is not None)


NO_MAPS = Maps(GateMap.of(None), 0.0, False)
UNIT_ROWS = NO_MAPS._replace(unit=True)
