"""``chunk_gla`` of the JAX backend on the CPU, beside the PyTorch backend: ``python -m figures.jax_cpu``.

B1 H4 K = V = 128 float32, gates ``logsigmoid(x) / 16`` (weak) and ``logsigmoid(x)``. The two backends take turns, and the best
of several rounds counts, so that other work on the machine troubles both alike. ``cpu`` is processor seconds, all threads
together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from linattn_benchmarks.environment import write

from . import RESULTS

H, K = 4, 128
GATES = {"weak": 16.0, "ordinary": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 16384, 32768, 65536])
    options = parser.parse_args()
    results = []
    for gate in GATES:
        for T in options.lengths if gate == "weak" else options.lengths[:1]:
            results += measure(T, gate, options.rounds if options.lengths[0] == T else 2, beside_torch=options.lengths[0] == T)
            for row in results[-2:]:
                print(row, flush=True)
    write(RESULTS / "jax_cpu.json", "jax_cpu", results)


def measure(T: int, gate: str, rounds: int, beside_torch: bool) -> list[dict[str, Any]]:
    """Best wall and processor seconds of forward, and of forward and backward."""
    rng = np.random.default_rng(0)
    q, k, v, x = (rng.standard_normal((1, T, H, K), dtype=np.float32) for _ in range(4))
    arrays = q, k, v, -np.logaddexp(0, -x) / np.float32(GATES[gate])
    runs = {("jax", mode): run for mode, run in jax_runs(arrays).items()}
    if beside_torch:
        runs |= {("torch", mode): run for mode, run in torch_runs(arrays).items()}
    best = {name: (float("inf"), float("inf")) for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = tuple(map(min, best[name], timed(run)))
    return [
        {
            "op": "chunk_gla",
            "gate": gate,
            "T": T,
            "mode": mode,
            "backend": backend,
            "seconds": round(wall, 4),
            "cpu": round(cpu, 4),
        }
        for (backend, mode), (wall, cpu) in best.items()
    ]


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def jax_runs(arrays: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    from linattn_backends.jax import JaxBackend

    operator = JaxBackend().chunk_gla
    given = [jnp.asarray(x) for x in arrays]
    forward = jax.jit(lambda *a: operator(*a)[0])
    both = jax.jit(jax.grad(lambda *a: operator(*a)[0].sum(), (0, 1, 2, 3)))
    return {
        "forward": lambda: jax.block_until_ready(forward(*given)),
        "forward+backward": lambda: jax.block_until_ready(both(*given)),
    }


def torch_runs(arrays: tuple[Any, ...]) -> dict[str, Callable[[], Any]]:
    import torch
    from linattn_backends.torch import TorchBackend

    operator = TorchBackend().chunk_gla
    given = [torch.from_numpy(x) for x in arrays]
    leaves = [x.clone().requires_grad_() for x in given]
    return {
        "forward": lambda: operator(*given)[0],
        "forward+backward": lambda: torch.autograd.grad(operator(*leaves)[0].sum(), leaves),
    }


if __name__ == "__main__":
    main()
