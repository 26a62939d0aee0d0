"""Runs cases in worker processes, and outlives what a backend does to them.

A worker runs many cases, so that isolation costs two small messages a case. One that dies, or is still at a case when its
time is up, or outgrows its memory is replaced; the case that it was at has failed, with the reason as its message, and the
others go on.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import connection as connections
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

from .cases import Case
from .memory import GIB, installed, resident
from .runner import Result, Subject
from .worker import Setting, never_wait_long, serve

__all__ = ["TIME_LIMIT", "Pool", "PoolError"]

TIME_LIMIT = 300.0
"""Seconds for one case. Compilers are slow, and an autotuner slower; a case of a backend without either takes milliseconds."""
PART = 48
"""So many cases are handed out at once, or fewer where there are many workers. Neighbours share their truth."""
ASKS = 6
"""A part of its budget in which a run asks what is declared unsupported, before it runs the rest."""
LINE = 300
"""Characters of what a backend said that an error has."""
LOOK = 1.0
"""Seconds between two looks at the memory of the workers."""
PARTS = 16
"""A worker gets so many of them at least, so that one with slow cases does not keep the others waiting."""
MOST = {"late": 2, "died": 20, "outgrew": 5}
"""So many workers may be lost in this way at the cases of one operator; its other cases are then not run."""
MOST_AT_NO_CASE = 3


class PoolError(Exception):
    """The backend cannot be tested at all; the text says why."""


class Worker:
    """One process, as its parent sees it.

    Attributes:
        ids: What it still has to do, the case that it is at first.
        turn: Its place among the workers, which says whose accelerator it has.
        started: When it began that case, or to load the backend; None while it waits for work.
        subject: What it tests, once it has loaded it.
        refused: Why it cannot test it.
        last_words: What it ends of, if it could say so.
    """

    def __init__(self, setting: Setting, folder: Path, number: int) -> None:
        context = get_context("spawn")
        self.log = folder / f"{number}.out"
        self.turn = setting.turn
        self.connection, theirs = context.Pipe()
        never_wait_long(self.connection)
        self.process = context.Process(target=serve, args=(theirs, setting, str(self.log), os.getpid()))
        self.process.start()
        theirs.close()
        self.ids: deque[str] = deque()
        self.at = ""
        self.started: float | None = time.monotonic()
        self.subject: Subject | None = None
        self.refused = ""
        self.last_words = ""

    @property
    def idle(self) -> bool:
        return self.subject is not None and not self.ids

    def late(self, limit: float) -> bool:
        return self.started is not None and time.monotonic() - self.started > limit

    def give(self, way: str, ids: list[str]) -> None:
        """Hand over cases, to ``ask`` about or to ``run``."""
        self.ids.extend(ids)
        self.started = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended, as will be heard
            self.connection.send((way, ids))

    def hear(self) -> Result | None:
        """Take one message; the result if it is one."""
        kind, what = self.connection.recv()
        if kind == "ends":
            self.last_words = what
            return None
        if kind in ("done", "open"):
            self.ids.remove(what.id if kind == "done" else what)
        self.at = what if kind == "started" else ""
        if kind == "ready":
            self.subject = what
        elif kind == "refused":
            self.refused = what
        self.started = None if self.idle else time.monotonic()
        return what if kind == "done" else None

    def stop(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()

    def errors(self) -> str:
        """What the backend's process wrote to its standard error."""
        path = self.log.with_suffix(".err")
        return path.read_text(errors="replace") if path.exists() else ""

    def how_it_ended(self) -> str:
        """Exit status or signal, and where it was, if its interpreter could still say so."""
        self.process.join(10)
        code = self.process.exitcode or 0
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        where = re.search(r"Current thread.*\n\s+File \"(.*?)\", line (\d+) in (\w+)", self.errors())
        if where:
            return f"{ended}, in {Path(where[1]).name}:{where[2]} {where[3]}"
        return f"{ended}: {self.last_words}" if self.last_words else ended


