"""Asks third-party backends in processes of their own, so that one that crashes or hangs takes nobody with it.

For commands that look at every backend: ``linattn backends``, ``doctor`` and ``explain``. Calls load a backend where they are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from .call import Call
from .errors import BackendError
from .planning import Answer, answer_of
from .registry import registry

__all__ = ["TIME_LIMIT", "answer_apart", "apart", "is_foreign"]

TIME_LIMIT = 60.0
"""Seconds for a backend to be imported, and to answer."""

T = TypeVar("T")


def is_foreign(name: str) -> bool:
    """True for a backend of somebody else's distribution: built-in and registered ones are asked in this process."""
    record = registry.record(name)
    return bool(record.entry_points) and not record.built_in


def apart(name: str, question: Callable[..., T], *arguments: Any) -> T:
    """What ``question`` returns for a backend and the arguments, in a new process.

    Args:
        name: The backend.
        question: A function of a module, of the backend's name and the arguments.
        arguments: More of them.

    Raises:
        BackendError: The process ended, or did not answer within :data:`TIME_LIMIT` seconds; or what the question raised.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, question, name, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(TIME_LIMIT):
            raise BackendError(f"{_named(name)} did not answer within {TIME_LIMIT:g} s: its process was ended")
        failed, found = ours.recv()
    except EOFError:
        process.join(TIME_LIMIT)
        raise BackendError(f"{_named(name)} {_ended(process.exitcode)} the process that asked it") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if failed:
        raise BackendError(found)
    return found


def answer_apart(name: str, ways: Sequence[Call]) -> Answer:
    """As :func:`linattn.planning.answer_of`, but a third party's backend is asked apart; its faults are reasons against it."""
    if not is_foreign(name):
        return answer_of(name, ways)
    try:
        return apart(name, answer_of, ways)
    except BackendError as error:
        return Answer(None, (str(error),))


def _answer(connection: Connection, question: Callable[..., Any], name: str, *arguments: Any) -> None:
    """In the new process: answer, and end without what libraries do on their way out. What is printed is for nobody."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        connection.send((False, question(name, *arguments)))
    except BackendError as error:
        connection.send((True, str(error)))
    os._exit(0)


def _named(name: str) -> str:
    return f"backend {name!r} of {registry.record(name).origin}"


def _ended(status: int | None) -> str:
    """How a process came to its end, as a verb of whom it is the fault."""
    if status is not None and status < 0:
        return f"crashed ({signal.Signals(-status).name})"
    return f"ended (exit status {status})"
