"""Input maps: options that say how a model's projections become normalised keys, log decays and writing strengths.

A method that takes one gets it, so that a kernel may apply it while loading; for any other it is applied here first, in the
accumulation dtype, in this order: ``qk_norm``, ``gate``, ``beta_map``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..call import Call
from ..gate_maps import GATES, Gate, GateKind
from ..spec import Holder, Lowered, Lowering, Option, redescribe, unchanged
from ._sequences import of_sequences

__all__ = [
    "BETA_MAP",
    "GATE",
    "HEAD_GATE",
    "QK_NORM",
    "apply_beta_map",
    "apply_gate",
    "describe_beta_map",
    "describe_gate",
]

EPSILON = 1e-6
"""What ``qk_norm="l2"`` adds to the sum of squares."""


def _normalize(xp: Any, x: Any) -> Any:
    """``x · (Σ x² + ε)^{-1/2}`` along the last axis, rounded once to the dtype of ``x``.

    Numbers above one are divided by the largest first: their squares may overflow, and the gradient of the sum of squares, as
    many times smaller than that of ``x`` as ``x`` is long, may be flushed to zero.
    """
    wide = xp.astype(x, xp.accumulation(x))
    size = xp.maximum(xp.magnitude(wide), xp.full((), 1.0, like=wide))
    scaled = wide / size
    squares = (scaled * scaled).sum(-1)[..., None]
    return xp.astype(scaled * (squares + EPSILON / size / size) ** -0.5, xp.dtype(x))


def apply_qk_norm(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """Unit queries and keys, a token and head at a time."""
    given = [name for name in ("q", "k") if name in arrays]  # a summary has no queries
    unit = {name: _normalize(xp, of_sequences(xp, arrays[name], options.get("cu_seqlens"))) for name in given}
    return Lowered({**arrays, **unit}, {**options, "qk_norm": None}, unchanged)


def apply_gate(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """The log decays that a gate object makes of ``g``."""
    g = options["gate"](of_sequences(xp, arrays["g"], options.get("cu_seqlens")))
    return Lowered({**arrays, "g": g}, {**options, "gate": None}, unchanged)


def describe_gate(call: Call) -> Call:
    """What :func:`apply_gate` gives, as static facts."""
    parameters = tuple(name for name, _, _ in call.arrays if name.startswith("gate."))
    dtype = "float64" if call.dtypes["g"] == "float64" else "float32"
    return redescribe(call, call.op, {"g": (call.shapes["g"], dtype)}, drop=(*parameters, "G"), options={"gate": None})


def apply_beta_map(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """``σ(beta)``, or twice that."""
    beta = of_sequences(xp, arrays["beta"], options.get("cu_seqlens"))
    beta = xp.astype(beta, xp.accumulation(beta))
    factor = 2.0 if options["beta_map"] == "2sigmoid" else 1.0
    return Lowered({**arrays, "beta": factor * xp.exp(xp.log_sigmoid(beta))}, {**options, "beta_map": None}, unchanged)


def describe_beta_map(call: Call) -> Call:
    """What :func:`apply_beta_map` gives, as static facts."""
    dtype = "float64" if call.dtypes["beta"] == "float64" else "float32"
    return redescribe(call, call.op, {"beta": (call.shapes["beta"], dtype)}, options={"beta_map": None})


def describe_qk_norm(call: Call) -> Call:
    """What :func:`apply_qk_norm` gives, as static facts."""
    return redescribe(call, call.op, options={"qk_norm": None})


def parameters_of(gate: GateKind) -> dict[str, str]:
    """Symbolic shapes of the parameters that a gate object of a kind holds."""
    return {name: GATES[gate.name].shapes[name] for name in gate.parameters}


def parameters_by_head(gate: GateKind) -> dict[str, str]:
    """Those of a family whose ``g`` has one number a head: none has one a key channel."""
    return {
        name: "|".join(shape for shape in shapes.split("|") if "K" not in shape.split())
        for name, shapes in parameters_of(gate).items()
    }


QK_NORM = Option("qk_norm", (str,), choices=("l2",), lowering=Lowering(None, apply_qk_norm, describe_qk_norm))
GATE = Option(
    "gate",
    (GateKind,),
    lowering=Lowering(None, apply_gate, describe_gate),
    holder=Holder(Gate, parameters_of, "an object of linattn.gates"),
)
HEAD_GATE = replace(GATE, holder=Holder(Gate, parameters_by_head, "an object of linattn.gates"))
BETA_MAP = Option(
    "beta_map", (str,), choices=("sigmoid", "2sigmoid"), lowering=Lowering(None, apply_beta_map, describe_beta_map)
)
