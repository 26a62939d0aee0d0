"""Kernels without the host: CUDA graph replays of forward, and of forward and backward, on arrays drawn on the device.

``python -m linattn_benchmarks.graphs OUT.json [OPERATOR …]`` times the Triton backend, and the peers that are installed, at the
shapes and gates of :data:`ROWS`, in one process and on the same tensors. Correctness is checked by ``linattn bench`` and by
the conformance suite.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import ceilings
from .cases import DIVISOR, Case
from .environment import write
from .floors import floor
from .subjects import Fla, Linattn, Subject

SHAPES = {
    "B4 T4096 H16 K128 V128": (4, 4096, 16, 128, 128),
    "B1 T32768 H4 K128 V128": (1, 32768, 4, 128, 128),
    "B8 T2048 H4 K256 V512": (8, 2048, 4, 256, 512),
    "B4 T4096 H16 K64 V64": (4, 4096, 16, 64, 64),
}
GATES = {"weak": 1 / 16, "full": 1.0, "strong": 5.0}
"""Factors on ``logsigmoid(x)``, ``x`` normal."""

FAMILIES = ("gla", "simple_gla", "linear_attn", "rwkv6")
ROWS = (
    *((family, shape, "weak" if family in ("gla", "rwkv6") else "full") for shape in SHAPES for family in FAMILIES),
    *(("gla", shape, gates) for shape in list(SHAPES)[:2] for gates in ("full", "strong")),
    *(("simple_gla", shape, gates) for shape in list(SHAPES)[:2] for gates in ("weak", "strong")),
)


def case_of(family: str, shape: str) -> Case:
    """The case whose floor and arrays a row has."""
    B, T, H, K, V = SHAPES[shape]
    sizes = (("B", B), ("T", T), ("H", H), ("HV", H), ("K", K), ("V", V), ("C", 256))
    vector = "bfloat16" if family in DIVISOR or family == "rwkv6" else "float32"
    return Case(f"chunk_{family}", "fwd", sizes, device="cuda", dtype="bfloat16", gate_dtype=vector)


def arrays_of(case: Case, gates: str) -> dict[str, Any]:
    """Random arrays on the device, requiring gradients."""
    import torch

    arrays = {}
    for arg in case.arrays:
        x = torch.randn(case.shape(arg), device="cuda")
        if arg.name == "g":
            x = torch.nn.functional.logsigmoid(x) * GATES[gates]
        arrays[arg.name] = x.to(getattr(torch, case.dtype_of(arg))).requires_grad_()
    return arrays


def timed(call: Any) -> dict[str, float | None]:
    """Medians: of graph replays, and called eagerly with the host's share; and the memory that one call needs."""
    import torch
    from triton.testing import do_bench, do_bench_cudagraph

    call()
    torch.cuda.synchronize()
    eager = do_bench(call, warmup=10, rep=40, return_mode="median")
    try:
        graph = do_bench_cudagraph(call, rep=40, return_mode="median")
    except RuntimeError:  # a call that waits for the device cannot be recorded
        graph = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return {"graph_ms": graph, "eager_ms": eager, "peak_bytes": peak}


def one_row(subject: Subject, case: Case, arrays: dict[str, Any]) -> dict[str, Any]:
    """Both passes of one subject, or why there are none."""
    import torch

    function = subject.function(case)
    d_o = torch.randn_like(arrays["v"])

    def forward() -> Any:
        with torch.no_grad():
            return function(arrays)

    def both() -> Any:
        return torch.autograd.grad(function(arrays)[0], tuple(arrays.values()), d_o)

    try:
        return {"fwd": timed(forward), "fwdbwd": timed(both)}
    except Exception as error:  # somebody else's code: the row says what happened
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def subjects() -> list[Subject]:
    """The Triton backend, and fla where it is installed."""
    return [Linattn("triton", "torch"), *([Fla()] if Fla().refusal(case_of("gla", next(iter(SHAPES)))) is None else [])]


def run(families: tuple[str, ...], report: Any = print) -> dict[str, Any]:
    """All rows of ``families``."""
    import torch

    measured = ceilings.measure("cuda", "bfloat16")
    rows = []
    for family, shape, gates in ROWS:
        if family not in families:
            continue
        torch.manual_seed(0)
        case = case_of(family, shape)
        arrays = arrays_of(case, gates)
        floors = {what: floor(replaced(case, what), measured)["ms"] for what in ("fwd", "fwdbwd")}
        for subject in subjects():
            row = {"family": family, "shape": shape, "gates": gates, "library": subject.label, "floor": floors}
            rows.append(row | one_row(subject, case, arrays))
            report(rows[-1])
        del arrays
    return {"ceilings": measured, "rows": rows}


def replaced(case: Case, what: str) -> Case:
    """The case with another thing done."""
    import dataclasses

    return dataclasses.replace(case, what=what)


def main() -> None:
    """Write a results file."""
    target, *families = sys.argv[1:]
    write(Path(target), "triton-graphs", run(tuple(families) or FAMILIES))


if __name__ == "__main__":
    main()
