"""What calls leave behind: memory, open files, threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np

from ..adapters.base import Adapter, Arrays
from ..calls import Failure, Run
from ..memory import allocated, entries

__all__ = ["SETTLING", "begin", "given_back", "in_use", "leak", "leak_backward", "left_by_operation"]

CALLS = 16
SETTLING = 0.05
"""Seconds in which a framework's own threads may give back what a finished call used."""
OLD = 2**26
"""Bytes by which memory may grow until everything is looked through again, before the next case."""
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


RECORD = 1024
"""Bytes that a call may leave behind, of what it was and not of its arrays."""
OPERATIONS, LEAVES, LOOKS = 64, 512, 5
"""Operations of a framework that a call may be of, where the framework itself leaves something behind for each; the most bytes
that count as such; and how often they are counted, for now and then something older goes meanwhile, or something comes to stay.
"""
MORE = ((1, False), (3, False), (8, False), (16, False), (8, True), (16, True))
"""So many calls are made in turn while each time as many more results seem to be held; and whether every object is looked
through then for such as only hold each other, however old it is.
"""


@contextlib.contextmanager
def given_back(run: Run, results: Arrays, calls: Callable[[int], Arrays]) -> Iterator[None]:
    """What calls in a ``with`` block take they give back. Where there is more than before, by as much as one of the
    ``results``, ``calls`` makes some more of them: what was made once, for all that come, does not grow. What the framework
    itself leaves behind on the host is no fault of a call's.
    """
    smallest = min(math.prod(x.shape) for x in results.values())
    least = max(smallest, RECORD)  # a byte for each element: half of the narrowest there are
    before = in_use(run)
    yield
    if in_use(run) - before < least:
        return
    granted = max(least, OPERATIONS * left_by_operation(run.adapter))
    for count, thoroughly in MORE:
        before = in_use(run, thoroughly)  # as thoroughly as after it, or old objects that go meanwhile hide new ones
        on_device = run.adapter.held()
        calls(count)
        grown = in_use(run, thoroughly) - before
        if grown < count * granted and run.adapter.held() - on_device < count * least:
            return
    raise Failure(f"{count} calls hold {grown / 1024:.1f} KiB more each time, however many there were before")


@functools.cache
def left_by_operation(adapter: Adapter) -> float:
    """Bytes that the framework itself leaves behind on the host, for good, for an operation whose result is read: none, but for
    JAX 0.11 on GPUs, which leaves some 300.
    """
    x = adapter.from_float64(np.ones(8), "float32")

    def left() -> int:
        gc.collect()
        before = allocated()
        for _ in range(OPERATIONS):
            adapter.to_float64(x + x)
        gc.collect()
        return allocated() - before

    left()  # what is made once
    return min(max(statistics.median(left() for _ in range(LOOKS)), 0) / OPERATIONS, LEAVES)


def in_use(run: Run, thoroughly: bool = False) -> int:
    """Bytes that live objects hold, on the device as well, without those that nobody knows but they each other.

    What was there before the case is looked through only ``thoroughly``: it takes longer than most cases, and objects of which
    there are more each time are new.
    """
    if thoroughly:
        gc.unfreeze()
    gc.collect()
    return allocated() + run.adapter.held()


class Before:
    """What was there before a case.

    Attributes:
        least: Bytes that were in use when everything was looked through.
    """

    least = 0


def begin(run: Run) -> None:
    """Freeze what is there before a case, so that looks in it need not go through that. No result of the case is among it, and
    what earlier ones left is not, unless it was still held: that goes when everything is looked through, as memory grows.
    """
    if in_use(run) > Before.least + OLD:
        Before.least = in_use(run, thoroughly=True)
    gc.freeze()


def held(run: Run) -> dict[str, int]:
    """Bytes that live objects hold, on the device as well, and what else the process has open."""
    time.sleep(SETTLING)
    return {"bytes": in_use(run), "open files": entries("fd"), "threads": entries("task")}
