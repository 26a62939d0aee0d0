"""A process that runs cases for :mod:`.pool`, so that whatever a backend does to its process stays there.

Messages to the worker are pairs, ``("ask", ids)`` or ``("run", ids)`` of cases, and None at the end. Messages from it are
pairs: ``("ready", Subject)`` or ``("refused", text)`` once, then ``("started", id)`` and ``("done", Result)`` for each case,
or ``("open", id)`` for one that was asked about and is to be run; ``("ends", text)`` if it cannot go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .runner import Runner

__all__ = ["Setting", "serve"]

SHOWN = 80
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables that list the accelerators a process may use."""


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


def leave_sigterm_to_the_parent() -> None:
    """It may be sent to all processes of a run. Those that a library forks here, and ends, end of it as ever."""
    here = os.getpid()

    def pass_over(number: int, _: object) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, pass_over)


def serve(connection: Connection, setting: Setting, log: str) -> NoReturn:
    """Run cases until told to stop; what is printed goes to the file ``log``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends its workers
    leave_sigterm_to_the_parent()
    # Locks that a library makes on import would be named as for children to come, and left behind when this process is ended.
    multiprocessing.set_start_method(None, force=True)
    output = Output(Path(log))
    if setting.one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"  # read by frameworks when they are imported, which is now
    if ":" not in setting.device:
        os.environ.update(one_accelerator(setting.turn))  # likewise
    from linattn.errors import LinattnError

    from .runner import Runner, resolve

    try:
        runner = Runner(resolve(setting.backend), setting.framework, setting.device, setting.tighten)
    except (Exception, SystemExit) as error:
        told = isinstance(error, (LinattnError, ValueError, ImportError, AttributeError, OSError))
        text = str(error) if told else f"backend {setting.backend!r} cannot be loaded: {type(error).__name__}: {error}"
        connection.send(("refused", text))
        os._exit(0)
    connection.send(("ready", runner.subject))
    try:
        with runner.watching():
            run(connection, runner, output)
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(("ends", f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")))
        raise
    os._exit(0)  # what a framework does on its way out is nobody's case


def one_accelerator(turn: int) -> dict[str, str]:
    """The one accelerator that is this worker's, of those that the environment lists, as variables to set."""
    listed = {name: os.environ[name].split(",") for name in VISIBLE if os.environ.get(name)}
    return {name: devices[turn % len(devices)] for name, devices in listed.items()}


def run(connection: Connection, runner: Runner, output: Output) -> None:
    """Run cases until told to stop."""
    from .cases import named

    while (asked := received(connection)) is not None:
        way, ids = asked
        act = runner.ask if way == "ask" else runner.run_one
        for name in ids:
            connection.send(("started", name))
            output.forget()
            result = act(named(name))
            runner.adapter.wait()  # a fault that shows late is of this case, and the end of this process
            printed = output.printed()
            if printed and result.status == "passed":
                result = replace(result, status="failed", message=f"prints to standard output: {printed!r}")
            connection.send(("open", name) if way == "ask" and result.status == "passed" else ("done", result))


def received(connection: Connection) -> tuple[str, list[str]] | None:
    """The next message; None as well if the parent is gone."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


class Output:
    """Standard output and error of this process, native code's included, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.flush_native = getattr(ctypes.CDLL(None), "fflush", None) if os.name == "posix" else None
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        errors = os.open(path.with_suffix(".err"), os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(self.file, 1)
        os.dup2(errors, 2)
        faulthandler.enable(2)
        self.seen = 0

    def size(self) -> int:
        sys.stdout.flush()
        if self.flush_native:
            self.flush_native(None)
        return os.fstat(self.file).st_size

    def forget(self) -> None:
        """What was printed so far is of no interest."""
        self.seen = self.size()

    def printed(self) -> str:
        """The beginning of what was printed to standard output since."""
        size = self.size()
        if size == self.seen:
            return ""
        return os.pread(self.file, SHOWN, self.seen).decode(errors="replace")
