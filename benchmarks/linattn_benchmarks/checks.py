"""Is what was timed right? Two heads of the very call that is timed, against float64 on the same, rounded inputs.

Heads do not mix, so the first and the last query/key head of every array, with the value heads that read them, give the
same part of every output and gradient. The reference is the oracle, or for long sequences, where its token loop would take
minutes, the PyTorch backend in float64. This guards the figures; whether a backend is right, ``linattn conformance`` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from linattn.ops._family import operator_named
from linattn.spec import Arg

from .cases import Case
from .environment import installed
from .runners import RUNNERS, Call, Outputs, Runner

BOUND = {"float16": 1e-2, "bfloat16": 3e-2, "float32": 2e-3, "float64": 1e-8}
ORACLE_TOKENS = {"cpu": 4096}
"""Most tokens that the oracle is asked for, by device; elsewhere :data:`FEW_TOKENS`: an accelerator should not wait for it."""
FEW_TOKENS = 512


def ends(case: Case, arg: Arg, x: Any) -> list[Any]:
    """The first and the last query/key head of ``x``, with the value heads that read them; all of it if it has no heads."""
    widths = {"H": 1, "HV": case.size["HV"] // case.size["H"]}
    symbols = [symbol for symbol in arg.shapes[0] if symbol in widths]
    if case.size["H"] == 1 or not symbols:
        return [x]
    width, axis = widths[symbols[0]], arg.shapes[0].index(symbols[0])
    before = (slice(None),) * axis
    return [x[(*before, slice(0, width))], x[(*before, slice(-width, None))]]


def check(case: Case, runner: Runner, arrays: Mapping[str, Any], pulled: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Run it once: errors of every output, relative to its largest value, the largest of them and the bound."""
    given = {arg.name: sliced(case, runner, arg, arrays[arg.name]) for arg in case.arrays}
    if case.state:
        name = case.spec.state_name
        given[name] = sliced_state(case, runner, arrays[name])  # before the call, which may write to it
    args = output_args(case)
    source, expected = reference(case, given, {name: sliced(case, runner, args[name], x) for name, x in pulled.items()})
    found = flatten(case, runner, call())
    errors = {name: relative_error(found[name], flat) for name, flat in expected.items()}
    bound = max(BOUND[case.dtype], BOUND[case.gate_dtype])
    return {
        "worst": finite(max(errors.values())),
        "bound": bound,
        "ok": all(error <= bound for error in errors.values()),
        "outputs": {name: finite(error) for name, error in errors.items()},
        "reference": source,
        "heads": expected["o"].shape[2],
    }


def sliced(case: Case, runner: Runner, arg: Arg, x: Any) -> np.ndarray:
    """The checked part of an array, in float64."""
    parts = [runner.numpy(part) for part in ends(case, arg, x)]
    axis = next((i for i, symbol in enumerate(arg.shapes[0]) if symbol in ("H", "HV")), 0)
    return np.concatenate(parts, axis)


def sliced_state(case: Case, runner: Runner, state: Any) -> Any:
    """The checked part of a state, of one array or several."""
    parts = state if isinstance(state, tuple) else (state,)
    cut = [sliced(case, runner, arg, x) for arg, x in zip(case.state, parts, strict=True)]
    if case.spec.state_type is None:
        return cut[0]
    whole = [x.astype(np.int32) if arg.role == "index" else x for arg, x in zip(case.state, cut, strict=True)]
    return case.spec.state_type(*whole)


def output_args(case: Case) -> dict[str, Arg]:
    """By the name of an output or of a gradient, the array whose shape it has."""
    args = {arg.name: arg for arg in (*case.arrays, *case.state)}
    gradients = {f"d{name}": arg for name, arg in args.items()}
    return gradients | {"o": case.values} | ({"final_state": case.state[0]} if case.state else {})


def flatten(case: Case, runner: Runner, outputs: Outputs) -> dict[str, np.ndarray]:
    """The checked part of every output, arrays of a state apart."""
    args = output_args(case)
    found = {}
    for name, x in outputs.items():
        if name == "final_state":
            found |= state_leaves(case, sliced_state(case, runner, x))
        else:
            found[name] = sliced(case, runner, args[name], x)
    return found


def state_leaves(case: Case, state: Any) -> dict[str, np.ndarray]:
    """Arrays of a final state by name."""
    parts = state if isinstance(state, tuple) else (state,)
    return {arg.name.replace("initial", "final"): np.asarray(x) for arg, x in zip(case.state, parts, strict=True)}


def reference(case: Case, given: dict[str, Any], pulled: dict[str, np.ndarray]) -> tuple[str, dict[str, np.ndarray]]:
    """What computed the right outputs, and the outputs."""
    long = case.size["B"] * case.size["T"] > ORACLE_TOKENS.get(case.device, FEW_TOKENS)
    if long and installed("torch") and case.what != "decode":
        return "torch, float64", by_torch(case, given, pulled)
    return "oracle, float64", by_oracle(case, given, pulled)


def by_oracle(case: Case, given: dict[str, Any], pulled: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The definition."""
    from linattn_backends.numpy import NumpyBackend

    packed = {} if case.offsets is None else {"cu_seqlens": case.offsets}
    if case.in_place:
        start = {**given, "initial_state": given["state"]}
        del start["state"]
        o, state = operator_named(f"recurrent_{case.spec.name}")(**start, output_final_state=True, backend="numpy")
    else:
        o, state = operator_named(case.operator)(**given, **packed, **case.options, backend="numpy")
    expected = {"o": o} | ({} if state is None else state_leaves(case, state))
    if not pulled:
        return expected
    absent = dict.fromkeys((*case.spec.keyword_arrays, *(arg.name for arg in case.spec.args)))
    options = {option.name: option.default for option in case.spec.options} | case.options
    d_state = pulled.get("final_state")
    gradients = NumpyBackend().vjp(case.spec.name, absent | given | packed, options, pulled["o"], d_state)
    return expected | {f"d{name}": gradients[name] for name in given}


def by_torch(case: Case, given: dict[str, Any], pulled: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The chunk form of the PyTorch backend, in float64."""
    device = case.device if RUNNERS["torch"](case.device).refusal() is None else "cpu"
    runner = RUNNERS["torch"](device)
    operator = operator_named(f"chunk_{case.spec.name}")
    packed = {} if case.offsets is None else {"cu_seqlens": runner.array(case.offsets, "int32")}

    def function(arrays: dict[str, Any]) -> tuple[Any, Any]:
        return operator(**arrays, **packed, **case.options, backend="torch")

    arrays = {name: runner.array(x, "float64") for name, x in given.items()}
    if pulled:
        call = runner.forward_backward(function, arrays, {name: runner.array(x, "float64") for name, x in pulled.items()})
    else:
        call = runner.forward(function, arrays)
    return {name: runner.numpy(x) for name, x in call().items()}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over largest value; infinite for another shape and for anything that is not finite."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return math.inf
    scale = np.abs(expected).max(initial=0.0)
    return float(np.abs(found - expected).max(initial=0.0) / (scale or 1.0))


def finite(error: float) -> float | None:
    """For JSON, which has no infinity."""
    return error if math.isfinite(error) else None
