"""Memory of the MLX backend's forward and backward pass on the CPU: ``python -m figures.mlx_memory``.

B1 H4 K = V = 128, bfloat16 operands, float32 gates. ``peak`` is what MLX had allocated at most beyond the inputs, outputs and
gradients included. Beside the chunk form stands the recurrence of ``gla`` as a loop of MLX operations over the tokens that MLX
differentiates, as models without a kernel have it: every step leaves a few states behind.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import linattn
import mlx.core as mx
from linattn_benchmarks.environment import write

from . import RESULTS

H, K = 4, 128
FAMILIES = ("gla", "gated_delta_rule", "kda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--loop", type=int, nargs="*", default=[512, 1024, 2048])
    options = parser.parse_args()
    results = [measure("loop", loop, T, "gla") for T in options.loop]
    results += [measure("chunk", getattr(linattn, f"chunk_{name}"), T, name) for name in FAMILIES for T in options.lengths]
    write(RESULTS / "mlx_memory.json", "mlx_memory", results)


def measure(way: str, operator: Callable[..., Any], T: int, family: str) -> dict[str, Any]:
    """One forward and backward pass."""
    arrays = draw(T, family)
    gradient = mx.grad(lambda *a: mx.square(operator(*a)[0].astype(mx.float32)).sum(), tuple(range(len(arrays))))
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    cpu = time.process_time()
    mx.eval(gradient(*arrays))
    row = {
        "op": family,
        "way": way,
        "T": T,
        "inputs": sum(x.nbytes for x in arrays),
        "peak": mx.get_peak_memory() - held,
        "cpu": round(time.process_time() - cpu, 3),
    }
    print(row, flush=True)
    return row


def draw(T: int, family: str) -> list[mx.array]:
    """``q``, ``k``, ``v``, a gate, and ``beta`` where the family has it."""
    q, k, v = (mx.random.normal((1, T, H, K)) for _ in range(3))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    g = linattn.gates.gla(mx.random.normal((1, T, H) if family == "gated_delta_rule" else (1, T, H, K)))
    beta = [mx.sigmoid(mx.random.normal((1, T, H)))] if family != "gla" else []
    arrays = [*(x.astype(mx.bfloat16) for x in (q, k, v)), g, *beta]
    mx.eval(arrays)
    return arrays


def loop(q: mx.array, k: mx.array, v: mx.array, g: mx.array) -> tuple[mx.array, mx.array]:
    """``gla`` token by token, in operations."""
    S = mx.zeros((1, H, K, K))
    rows = []
    for t in range(q.shape[1]):
        S = mx.exp(g[:, t, :, :, None]) * S + k[:, t, :, :, None].astype(mx.float32) * v[:, t, :, None]
        rows.append(K**-0.5 * (q[:, t, :, None].astype(mx.float32) @ S).squeeze(-2))
    return mx.stack(rows, 1).astype(v.dtype), S


if __name__ == "__main__":
    main()
