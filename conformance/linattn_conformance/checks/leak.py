"""Memory that calls leave behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from ..calls import Failure, Run
from ..memory import allocated
from .values import require_gradient

__all__ = ["leak", "leak_backward"]

CALLS = 16
ROUNDS = 3
"""Memory of a process grows for other reasons too: a leak is what grows every time."""


def leak(run: Run) -> None:
    """Calls leave nothing behind."""
    arrays = run.arrays()
    run.require(arrays)
    hold_to(run, lambda: run.call(arrays))


def leak_backward(run: Run) -> None:
    """Backward passes leave nothing behind."""
    arrays = run.arrays()
    require_gradient(run, arrays)
    hold_to(run, lambda: run.gradients(arrays))


def hold_to(run: Run, call: Callable[[], Any]) -> None:
    """A round of calls must not hold half of what their smallest result takes, or else the next round must not."""
    smallest = 4 * min(size(run, "o"), size(run, "final_state"))
    for _ in range(3):
        call()
    gc.collect()
    gc.freeze()  # what there was before takes long to look through, again and again
    try:
        for _ in range(ROUNDS):
            before = held(run)
            for _ in range(CALLS):
                call()
            grown = held(run) - before
            if grown < CALLS * smallest / 2:
                return
    finally:
        gc.unfreeze()
    raise Failure(f"{CALLS} calls hold {grown / 2**20:.1f} MiB more each time, {ROUNDS} times in a row")


def size(run: Run, name: str) -> int:
    """Elements of a result."""
    B, T, HV, K, V = (run.problem.sizes[symbol] for symbol in ("B", "T", "HV", "K", "V"))
    return B * HV * V * (T if name == "o" else K)


def held(run: Run) -> int:
    """Bytes that live objects hold, on the device as well."""
    gc.collect()
    return allocated() + run.adapter.held()
