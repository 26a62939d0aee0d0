"""The backends of JAX arrays on an NVIDIA GPU, beside each other: ``python -m linattn_benchmarks.jax_cuda``.

bfloat16, K = V = 128, at the two shapes of ``linattn bench``: the Triton kernels through jax-triton, plain JAX, and
jax-linear-attention where it is installed. Programs are compiled side by side, before anything is timed. A figure is the
median of batches of calls in a row; the difference is the largest from plain JAX on the same arrays, relative to the largest
value of an output or gradient.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .clocks import spread, wall_times
from .environment import RESULTS, write

SHAPES = ((4, 4096, 16), (1, 32768, 4))
WIDTH = 128
BATCH = 20
BACKENDS = ("jax", "jax_triton", "jla")
FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--backends", nargs="*", default=BACKENDS)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS / "jax_h200.json")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    write(options.out, "jax_cuda", list(rows(options)))


def rows(options: Any) -> Iterator[dict[str, Any]]:
    """One for each family, shape, backend, and pass."""
    names = [(family, shape, backend) for family in options.families for shape in SHAPES for backend in options.backends]
    with ThreadPoolExecutor(options.threads) as pool:
        waiting = {name: pool.submit(programs, *name) for name in names}
        found = {name: future.result() for name, future in waiting.items()}
    for family in options.families:
        for shape in SHAPES:
            arrays = draw(family, shape)
            truth: dict[str, Any] = {}
            for backend in options.backends:
                for what, program in found[family, shape, backend].items():
                    row = {
                        "op": f"chunk_{family}",
                        "B": shape[0],
                        "T": shape[1],
                        "H": shape[2],
                        "backend": backend,
                        "what": what,
                    }
                    row |= measured(program, arrays, truth, what, options.seconds)
                    print(row, flush=True)
                    yield row


def measured(program: Any, arrays: dict[str, Any], truth: dict[str, Any], what: str, seconds: float) -> dict[str, Any]:
    """Times and error of one program, or why there is none."""
    import jax

    if isinstance(program, str):
        return {"error": program}
    outputs = program(arrays)
    expected = truth.setdefault(what, jax.tree.map(np.asarray, outputs))

    def batch() -> None:
        jax.block_until_ready([program(arrays) for _ in range(BATCH)][-1])

    times = spread([ms / BATCH for ms in wall_times(batch, seconds)])
    return {"ms": times, "difference": {name: difference(x, expected[name]) for name, x in outputs.items()}}


def difference(x: Any, y: Any) -> float:
    """Largest difference relative to the largest value."""
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    return float(np.abs(x - y).max() / np.abs(y).max())


def programs(family: str, shape: tuple[int, int, int], backend: str) -> dict[str, Any]:
    """Compiled forward, and forward and backward; where a backend cannot, the reason."""
    import jax

    function = operator(family, backend)
    arrays = jax.eval_shape(lambda: draw(family, shape))

    def both(x: dict[str, Any]) -> dict[str, Any]:
        x = dict(x)
        o, pull = jax.vjp(function, x)
        return {"o": o, **{f"d{name}": d for name, d in pull(x["v"])[0].items()}}  # v is as good a gradient as any

    found: dict[str, Any] = {}
    for what, program in {"fwd": lambda x: {"o": function(x)}, "fwdbwd": both}.items():
        try:
            found[what] = jax.jit(program).lower(arrays).compile()
        except Exception as error:  # a library that cannot compile is a line of the table
            found[what] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return found


def operator(family: str, backend: str) -> Callable[[dict[str, Any]], Any]:
    """``o`` of a dictionary of arrays."""
    import linattn

    return lambda arrays: getattr(linattn, f"chunk_{family}")(**arrays, backend=backend)[0]


def draw(family: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Fresh arrays; gates of a new model, keys of unit length for the delta families."""
    import jax
    import jax.numpy as jnp

    B, T, H = shape
    keys = iter(jax.random.split(jax.random.key(os.getpid()), 8))
    normal = lambda *sizes: jax.random.normal(next(keys), (B, T, H, *sizes))  # noqa: E731
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    x = {name: normal(WIDTH) for name in "qkv"}
    if family in ("delta_rule", "gated_delta_rule", "kda", "dplr"):
        x |= {name: unit(x[name]) for name in "qk"}
    x = {name: y.astype(jnp.bfloat16) for name, y in x.items()}
    if family in ("simple_gla", "gated_delta_rule"):
        x["g"] = jax.nn.log_sigmoid(normal())
    elif family in ("gla", "rwkv6", "kda", "dplr"):
        x["g"] = jax.nn.log_sigmoid(normal(WIDTH)) / (16 if family == "gla" else 1)
    if family == "rwkv6":
        x["u"] = jax.random.normal(next(keys), (H, WIDTH))
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        x["beta"] = jax.nn.sigmoid(normal())
    if family == "dplr":
        direction = unit(normal(WIDTH))
        x |= {"a": (-direction).astype(jnp.bfloat16), "b": (direction * jax.nn.sigmoid(normal(1))).astype(jnp.bfloat16)}
    return x


if __name__ == "__main__":
    main()