class Pool:
    """Worker processes for one backend; a context manager.

    Args:
        setting: What is tested.
        workers: How many processes, at most.
        time_limit: Seconds for one case, and for loading the backend.
        memory_limit: GiB for each process. Default: four fifths of the machine's memory, shared out.
        budget: Seconds for all cases of a run. Those that have no result by then are not run.

    Attributes:
        subject: What is tested, as the first worker says.
        complaints: What went wrong in no case, as text.
    """

    def __init__(
        self,
        setting: Setting,
        workers: int = 1,
        time_limit: float = TIME_LIMIT,
        memory_limit: float = 0.0,
        budget: float = math.inf,
    ) -> None:
        self.setting, self.count, self.time_limit, self.budget = setting, workers, time_limit, budget
        self.memory_limit = (memory_limit or 0.8 * installed() / GIB / workers) * GIB
        self.workers: list[Worker] = []
        self.complaints: list[str] = []
        self.lost: Counter[tuple[str, str]] = Counter()
        self.ends_at_no_case = 0
        self.folder = Path(tempfile.mkdtemp(prefix="linattn-conformance-"))
        self.born = 0
        self.looked = time.monotonic()
        self.until, self.asks_until, self.over = math.inf, math.inf, f"the {budget:g} s of the run were over"

    def __enter__(self) -> Pool:
        try:
            self.subject = self._first()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def start(self, count: int) -> None:
        """Start so many workers before the pool is entered: they load the backend while it is found out what they are to run.
        :meth:`close` ends them, if it never is.
        """
        while len(self.workers) < min(count, self.count):
            self._start()

    def end(self, reason: str) -> None:
        """Give up what is left, for this reason, within a second; :meth:`run` still has a result for each case."""
        self.until, self.over = 0.0, reason

    def close(self) -> None:
        """End every worker."""
        self._end_workers()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """What the processes printed so far, one after the other."""
        files = sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("*.err"))
        return "".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in files)

    def _end_workers(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers.clear()

    def _start(self) -> Worker:
        self.born += 1
        taken = {worker.turn for worker in self.workers}
        turn = next(i for i in range(len(taken) + 1) if i not in taken)  # that of one that was lost, if there is such
        worker = Worker(replace(self.setting, one_thread=self.count > 1, turn=turn), self.folder, self.born)
        self.workers.append(worker)
        return worker

    def _first(self) -> Subject:
        """The subject, from a first worker."""
        worker = self.workers[0] if self.workers else self._start()
        name = self.setting.backend
        try:
            if not worker.connection.poll(self.time_limit):
                raise PoolError(f"backend {name!r} was not loaded after {self.time_limit:g} s")
            worker.hear()
        except (EOFError, OSError):
            said = worker.errors().partition("Fatal Python error")[0].strip()  # so libraries say why they end a process
            line = said.splitlines()[-1][:LINE] if said else ""
            ended = worker.how_it_ended() + (f"; the last that it said: {line}" if line else "")
            raise PoolError(f"backend {name!r} cannot be loaded: the process {ended}") from None
        if worker.subject is None:
            raise PoolError(worker.refused)
        return worker.subject

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, cases: Sequence[Case], meanwhile: Callable[[], None] = lambda: None) -> Iterator[Result]:
        """Run cases, about in order; each has a result. While they run, ``meanwhile`` is called every second or more often.

        With a budget those that the backend declares unsupported come first: they take little time, and a run that is cut short
        has them, or as many as are found in a part of its time. Those that need much memory of a device come last.
        """
        self.operators = {case.id: case.operator for case in cases}
        self.meanwhile = meanwhile
        self.until = min(self.until, time.monotonic() + self.budget)
        self.asks_until = time.monotonic() + self.budget / ASKS
        settled: set[str] = set()
        for result in self._work("ask", [case.id for case in cases], self.count) if self.budget < math.inf else ():
            settled.add(result.id)
            yield result
        left = [case for case in cases if case.id not in settled]
        alone = {case.id for case in left if case.memory} if self.subject.memory and self.count > 1 else set[str]()
        yield from self._work("run", [case.id for case in left if case.id not in alone], self.count)
        if alone:
            self._end_workers()  # the memory that they keep for later is what these cases need
            yield from self._work("run", [case.id for case in left if case.id in alone], 1)

    def _work(self, way: str, ids: Sequence[str], count: int) -> Iterator[Result]:
        """Ask about cases or run them, in so many workers at most: a result for each, but for those to be run that were asked
        about.
        """
        self.way, self.most = way, count
        part = min(max(len(ids) // (PARTS * count), 1), PART)
        self.parts = deque(list(ids[i : i + part]) for i in range(0, len(ids), part))
        while self.parts or any(worker.ids for worker in self.workers):
            self.meanwhile()
            if time.monotonic() > self.until:
                yield from self._give_up()
            if way == "ask" and time.monotonic() > self.asks_until:
                self.parts.clear()
            yield from self._hand_out()
            wait = min(self._until_next(), max(self.until - time.monotonic(), 0.0))
            connections.wait([worker.connection for worker in self.workers if not worker.idle], wait)
            for worker in list(self.workers):
                yield from self._listen(worker)
            for worker in [worker for worker in self.workers if worker.late(self.time_limit)]:
                yield from self._lose(worker, "late", f"no result after {self.time_limit:g} s: the process was ended")
            for worker in self._outgrown():
                yield from self._lose(worker, "outgrew", f"the process outgrew {self.memory_limit / GIB:.1f} GiB and was ended")

    def _hand_out(self) -> Iterator[Result]:
        """Give work to idle workers, and start more of them while there is work."""
        while self.parts:
            part = self.parts.popleft()
            given_up = {name: reason for name in part if (reason := self._given_up(self.operators[name]))}
            yield from (Result(name, "not-run", message=reason) for name, reason in given_up.items())
            part = [name for name in part if name not in given_up]
            worker = next((worker for worker in self.workers if worker.idle), None)
            if worker is not None and part:
                worker.give(self.way, part)
            elif part:
                self.parts.appendleft(part)
                loading = sum(worker.subject is None for worker in self.workers)
                for _ in range(min(self.most - len(self.workers), len(self.parts) - loading)):
                    self._start()
                return

    def _give_up(self) -> Iterator[Result]:
        """The time is over: the cases that are left, those that are being run among them, are not run."""
        for worker in list(self.workers):
            yield from self._listen(worker)
        left = [name for worker in self.workers for name in worker.ids] + [name for part in self.parts for name in part]
        self._end_workers()
        self.parts.clear()
        yield from (Result(name, "not-run", message=f"not tried: {self.over}") for name in left)

    def _given_up(self, operator: str) -> str:
        """Why the other cases of an operator are not run; empty while they are."""
        if self.ends_at_no_case >= MOST_AT_NO_CASE:
            return f"not tried: {MOST_AT_NO_CASE} processes ended while they loaded the backend or between cases"
        for how, most in MOST.items():
            if self.lost[operator, how] >= most:
                return f"not tried: {most} processes were lost at other cases of {operator}"
        return ""

    def _until_next(self) -> float:
        """Seconds until a worker is late, or memory is looked at again."""
        now = time.monotonic()
        due = [worker.started + self.time_limit for worker in self.workers if worker.started is not None]
        return max(min([*due, self.looked + LOOK]) - now, 0.0)

    def _listen(self, worker: Worker) -> Iterator[Result]:
        """Everything that a worker has said."""
        try:
            while worker.connection.poll():
                if (result := worker.hear()) is not None:
                    yield result
        except (EOFError, ConnectionError):
            yield from self._lose(worker, "died", f"the process {worker.how_it_ended()}")
        except Exception:  # the backend has written there, and nothing that comes after it can be read
            yield from self._lose(worker, "died", "the process sent the suite what is no message: it was ended")

    def _outgrown(self) -> list[Worker]:
        """The workers that hold too much memory, looked at once in a while."""
        if time.monotonic() < self.looked + LOOK:
            return []
        self.looked = time.monotonic()
        return [worker for worker in self.workers if resident(worker.process.pid) > self.memory_limit]

    def _lose(self, worker: Worker, how: str, reason: str) -> Iterator[Result]:
        """End a worker; the case that it was at has failed, and the others wait for the next one."""
        seconds = time.monotonic() - (worker.started or 0.0)
        self.workers.remove(worker)
        worker.stop()
        rest = [name for name in worker.ids if name != worker.at]
        if worker.at:
            self.lost[self.operators[worker.at], how] += 1
            yield Result(worker.at, "failed", seconds=seconds, message=reason)
        else:
            self.ends_at_no_case += 1
            self.complaints.append(f"{'between two cases' if worker.subject else 'loading the backend again'}, {reason}")
        if rest:
            self.parts.appendleft(rest)


def default_workers(device: str) -> int:
    """One process a core on a CPU, one on an accelerator."""
    return min(os.cpu_count() or 1, 8) if device.partition(":")[0] == "cpu" else 1
