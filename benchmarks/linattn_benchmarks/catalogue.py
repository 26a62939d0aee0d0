"""The catalogue of ``linattn bench``: which flags a benchmark takes, what it does without them, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from . import commands, published
from .commands import Asked
from .subjects import PEERS

__all__ = ["BENCHMARKS", "Benchmark"]

EVERY = frozenset({"--threads", "--out"})
PLOTTED = EVERY | {"--html", "--png"}
TIMED = PLOTTED | {"--device", "--seed", "--seconds", "--peers", "--peer"}
CALLS = TIMED | {"--backend", "--dtype", "--gate-dtype", "--gates"}
SWEPT = CALLS | {"--budget", "--warm", "--resume", "--rows", "--check", "--tune"}
LAYERS = TIMED | {"--dtype", "--shape", "--what", "--modes", "--small", "--budget", "--warm", "--check", "--tune"}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of ``linattn bench``.

    Attributes:
        run: Its results file, from the words after its name; None where it has shown what it found.
        takes: Its flags, as they are written.
        device: Where it runs, like the next three where nothing is said.
        dtype: Dtype of its main arrays.
        gates: How much its gates forget.
        seconds: Time for the repeats of one call.
        framework: Whose arrays they are; None for those of the backend.
        peers: Libraries beside linattn's backends where none is named; None where what is timed is no call.
        judged: Whether the exit status tells if its results are well.
    """

    run: Callable[[Sequence[str], Asked, Console], dict[str, Any] | None]
    takes: frozenset[str]
    device: str = "cuda"
    dtype: str = "bf16"
    gates: str = "model"
    seconds: float = 0.2
    framework: str | None = "torch"
    peers: Sequence[str] | None = None
    judged: bool = True


BENCHMARKS = {
    "operators": Benchmark(
        commands.operators,
        CALLS | {"--framework", "--shape", "--what", "--fresh"},
        device="cpu",
        dtype="fp32",
        seconds=1.0,
        framework=None,
        peers=tuple(PEERS),
    ),
    "table": Benchmark(commands.table, SWEPT, gates="mixed", peers=tuple(published.PEERS.values())),
    "grid": Benchmark(commands.grid_of, SWEPT, peers=("fla", "jla", "FlashQLA", "FlashInfer", "cuDNN")),
    "parts": Benchmark(commands.parts_of, TIMED | {"--budget", "--warm", "--rows", "--check", "--tune", "--small"}),
    "scale": Benchmark(
        commands.scale_of,
        CALLS - {"--peers", "--peer"} | {"--shape", "--ranks", "--graph", "--budget", "--warm", "--resume"},
        peers=(),
    ),
    "layer": Benchmark(commands.layer, LAYERS, device="cpu", dtype="fp32", seconds=1.0),
    "model": Benchmark(commands.model, LAYERS | {"--layers"}, device="cpu", dtype="fp32", seconds=1.0),
    "overhead --device cuda": Benchmark(
        commands.eager_calls,
        CALLS | {"--budget", "--warm", "--resume"},
        seconds=0.2,
        peers=("fla", "softmax (SDPA)"),
    ),
    "overhead": Benchmark(commands.import_and_dispatch, EVERY | {"--device"}),
    "torch-cpu": Benchmark(commands.torch_cpu, EVERY),
    "report": Benchmark(commands.report, PLOTTED - {"--threads"}, judged=False),
}
"""Benchmarks by name: ``operators`` where none is said, and one with ``--device cuda`` wherever that is not a CPU."""
