"""The process that a backend runs in: it makes the calls of cases, and asks the judge's process for all that they need.

Messages to it are ``("ask", Case, answers)`` or ``("run", Case, answers)``, with what the case will ask for, None for an answer
that was there for the case before; and None at the end. Messages from it: ``("ready", Subject)`` or ``("refused", text)`` once;
then, for a case, any number of ``("drawn", Case)`` and ``("truth", Case)``, which are answered with the inputs of that case and
what its truth is called, and of ``("claim", Claim)``, which are not answered; at last ``("done", Result)``. ``("ends", text)``
if it cannot go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import sealed

if TYPE_CHECKING:
    from .cases import Case
    from .runner import Runner
    from .worker import Setting

__all__ = ["end_with_the_parent", "serve"]

SHOWN = 80
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables that list the accelerators a process may use."""
PR_SET_PDEATHSIG = 1


def leave_sigterm_to_the_parent() -> None:
    """It may be sent to all processes of a run. Those that a library forks here, and ends, end of it as ever."""
    here = os.getpid()

    def pass_over(number: int, _: object) -> None:
        if os.getpid() != here:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, pass_over)


def end_with_the_parent(parent: int) -> None:
    """When the process that started this one ends, so does this one, whatever it is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # too late
        os._exit(1)


def serve(connection: Connection, setting: Setting, log: str, parent: int) -> NoReturn:
    """Make the calls of cases until told to stop; what is printed goes to the file ``log``."""
    end_with_the_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends its workers
    leave_sigterm_to_the_parent()
    # Locks that a library makes on import would be named as for children to come, and left behind when this process is ended.
    multiprocessing.set_start_method(None, force=True)
    output = Output(Path(log))
    if setting.one_thread:
        os.environ["OMP_NUM_THREADS"] = "1"  # read by frameworks when they are imported, which is now
    if ":" not in setting.device:
        os.environ.update(one_accelerator(setting.turn))  # likewise
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share an accelerator
    from linattn.errors import LinattnError

    from .runner import Runner, resolve

    try:
        runner = Runner(resolve(setting.backend), setting.framework, setting.device, setting.tighten)
    except (Exception, SystemExit) as error:
        told = isinstance(error, (LinattnError, ValueError, ImportError, AttributeError, OSError))
        text = str(error) if told else f"backend {setting.backend!r} cannot be loaded: {type(error).__name__}: {error}"
        sealed.send(connection, ("refused", text))
        os._exit(0)
    desk = Desk(connection)
    sealed.send(connection, ("ready", runner.subject))
    try:
        with runner.watching():
            run(connection, runner, output, desk)
    except BaseException as error:
        with contextlib.suppress(OSError):
            sealed.send(connection, ("ends", f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")))
        raise
    os._exit(0)  # what a framework does on its way out is nobody's case


def one_accelerator(turn: int) -> dict[str, str]:
    """The one accelerator that is this worker's, of those that the environment lists, as variables to set."""
    listed = {name: os.environ[name].split(",") for name in VISIBLE if os.environ.get(name)}
    return {name: devices[turn % len(devices)] for name, devices in listed.items()}


def run(connection: Connection, runner: Runner, output: Output, desk: Desk) -> None:
    """Make the calls of cases until told to stop."""
    while (asked := received(connection)) is not None:
        way, case, foreseen = asked
        act = runner.ask if way == "ask" else runner.run_one
        output.forget()
        desk.had = {key: desk.had[key] if answer is None else answer for key, answer in foreseen.items()}
        result = act(case)
        runner.adapter.wait()  # a fault that shows late is of this case, and the end of this process
        runner.adapter.give_back()
        printed = output.printed()
        if printed and result.status == "passed":
            result = replace(result, status="failed", message=f"prints to standard output: {printed!r}")
        sealed.send(connection, ("done", result))


def received(connection: Connection) -> Any:
    """The next message; None as well if the judge is gone."""
    try:
        return pickle.loads(connection.recv_bytes())  # the judge is trusted
    except (EOFError, OSError):
        return None


@dataclass
class Desk:
    """Where checks get data and truth, and leave their claims. Threads of a check take turns.

    Attributes:
        connection: To the judge.
        had: The answers so far, for one case, by what :func:`~linattn_conformance.calls.key` makes of a question.
    """

    connection: Connection

    def __post_init__(self) -> None:
        self.turn = threading.RLock()
        self.had: dict[Any, Any] = {}
        from . import calls

        calls.drawn, calls.truth, calls.claimed = self.drawn, self.truth, self.claimed

    def drawn(self, case: Case, adapter: Any) -> Any:
        """The inputs of a case as rounded to their dtypes."""
        return self._asked("drawn", case)

    def truth(self, case: Case, adapter: Any) -> Any:
        """The truth of a case, sealed."""
        return self._asked("truth", case)

    def claimed(self, claim: sealed.Claim) -> None:
        """Leave a claim."""
        with self.turn:
            sealed.send(self.connection, ("claim", claim))

    def _asked(self, what: str, case: Case) -> Any:
        from .calls import key

        with self.turn:
            asked = key(what, case)
            if asked not in self.had:
                sealed.send(self.connection, (what, case))
                answer = received(self.connection)
                if answer is None:
                    os._exit(1)
                self.had[asked] = answer
            there, found = self.had[asked]
        if not there:
            raise RuntimeError(found)
        return found


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
