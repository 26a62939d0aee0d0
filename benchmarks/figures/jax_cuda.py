"""The backends of JAX arrays on an NVIDIA GPU, beside each other: ``python -m figures.jax_cuda``.

bfloat16, K = V = 128, at the two shapes of ``linattn bench``: the Triton kernels through jax-triton, plain JAX, and
jax-linear-attention where it is installed. Programs are compiled side by side, before anything is timed; those of our own
backends may be lowered beforehand, on a machine without a GPU (``--export``, then ``--programs``). A figure is the median of
batches of calls in a row; the difference is the largest from what the first backend of :data:`BACKENDS` that ran makes of the
same arrays, relative to the largest value of an output or gradient.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from linattn_benchmarks.clocks import spread, wall_times
from linattn_benchmarks.environment import write

from . import RESULTS

SHAPES = ((1, 32768, 4), (4, 4096, 16))
WIDTH = 128
OURS = ("jax_triton", "jax")
BACKENDS = ("jax", "jla", "jax_triton")
"""In the order in which they are timed; each is held against the first that ran."""
FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
PEER = ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
"""Families that jax-linear-attention has kernels for."""
PASSES = ("fwd", "fwdbwd")
LOWERING = threading.Lock()
"""Libraries load their kernels while a first call is traced: another one traced meanwhile would be without."""
SEED = time.time_ns() % 2**31


class Name(NamedTuple):
    """One program."""

    shape: tuple[int, int, int]
    family: str
    backend: str
    what: str

    def file(self, folder: Path) -> Path:
        """Where it is kept once it is lowered."""
        return folder / f"{self.family}-{self.backend}-{self.what}-{'x'.join(map(str, self.shape))}.bin"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--seconds", type=float, default=0.2, help="for the repeats of one program")
    parser.add_argument("--compiling", type=float, default=600.0, help="seconds after which compiling no program begins")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing more is timed")
    parser.add_argument(
        "--untuned", nargs="*", default=(), help="backends whose matmuls XLA is not to tune, which for plain JAX takes minutes"
    )
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--export", type=Path)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "jax_h200.json")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.export:
        export([name for name in names(options.families) if name.backend in OURS], options.export)
        return
    results: list[dict[str, Any]] = []
    for row in rows(options):
        print(row, flush=True)
        results.append(row)
        write(options.out, "jax_cuda", results)
    sys.stdout.flush()
    os._exit(0)  # a thread that is still compiling would keep the process


def names(families: list[str]) -> list[Name]:
    """Of all programs."""
    backends = {family: (*OURS, "jla") if family in PEER else OURS for family in families}
    return [
        Name(shape, family, backend, what)
        for shape in SHAPES
        for family in families
        for what in PASSES
        for backend in BACKENDS
        if backend in backends[family]
    ]


def export(programs: list[Name], folder: Path) -> None:
    """Lower programs for CUDA."""
    import jax
    import jax.export

    checked = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")]
    folder.mkdir(parents=True, exist_ok=True)
    for name in programs:
        if not name.file(folder).exists():
            lowered = jax.export.export(jax.jit(program(name)), platforms=["cuda"], disabled_checks=checked)
            name.file(folder).write_bytes(lowered(arrays_of(name)).serialize())


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each program, those on the same arrays one after the other, after all that are compiled in time are."""
    started = time.monotonic()
    pool = ThreadPoolExecutor(options.threads)
    compiled = {name: pool.submit(compiled_program, name, options) for name in names(options.families)}
    wait_for(compiled.values(), options.compiling)
    pool.shutdown(wait=False, cancel_futures=True)
    wait_for(compiled.values(), options.compiling / 2)  # those begun
    for _, group in groupby(compiled, lambda name: name._replace(backend="")):
        against: dict[str, Any] = {}
        for name in group:
            late = time.monotonic() - started > options.budget
            found = {"error": "not timed: no time left"} if late else measured(name, compiled[name], against, options.seconds)
            sizes = dict(zip("BTH", name.shape, strict=True))
            tuned = {"tuned": name.backend not in options.untuned}
            yield {"op": f"chunk_{name.family}", **sizes, "backend": name.backend, "what": name.what, **tuned, **found}


def measured(name: Name, compiled: Future[Any], against: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Times of one program, and its difference from what it is held ``against``, itself if that is empty; or why not."""
    import jax

    if compiled.cancelled() or not compiled.done():
        return {"error": "not compiled in time"}
    if compiled.exception() is not None:
        return {"error": f"{type(compiled.exception()).__name__}: {str(compiled.exception()).splitlines()[0][:200]}"}
    run, arrays = compiled.result(), drawn(name.family, name.shape)
    outputs = jax.block_until_ready(run(arrays))
    expected = against.setdefault("outputs", outputs)
    started = time.perf_counter()
    jax.block_until_ready(run(arrays))
    size = max(1, min(20, int(0.02 / (time.perf_counter() - started))))  # calls in a row, for some 20 ms

    def batch() -> None:
        jax.block_until_ready([run(arrays) for _ in range(size)][-1])

    times = spread([ms / size for ms in wall_times(batch, seconds)])
    differences = {name: float(difference()(x, expected[name])) for name, x in outputs.items()}
    return {"ms": times, "difference": differences, "against": against.setdefault("backend", name.backend)}


@functools.cache
def difference() -> Callable[[Any, Any], Any]:
    """Largest difference of two arrays relative to the largest value."""
    import jax
    import jax.numpy as jnp

    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    return jax.jit(lambda x, y: jnp.abs(wide(x) - wide(y)).max() / jnp.abs(wide(y)).max())


def compiled_program(name: Name, options: argparse.Namespace) -> Any:
    """From what was lowered beforehand, if it was."""
    import jax
    import jax.export

    run = program(name)
    if options.programs is not None and name.file(options.programs).exists():
        run = jax.export.deserialize(bytearray(name.file(options.programs).read_bytes())).call
    told = {"xla_gpu_autotune_level": 0} if name.backend in options.untuned else {}
    with LOWERING:
        lowered = jax.jit(run).lower(arrays_of(name))
    return lowered.compile(told)


def arrays_of(name: Name) -> Any:
    """Shapes and dtypes of the arrays."""
    import jax

    return jax.eval_shape(lambda: draw(name.family, name.shape))


def program(name: Name) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Forward, or forward and backward, of a dictionary of arrays."""
    import jax
    from linattn.registry import registry

    operator = getattr(registry.load(name.backend), f"chunk_{name.family}")

    def forward(x: dict[str, Any]) -> Any:
        return operator(**x, scale=WIDTH**-0.5)[0]

    def both(x: dict[str, Any]) -> dict[str, Any]:
        o, pull = jax.vjp(forward, x)
        return {"o": o, **{f"d{name}": d for name, d in pull(x["v"])[0].items()}}  # v is as good a gradient as any

    return both if name.what == "fwdbwd" else lambda x: {"o": forward(x)}


@functools.lru_cache(maxsize=1)
def drawn(family: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Kept for the next program."""
    return draw(family, shape)


def draw(family: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Fresh arrays; gates of a new model, keys of unit length for the delta families."""
    import jax
    import jax.numpy as jnp

    B, T, H = shape
    keys = iter(jax.random.split(jax.random.key(SEED), 8))
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
