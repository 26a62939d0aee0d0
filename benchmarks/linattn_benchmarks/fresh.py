"""First call and peak memory, in a process of its own with empty compilation caches.

Run as ``python -m linattn_benchmarks.fresh`` with one case and one subject as JSON on standard input, it prints JSON.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from linattn.spec import Arg

from . import elsewhere
from .cases import Case, draw
from .clocks import resident_peak
from .runners import Runner
from .subjects import Subject, subject_named

CACHES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "JAX_COMPILATION_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "XDG_CACHE_HOME",
)


def first_call(case: Case, subject: Subject, timeout: float = 600) -> dict[str, Any]:
    """``first_call_s``, ``peak_bytes`` and what the peak counts; None of them where the process failed or took too long."""
    who = {"library": subject.library, "backend": subject.backend, "framework": subject.framework}
    with tempfile.TemporaryDirectory() as empty:
        caches = {name: os.path.join(empty, name.lower()) for name in CACHES}
        try:
            return elsewhere.ask(__name__, {"case": case.as_json(), "subject": who}, timeout, caches)
        except elsewhere.NoAnswer:
            return nothing()


def nothing() -> dict[str, Any]:
    """No figures."""
    return {"first_call_s": None, "peak_bytes": None, "peak_of": None}


def prepared(case: Case, subject: Subject) -> tuple[Any, dict[str, Any], Any]:
    """The runner, its arrays and the gradients of the outputs by name, on the device; no gradients where none are pulled."""
    runner, inputs = subject.runner(case), draw(case)
    wanted = subject.names(case)
    arrays = {arg.name: placed(case, runner, arg, inputs.arrays[arg.name]) for arg in case.arrays if arg.name in wanted}
    if case.state:
        parts = [runner.array(x, case.dtype_of(arg)) for arg, x in zip(case.state, inputs.state, strict=True)]
        arrays[case.spec.state_name] = case.spec.state_type(*parts) if case.spec.state_type else parts[0]
    pulled = {}
    if case.what == "fwdbwd":
        pulled["o"] = placed(case, runner, case.values, inputs.d_o)
        if case.states:
            pulled["final_state"] = runner.array(inputs.state[0][::-1], case.dtype_of(case.state[0]))
    runner.wait(arrays)
    return runner, arrays, pulled


def placed(case: Case, runner: Any, arg: Arg, x: np.ndarray) -> Any:
    """An array on the device, where the tokens of packed and of periodic sequences are repeated, one sequence after another."""
    short, wanted = runner.array(x, case.dtype_of(arg)), case.shape(arg)
    return short if x.shape == wanted else runner.repeated(short, case.size["B"] * case.size["T"]).reshape(wanted)


def call_of(case: Case, subject: Subject, runner: Any, arrays: dict[str, Any], pulled: dict[str, Any]) -> Any:
    """The call that is timed."""
    function, given = subject.function(case), subject.given(case, arrays)
    return runner.forward_backward(function, given, pulled) if pulled else runner.forward(function, given)


def measured(request: dict[str, Any]) -> dict[str, Any]:
    """Time the first call, then look at the memory of the second."""
    case, subject = Case.from_json(request["case"]), subject_named(**request["subject"])
    runner, arrays, pulled = prepared(case, subject)
    start = time.perf_counter()
    call = call_of(case, subject, runner, arrays, pulled)
    runner.wait(call())
    return {"first_call_s": time.perf_counter() - start, **peak_of(runner, call)}


def peak_of(runner: Runner, call: Callable[[], Any]) -> dict[str, Any]:
    """``peak_bytes`` of a call beyond its inputs and ``peak_of``, what they count; None where nobody can say."""
    if (on_device := runner.peak(call)) is not None:
        return {"peak_bytes": on_device, "peak_of": "device allocator"}
    peak = resident_peak(lambda: runner.wait(call())) if runner.device == "cpu" else None
    return {"peak_bytes": peak, "peak_of": None if peak is None else "resident memory"}


if __name__ == "__main__":
    elsewhere.answer(measured)
