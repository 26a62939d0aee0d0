"""What calls leave behind: memory, open files, threads."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

from ..adapters.base import Arrays
from ..calls import Failure, Run
from ..memory import allocated, entries

__all__ = ["frozen", "leak", "leak_backward"]

CALLS = 16
SETTLING = 0.05
"""Seconds in which a framework's own threads may give back what a finished call used."""
ROUNDS = 3
"""Memory of a process grows for other reasons too: a leak is what grows every time."""


def leak(run: Run) -> None:
    """Calls leave nothing behind."""
    arrays = run.arrays()
    hold_to(run, lambda: run.call(arrays))


def leak_backward(run: Run) -> None:
    """Backward passes leave nothing behind."""
    arrays = run.arrays()
    hold_to(run, lambda: run.gradients(arrays)[1])


def hold_to(run: Run, call: Callable[[], Arrays]) -> None:
    """A round of calls must not hold half of what their smallest result takes, nor leave a file or a thread for every other
    call; or else the next round must not.
    """
    names = {run.case.spec.like, "initial_state", "initial_state.kv"} & run.values.keys()
    smallest = 4 * min(run.values[name].size for name in names)
    most = {"bytes": CALLS * smallest / 2, "open files": CALLS / 2, "threads": CALLS / 2}

    def finished() -> None:
        """What is still being computed holds memory: results are read."""
        for x in call().values():
            run.adapter.to_float64(x)

    for _ in range(3):
        finished()
    with frozen():
        for _ in range(ROUNDS):
            before = held(run)
            for _ in range(CALLS):
                finished()
            after = held(run)
            grown = {name: after[name] - before[name] for name in most if after[name] - before[name] >= most[name]}
            if not grown:
                return
    told = [f"{count / 2**20:.1f} MiB" if name == "bytes" else f"{count} {name}" for name, count in grown.items()]
    raise Failure(f"{CALLS} calls hold {' and '.join(told)} more each time, {ROUNDS} times in a row")


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """The objects that there are already are not looked through again and again, which takes long."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def held(run: Run) -> dict[str, int]:
    """Bytes that live objects hold, on the device as well, and what else the process has open."""
    gc.collect()
    time.sleep(SETTLING)
    return {"bytes": allocated() + run.adapter.held(), "open files": entries("fd"), "threads": entries("task")}
