"""``normalize=True``: outputs are weighted means of the values, whatever the family that weighs them.

A column of ones beside the values is decayed and read like any other, so it sums the weights: ``q_t · z_t`` with
``z_t = Σ_{j≤t} k_j``, each key decayed as its value is (Katharopoulos et al. 2020, eqs. 18-20; gated, Peng et al. 2021, §3.2).
"""

from __future__ import annotations

from typing import Any

from ..call import Call
from ..spec import MATRIX_STATE, Arg, Lowered, Lowering, Option, Options, accumulation_dtype, redescribe, unchanged

__all__ = ["NORMALIZE", "normalized_state", "with_column"]

WITH_NORMALISER = (Arg("initial_state", "N HV K V+1", "float", optional=True),)


def normalized_state(options: Options) -> tuple[Arg, ...]:
    """The state of a family that has the option: under it, one more value column carries ``z``."""
    return WITH_NORMALISER if options["normalize"] is True else MATRIX_STATE


def describe(call: Call) -> Call:
    """What :func:`apply` gives, as static facts."""
    wide, shapes = accumulation_dtype(call), call.shapes
    operands = {name: (shapes[name], wide) for name in ("q", "k", "v") if name in shapes}
    states = [name for name in ("initial_state", "state") if call.has(name)]
    give = operands | {name: (shapes[name].removesuffix("+1"), call.dtypes[name]) for name in states}
    unset = {"normalize": False, "scale": None}  # a summary has no scale
    return redescribe(call, call.op, give, dims={"V": call.V + 1}, options=unset)


def apply(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """Add the column of ones, which nothing decays along the values; divide by what comes of it.

    Both stay in the accumulation dtype until they are divided, and so do the operands. ``scale`` cancels. A summary reads
    nothing, and so divides nothing.
    """
    out_dtype = xp.dtype(arrays["v"])
    wide = {name: xp.astype(x, xp.accumulation(x)) for name, x in arrays.items() if name in ("q", "k", "v")}
    wide["v"], gv = with_column(xp, wide["v"], arrays.get("gv"))
    wider = {**arrays, **wide, **({} if gv is None else {"gv": gv})}
    if "q" not in arrays:
        return Lowered(wider, {**options, "normalize": False}, unchanged)

    def finish(o: Any, state: Any) -> tuple[Any, Any]:
        return xp.astype(divide(xp, o), out_dtype), state

    return Lowered(wider, {**options, "normalize": False, "scale": wide["k"].shape[-1] ** -0.5}, finish)


def with_column(xp: Any, v: Any, gv: Any) -> tuple[Any, Any]:
    """Values with a column of ones, and their log decays, if any, with one of zeros."""
    v = xp.concat([v, xp.full((*v.shape[:-1], 1), 1.0, like=v)], axis=-1)
    return v, None if gv is None else xp.concat([gv, xp.full((*gv.shape[:-1], 1), 0.0, like=gv)], axis=-1)


def divide(xp: Any, o: Any) -> Any:
    """``o[..., :-1] / o[..., -1:]``; a denominator of zero gives a zero row."""
    numerator, denominator = o[..., :-1], o[..., -1:]
    zero = denominator == 0
    return xp.where(zero, xp.full((), 0.0, like=o), numerator / xp.where(zero, xp.full((), 1.0, like=o), denominator))


NORMALIZE = Option("normalize", (bool,), False, lowering=Lowering(None, apply, describe))
