"""What linattn itself costs: importing it, dispatching one eager call, and looking for mistakes in what it is given.

Importing is timed in fresh interpreters, ``import numpy, linattn`` against ``import numpy``, in turn. Dispatch is timed with
a backend that returns at once, called through the API and directly. Looks (:mod:`linattn.guards`) are timed by themselves,
beside the calls whose arrays they look at. All is processor time, which a busy machine hardly lengthens; the smallest of many
repeats of each is taken, because whatever else the machine does only ever adds to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import linattn
from linattn import guards
from linattn.frameworks import framework_of
from linattn.plugin import Backend

FORBIDDEN = ("torch", "jax", "mlx", "triton")


def run(imports: int = 15, batches: int = 60, calls: int = 2000) -> dict[str, Any]:
    """Measure all three.

    Args:
        imports: Fresh interpreters for each of the two import commands.
        batches: Batches of calls.
        calls: Calls in a batch.
    """
    if "torch" in inputs():
        import torch

        torch.set_num_threads(1)  # threads that wait for each other take processor time, too
    return {
        "import": import_time(imports),
        "dispatch_us": dispatch_times(batches, calls),
        "guards": guard_costs(max(3, batches // 10), max(1, calls // 100)),
    }


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
    """Milliseconds of processor time that a fresh interpreter spends on ``code`` alone, modules compiled beforehand."""
    timed = f"import time; start = time.process_time(); {code}; print((time.process_time() - start) * 1e3)"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True, env=kept).stdout)


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
    backend, g = Instant(), -x
    keywords = dict(scale=1.0, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None)
    with linattn.use_backend(Instant.name):
        through = fastest(lambda: linattn.chunk_gla(x, x, x, g), batches, calls)
    return through - fastest(lambda: backend.chunk_gla(x, x, x, g, None, **keywords), batches, calls)


LOOKS, LOOKED_AT = 3, guards.SPARSER**2
"""How many looks there are in how many calls of one kind: the first, the ``SPARSER``-th and the last of them."""


def guard_costs(batches: int, calls: int) -> dict[str, dict[str, float]]:
    """What looks cost calls of ``kda``, of whose arrays most are looked at, by framework and number of tokens."""
    return {
        f"{framework}, T = {T}": guard_cost(framework, T, batches, calls if T == 1 else 1)
        for framework in inputs()
        for T in (1, 1024)
    }


def guard_cost(framework: str, T: int, batches: int, calls: int) -> dict[str, float]:
    """Microseconds of one look and of one call, and the share of looks in the time of the first :data:`LOOKED_AT` calls."""
    arrays = drawn(framework, T)
    watch = guards.Watch(linattn.kda.spec, "kda", linattn.explain(linattn.kda, *arrays).call)

    def look() -> None:
        watch.calls = watch.due = 1
        watch(framework_of(arrays[0], "q"), arrays)

    looked, called = fastest(look, batches, 100), fastest(lambda: linattn.kda(*arrays), batches, calls)
    return {"look_us": looked, "call_us": called, "share": LOOKS * looked / (LOOKED_AT * called)}


def drawn(framework: str, T: int) -> list[Any]:
    """``q, k, v, g, beta`` of a model: keys of unit length, decays of no more than 0."""
    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v, g = (rng.standard_normal((1, T, 4, 64), dtype=np.float32) for _ in range(4))
    arrays = q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, -abs(g), rng.random((1, T, 4), dtype=np.float32)
    if framework == "numpy":
        return list(arrays)
    import torch

    return [torch.from_numpy(x) for x in arrays]


def fastest(function: Callable[[], Any], batches: int, calls: int) -> float:
    """Microseconds of processor time of one call, in the fastest batch."""
    best = float("inf")
    for _ in range(batches):
        start = time.process_time()
        for _ in range(calls):
            function()
        best = min(best, time.process_time() - start)
    return best / calls * 1e6
