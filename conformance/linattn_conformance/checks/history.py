"""What a call may not know: the calls before it, those beside it, and the state of the process."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from ..adapters.base import Arrays
from ..calls import Failure, Run
from .leak import SETTLING, given_back, in_use
from .parts import each
from .values import compare_gradients

__all__ = [
    "forked",
    "held",
    "held_backward",
    "keeps",
    "often",
    "replayed",
    "rewritten",
    "shapes",
    "streams",
    "surroundings",
    "threads",
]

OFTEN = 30
"""Calls of one shape."""
THREADS = 4
WIDER = (("K", 328), ("V", 515), ("D", 2056))
"""More than factors have: keys of a model may be 512 channels wide."""
PATIENCE = 60
"""Seconds for a child process."""
ROUNDS = 3
PER_CALL = 4096
"""Bytes that a call, or a shape that was never called with, may hold on to."""
CALLS = 24


def other(run: Run, seed: int = 0, **sizes: int) -> Run:
    """The same call with other values, or at other sizes; its state, of what has one, is copied and not the pool of a case."""
    case = run.case
    changed = tuple((symbol, sizes.get(symbol, n)) for symbol, n in case.sizes)
    flags = (*case.flags, f"seed.{seed}") if seed else case.flags
    return Run(replace(case, flags=flags, sizes=changed), run.adapter, run.backend, run.witness, run.tighten)


def right(run: Run, found: Run, got: Arrays) -> None:
    """Outputs are those of a call; the largest error counts for the case."""
    found.compare(got, found.truth.outputs)
    run.worst = max(run.worst, found.worst)


def several(run: Run) -> list[Run]:
    """Some calls of one shape, with their truth."""
    found = [run, *(other(run, seed) for seed in (1, 2))]
    for one in found:
        _ = one.truth
    return found


def held(run: Run) -> None:
    """Outputs stay as they are while later calls, of this shape and of others, are made."""
    calls = [*several(run), *(other(run, T=T) for T in (1, run.case.size["T"] + 1))]
    outputs = [one.call(one.arrays()) for one in calls]
    first = calls[0].call(calls[0].arrays())
    for one, got in zip(calls, outputs, strict=True):
        right(run, one, got)
    right(run, run, first)


def held_backward(run: Run) -> None:
    """So do gradients, and backward passes see the inputs of their own forward pass."""
    calls = several(run)
    inputs = [one.arrays() for one in calls]
    found = [one.gradients(arrays) for one, arrays in zip(calls, inputs, strict=True)]
    for one, arrays, (got, gradients) in zip(calls, inputs, found, strict=True):
        right(run, one, got)
        compare_gradients(one, arrays, gradients)
        run.worst = max(run.worst, one.worst)


def rewritten(run: Run) -> None:
    """Inputs are written to between two calls: the first result does not change, and the second is that of the new values."""
    first, second = run, other(run, 1)
    _ = first.truth, second.truth
    arrays = first.arrays()
    got = first.call(arrays)
    run.adapter.overwrite(arrays, second.arrays())
    again = second.call(arrays)
    right(run, first, got if run.case.form != "decode" else {"o": got["o"], "state": first.call(first.arrays())["state"]})
    right(run, second, again)


def often(run: Run) -> None:
    """Thirty calls of one shape, which leave nothing behind."""
    calls = several(run)

    def made(count: int) -> Arrays:
        for i in range(count):
            one = calls[i % len(calls)]
            got = one.call(one.arrays())
            right(run, one, got)
        return got

    with given_back(run, made(1), made):
        made(OFTEN - 1)


def shapes(run: Run) -> None:
    """Many shapes in turn, wider ones than any other case has among them, and the first of them again."""
    T = run.case.size["T"]
    sizes = [{"T": T}, {"T": 1}, {"T": T + 31}, {"T": 2}, {"B": 1}, {"B": 3}, {"T": 64}]
    sizes += [{symbol: n} for symbol, n in (("K", 9), ("V", 24), ("D", 5), *WIDER) if symbol in run.case.size]
    calls = [other(run, **{**{"B": 2}, **size}) for size in sizes]
    again = (calls[0], calls[2], calls[0])
    for mode, order in ((nullcontext(), (*calls, *again)), (run.adapter.mode("no_grad"), again)):  # which may have buffers
        with mode:
            each(run, ((f"of {one.case.sizes}", one) for one in order), lambda one, _: right(run, one, one.call(one.arrays())))


def unwatched(run: Run) -> None:
    """One call that the witness sees; those that come are made where it cannot tell them apart."""
    right(run, run, run.call(run.arrays()))
    run.witness.watching = False


def threads(run: Run) -> None:
    """Calls in several threads at once, each with values of its own."""
    unwatched(run)
    calls = [other(run, seed) for seed in range(1, THREADS + 1)]
    inputs = [[one.arrays() for _ in range(3)] for one in calls]
    found: list[list[Arrays]] = [[] for _ in calls]
    wrong: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def work(i: int) -> None:
        try:
            barrier.wait(PATIENCE)
            for arrays in inputs[i]:
                found[i].append(calls[i].call(arrays))
        except BaseException as error:
            wrong.append(error)

    started = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if wrong:
        raise wrong[0]
    for one, results in zip(calls, found, strict=True):
        for got in results:
            right(run, one, got)


def surroundings(run: Run) -> None:
    """The framework's defaults are other ones, as a user may have set them."""
    for name, changed in run.adapter.surroundings().items():
        try:
            got = _called(run, changed)
        except Failure:
            raise
        except Exception as error:
            raise Failure(f"with {name}: {type(error).__name__}: {error}") from error
        right(run, run, got)


