"""A process that judges cases for :mod:`.pool`; it starts the process of :mod:`.bench`, which the backend runs in.

So whatever a backend does to its process stays there, and what is true, and how far from it a result may be, is in none that
the backend can reach: inputs go over, results come back. If the backend's process ends, this one ends in the same way.

Messages to the worker are pairs, ``("ask", ids)`` or ``("run", ids)`` of cases, and None at the end. Messages from it are
pairs: ``("ready", Subject)`` or ``("refused", text)`` once, then ``("started", id)`` and ``("done", Result)`` for each case,
or ``("open", id)`` for one that was asked about and is to be run; ``("ends", text)`` if it cannot go on.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shlex
import signal
import socket
import struct
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from . import bench, sealed

if TYPE_CHECKING:
    from .cases import Case
    from .judge import Judge
    from .runner import Result

__all__ = ["Setting", "never_wait_long", "serve"]

TUNABLES, KEEPS_NOTHING = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"
"""What GNU's allocator keeps of what a thread has given back counts as in use, and is more or less from call to call. Without
that, checks of what calls leave behind see just this, and need no more calls to tell one from the other.
"""
REST = 5
"""Seconds to wait for the rest of a message."""
NO_MESSAGE = b"\x00\x00\x00\x01?"


@dataclass(frozen=True)
class Setting:
    """What a worker is to test: the arguments of :class:`~linattn_conformance.runner.Runner`, and how.

    Attributes:
        backend: A name, or ``module:Class``.
        framework: As for ``Runner``.
        device: As for ``Runner``.
        tighten: As for ``Runner``.
        one_thread: Frameworks are to compute with one thread, because other workers run beside this one.
        turn: The place of this worker among the others: accelerators that the environment lists are taken in turn.
    """

    backend: str
    framework: str | None = None
    device: str = "cpu"
    tighten: float = 1.0
    one_thread: bool = False
    turn: int = 0

    def command(self, case: str) -> str:
        """The command that runs a case again."""
        words = ["linattn", "conformance", "--backend", self.backend, "--device", self.device]
        words += ["--framework", self.framework] if self.framework else []
        words += ["--tighten", f"{self.tighten:g}"] if self.tighten != 1.0 else []
        return f"{shlex.join(words)} --case '{case}'"


def never_wait_long(connection: Connection) -> None:
    """Of a message that has begun, the rest comes within seconds, or it is none: a backend may write anything anywhere."""
    with socket.socket(fileno=os.dup(connection.fileno())) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", REST, 0))


def serve(connection: Connection, setting: Setting, log: str, parent: int) -> NoReturn:
    """Judge cases until told to stop; what the backend's process prints goes to the file ``log``."""
    bench.end_with_the_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends its workers
    bench.leave_sigterm_to_the_parent()
    if setting.one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"  # read by what works out the truth, when it is imported
    there = Bench(setting, log)
    kind, what = there.hear(connection)
    connection.send((kind, what))
    if kind == "refused":
        os._exit(0)
    from .cases import named
    from .judge import Judge

    judge = Judge(what.framework, what.device, setting.tighten)
    while (asked := received(connection, there)) is not None:
        way, ids = asked
        cases = [named(name) for name in ids]
        answers = foreseen(judge, way, cases[0]) if cases else {}
        for case, following in zip(cases, [*cases[1:], None], strict=True):
            connection.send(("started", case.id))
            judge.begin(case)
            there.begin(way, case, answers)
            answers = foreseen(judge, way, following) if following else {}  # while the backend is at work
            result = judged(connection, there, judge, way)
            connection.send(("open", case.id) if way == "ask" and result.status == "passed" else ("done", result))
    there.process.kill()
    os._exit(0)


class Bench:
    """The backend's process, as the judge sees it."""

    def __init__(self, setting: Setting, log: str) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        never_wait_long(self.connection)
        self.process: BaseProcess = context.Process(target=bench.serve, args=(theirs, setting, log, os.getpid()))
        os.environ[TUNABLES] = ":".join(filter(None, [os.environ.get(TUNABLES), KEEPS_NOTHING]))  # read as a process starts
        self.process.start()
        theirs.close()
        self.has: set[Any] = set()

    def begin(self, way: str, case: Case, answers: dict[Any, Any]) -> None:
        """Tell it to begin with a case, and the answers for it, but for those that it has from the case before: None."""
        self.tell((way, case, {key: None if key in self.has else found for key, found in answers.items()}))
        self.has = set(answers)

    def tell(self, message: Any) -> None:
        """Send it a message; that it is gone will be heard."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(pickle.dumps(message, protocol=5))

    def hear(self, parent: Connection) -> Any:
        """Its next message. If there is none, this process ends as that one did."""
        try:
            self.connection.poll(None)
            kind, what = sealed.receive(self.connection)
        except (EOFError, ConnectionError):
            self.end_alike()
        except Exception:  # the backend has written there, and nothing that comes after it can be read
            self.process.kill()
            os.write(parent.fileno(), NO_MESSAGE)  # which says so
            signal.pause()
        if kind == "ends":
            with contextlib.suppress(OSError):
                parent.send((kind, what))
            self.end_alike()
        return kind, what

    def end_alike(self) -> NoReturn:
        """End this process as that one did."""
        self.process.join()
        code = self.process.exitcode or 0
        if code < 0:
            if -code not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
            signal.pause()
        os._exit(code)


def judged(connection: Connection, there: Bench, judge: Judge, way: str) -> Result:
    """Judge what comes back of a case that was asked about, or is run."""
    while True:
        kind, what = there.hear(connection)
        if kind in ("drawn", "truth"):
            there.tell(answer(judge, kind, what))
        elif kind == "claim":
            judge.hear(what)
        elif kind == "done":
            return judge.end(what) if way == "run" else judge.asked(what)


ASKS_FOR_TRUTH = ("bad-input", "large", "leak", "leak-backward")
"""Checks that need none, or that of another case."""


def foreseen(judge: Judge, way: str, case: Case) -> dict[tuple[Any, ...], tuple[bool, Any]]:
    """What a case will ask for, given along with it: a question and its answer take longer than most cases."""
    from .calls import key

    if way == "ask" or case.check == "bad-input":
        return {}
    whats = ["drawn", *(["truth"] if case.check not in ASKS_FOR_TRUTH else [])]
    return {key(what, case.block): answer(judge, what, case.block) for what in whats}


def answer(judge: Judge, kind: str, case: Case) -> tuple[bool, Any]:
    """True and what was asked for; False and why it cannot be had, which is the suite's fault and not the backend's."""
    try:
        return True, judge.drawn(case) if kind == "drawn" else judge.truth(case)
    except Exception as error:
        return (
            False,
            f"the suite has no {'data' if kind == 'drawn' else 'truth'} for this case: {type(error).__name__}: {error}",
        )


def received(connection: Connection, there: Bench) -> tuple[str, list[str]] | None:
    """The next message; None as well if the parent is gone. Where the backend's process ends first, so does this one."""
    wait([connection, there.process.sentinel])
    if not connection.poll():
        there.end_alike()
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
