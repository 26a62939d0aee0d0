"""A bench of several processes: the cases are shared out among them, and a fault is caught by the first that fails one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ..bench import end_with_the_parent
from ..cases import Case
from .backend import Fault
from .trial import Bench, Tried, bench

__all__ = ["Team"]

Track = Callable[[Sequence[Case]], Iterable[Case]]
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables that processes have at 1 which run beside others."""


class Team(Bench):
    """A bench that draws faults itself, and has other processes record cases and try faults.

    Args:
        backend: Name of the right backend.
        profile: The largest profile that is run.
        seed: Of the fresh cases.
        count: How many processes.
    """

    def __init__(self, backend: str, profile: str, seed: int, count: int) -> None:
        super().__init__(backend, profile, seed)
        self.count = count
        self.over = get_context("spawn").Event()
        self.members: list[tuple[BaseProcess, Connection]] = []

    def record(self, track: Track = iter) -> None:
        """Start the processes; the first tells ``track`` which cases it records."""
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
        try:
            self.members = [self._member(i, track if i == 0 else iter) for i in range(self.count)]
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _member(self, place: int, track: Track) -> tuple[BaseProcess, Connection]:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        words = theirs, self.right.name, self.profile, self.seed, (place, self.count), track, self.over, os.getpid()
        process = context.Process(target=serve, args=words)
        process.start()
        theirs.close()
        return process, ours

    def tried(self, fault: Fault, profile: str, ends: Callable[[], bool] = lambda: False) -> Tried:
        """The same of all processes; what one of them catches the others look for no longer."""
        self.over.clear()
        for _, connection in self.members:
            connection.send((fault.condition, fault.effect, profile))
        found = Tried()
        for one in self._heard():
            found |= one
            if found.case or ends():
                self.over.set()
        self.left_out |= found.left_out
        return found

    def _heard(self) -> Iterator[Any]:
        """One message of each process, as they come."""
        left = {connection: process for process, connection in self.members}
        while left:
            for connection in wait(list(left)):
                process = left.pop(connection)  # type: ignore[call-overload]
                try:
                    yield connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    process.join()
                    raise RuntimeError(f"a process of the bench ended with exit status {process.exitcode}") from None

    def close(self) -> None:
        """End the processes."""
        for process, _ in self.members:
            process.kill()
            process.join()


def serve(
    connection: Connection,
    backend: str,
    profile: str,
    seed: int,
    share: tuple[int, int],
    track: Track,
    over: Any,
    parent: int,
) -> None:
    """Try faults on a share of the cases until the parent ends."""
    end_with_the_parent(parent)
    with bench(backend, profile, seed, track, share) as made:
        while True:
            condition, effect, within = connection.recv()
            connection.send(made.tried(Fault(condition, effect, made.xp), within, over.is_set))
