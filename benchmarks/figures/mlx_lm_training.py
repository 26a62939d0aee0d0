"""What training through mlx-lm's gated delta rule takes, its own and linattn's: ``python -m figures.mlx_lm_training``.

``gated_delta_update`` on raw projections, B1, 8 query and 16 value heads, K = V = 128, float32, with the gradients of all seven
arrays. ``peak`` is what MLX had allocated at most beyond the inputs. Run on the CPU; needs mlx-lm.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from linattn.integrations.mlx_lm import gated_delta_update
from linattn_benchmarks.environment import write
from mlx_lm.models import gated_delta

from . import RESULTS

HK, HV, K = 8, 16, 128
WAYS = {"mlx-lm": gated_delta.gated_delta_update, "linattn": gated_delta_update}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048])
    options = parser.parse_args()
    results = [measure(way, update, T) for T in options.lengths for way, update in WAYS.items()]
    write(RESULTS / "mlx_lm_training.json", "mlx_lm_training", results)


def measure(way: str, update: Callable[..., Any], T: int) -> dict[str, Any]:
    """One forward and backward pass, after one that compiled what there is to compile."""
    arrays = draw(T)
    gradient = mx.grad(lambda *x: mx.square(update(*x)[0]).sum(), tuple(range(len(arrays))))
    mx.eval(gradient(*draw(16)))
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    cpu = time.process_time()
    mx.eval(gradient(*arrays))
    cpu = round(time.process_time() - cpu, 3)
    row = {"way": way, "T": T, "peak": mx.get_peak_memory() - held, "cpu": cpu}
    print(row, flush=True)
    return row


def draw(T: int) -> list[mx.array]:
    """``q``, ``k``, ``v``, ``a``, ``b``, ``A_log`` and ``dt_bias``."""
    mx.random.seed(0)
    q, k = gated_delta.normalize_qk(*(mx.random.normal((1, T, HK, K)) for _ in range(2)), inv_scale=K**-0.5, eps=1e-6)
    a, b = (mx.random.normal((1, T, HV)) for _ in range(2))
    arrays = [q, k, mx.random.normal((1, T, HV, K)), a, b, mx.random.normal((HV,)), mx.random.normal((HV,))]
    mx.eval(arrays)
    return arrays


if __name__ == "__main__":
    main()
