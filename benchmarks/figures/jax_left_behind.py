"""What JAX leaves behind on the host: ``python -m figures.jax_left_behind``.

Bytes that the process holds more for each of 16, 50, 200 and 400 calls alike, everything looked through, and a tenth of a
second later: of JAX alone, and of two operators by the backends that are there.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import linattn
import numpy as np
from linattn.errors import LinattnError
from linattn_conformance.memory import allocated

COUNTS = (16, 50, 200, 400)
LATER = 0.1


def calls() -> dict[str, Callable[[], Any]]:
    """What is called, by name."""
    x = np.random.default_rng(0).standard_normal((1, 40, 2, 8)).astype(np.float32)
    a = jnp.asarray(x)
    g, add = -jnp.abs(a), jax.jit(lambda u: u + 1)
    found: dict[str, Callable[[], Any]] = {
        "make an array": lambda: jnp.asarray(x).block_until_ready(),
        "make and delete": lambda: jnp.asarray(x).block_until_ready().delete(),
        "read an array": lambda: np.asarray(a + 0),
        "jit add": lambda: add(a).block_until_ready(),
        "eager add": lambda: (a + a).block_until_ready(),
        "jit add, read": lambda: np.asarray(add(a)),
    }
    for backend in ("jax", "jax_triton"):
        eager = operator(linattn.gla, backend)
        found[f"ours {backend}, eager"] = reading(eager, a, g)
        found[f"ours {backend}, jit"] = reading(jax.jit(eager), a, g)
    return found | {"ours jax_triton, linear_attn": reading(operator(linattn.linear_attn, "jax_triton"), a)}


def operator(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """An operator with one array for queries, keys and values."""
    return lambda q, *gates: function(q, q, q, *gates, backend=backend, output_final_state=True)


def reading(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    """A call whose results are read."""
    return lambda: [np.asarray(y) for y in function(*arrays)]


def held(call: Callable[[], Any], count: int) -> str:
    """Bytes a call after so many more."""
    gc.collect()
    before = allocated()
    for _ in range(count):
        call()
    gc.collect()
    now = allocated()
    time.sleep(LATER)
    return f"{count}: {(now - before) / count:.1f} ({(allocated() - before) / count:.1f} later)"


def main() -> None:
    for name, call in calls().items():
        try:
            for _ in range(5):  # what is made once
                call()
        except LinattnError as error:
            print(f"{name:32} {type(error).__name__}")
            continue
        print(f"{name:32} bytes a call, more calls: {'; '.join(held(call, count) for count in COUNTS)}", flush=True)


if __name__ == "__main__":
    main()
