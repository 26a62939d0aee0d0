"""What linattn itself costs: importing it, and dispatching one eager call.

Importing is timed in fresh interpreters, ``import numpy, linattn`` against ``import numpy``, in turn. Dispatch is timed with
a backend that returns at once, called through the API and directly. Both are processor time, which a busy machine hardly
lengthens; the smallest of many repeats of each is taken, because whatever else the machine does only ever adds to it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import linattn
from linattn.plugin import Backend

FORBIDDEN = ("torch", "jax", "mlx", "triton")


def run(imports: int = 15, batches: int = 60, calls: int = 2000) -> dict[str, Any]:
    """Measure both.

    Args:
        imports: Fresh interpreters for each of the two import commands.
        batches: Batches of calls.
        calls: Calls in a batch.
    """
    return {"import": import_time(imports), "dispatch_us": dispatch_times(batches, calls)}


def import_time(repeats: int) -> dict[str, Any]:
    """Milliseconds of ``import linattn`` beyond numpy's own import, and the frameworks it loaded (there must be none)."""
    numpy, both = [], []
    for _ in range(repeats):
        numpy.append(interpreter("import numpy"))
        both.append(interpreter("import numpy, linattn"))
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, linattn; print(*[m for m in {FORBIDDEN!r} if m in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "numpy_ms": min(numpy),
        "numpy_and_linattn_ms": min(both),
        "beyond_numpy_ms": min(both) - min(numpy),
        "frameworks_loaded": loaded.stdout.split(),
        "repeats": repeats,
    }


def interpreter(code: str) -> float:
    """Milliseconds of processor time that a fresh interpreter spends on ``code`` alone."""
    timed = f"import time; start = time.process_time(); {code}; print((time.process_time() - start) * 1e3)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)


class Instant(Backend):
    """Returns its input."""

    name, api, frameworks = "instant-for-benchmark", ">=1,<2", ("numpy", "torch")

    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        return v, None


def dispatch_times(batches: int, calls: int) -> dict[str, float]:
    """Microseconds that the API adds to one ``chunk_gla`` call, by framework."""
    linattn.register_backend(Instant)
    try:
        return {framework: added(x, batches, calls) for framework, x in inputs().items()}
    finally:
        linattn.unregister_backend(Instant.name)


def inputs() -> dict[str, Any]:
    """A small array of each installed framework."""
    import numpy as np

    found: dict[str, Any] = {"numpy": np.ones((1, 16, 2, 8), np.float32)}
    try:
        import torch
    except ImportError:
        return found
    return {**found, "torch": torch.ones(1, 16, 2, 8)}


def added(x: Any, batches: int, calls: int) -> float:
    """Microseconds of one call through the API less one direct call."""
    backend = Instant()
    keywords = dict(scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None)
    with linattn.use_backend(Instant.name):
        through = fastest(lambda: linattn.chunk_gla(x, x, x, x), batches, calls)
    return through - fastest(lambda: backend.chunk_gla(x, x, x, x, None, **keywords), batches, calls)


def fastest(function: Callable[[], Any], batches: int, calls: int) -> float:
    """Microseconds of processor time of one call, in the fastest batch."""
    best = float("inf")
    for _ in range(batches):
        start = time.process_time()
        for _ in range(calls):
            function()
        best = min(best, time.process_time() - start)
    return best / calls * 1e6