def _called(run: Run, changed: Callable[[], AbstractContextManager[Any]]) -> Arrays:
    arrays = run.arrays()
    with changed():
        return run.call(arrays)


def forked(run: Run) -> None:
    """A child of this process, which has made calls before, makes the same call."""
    unwatched(run)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        try:
            run.adapter.in_child()
            right(run, run, run.call(run.arrays()))
            theirs.send("")
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        told = ours.recv() if ours.poll(PATIENCE) else f"no result after {PATIENCE} s"
    except EOFError:
        told = "it ended without a result"
    process.kill()
    process.join()
    if told:
        raise Failure(f"in a forked process: {told}")


def streams(run: Run) -> None:
    """A call on a stream of its own, while the default one is busy."""
    arrays = run.arrays()
    with run.adapter.another_stream(arrays):
        got = run.call(arrays)
    right(run, run, got)


def replayed(run: Run) -> None:
    """A recorded call is replayed after its inputs have changed."""
    unwatched(run)
    second = other(run, 1)
    arrays = run.arrays()
    got = run.adapter.replayed(lambda: run.call(arrays), lambda: run.adapter.overwrite(arrays, second.arrays()))
    right(run, second, got)


def keeps(run: Run) -> None:
    """Neither calls nor shapes hold on to memory, a few kilobytes aside."""
    arrays = run.arrays()
    of_calls = _growth(run, lambda: (run.call(arrays) for _ in range(CALLS)))
    lengths = iter(range(1, 10**6))

    def new_shapes() -> Iterator[Arrays]:
        for _ in range(CALLS):
            T = next(lengths)
            yield run.call({name: _first(x, T, run.problem.symbols[name]) for name, x in arrays.items()})

    of_shapes = _growth(run, new_shapes)
    for what, grown in (("calls", of_calls), ("new shapes", of_shapes)):
        if grown > CALLS * PER_CALL:
            raise Failure(f"{CALLS} {what} hold {grown / CALLS / 1024:.1f} KiB each, {ROUNDS} times in a row")


def _first(x: Any, T: int, symbols: tuple[str, ...]) -> Any:
    """The first ``T`` tokens, of an array that has so many."""
    return x[(slice(None),) * symbols.index("T") + (slice(0, T),)] if "T" in symbols else x


def _growth(run: Run, calls: Callable[[], Any]) -> int:
    """By how many bytes a round of calls grows this process: the least of some rounds."""

    def finished() -> None:
        for got in calls():
            for x in got.values():
                run.adapter.to_float64(x)

    def measured() -> int:
        time.sleep(SETTLING)
        return in_use(run)

    finished()
    least = None
    for _ in range(ROUNDS):
        before = measured()
        finished()
        grown = measured() - before
        least = grown if least is None else min(least, grown)
        if least <= CALLS * PER_CALL:
            break
    return least or 0
