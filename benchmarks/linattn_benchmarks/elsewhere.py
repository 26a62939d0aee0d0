"""A question to a process of its own, and its answers: all JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

MARK = "linattn-answer:"
"""What the answer's line begins with; libraries print other lines."""


class NoAnswer(Exception):
    """The process failed, or took too long: says which."""


class Process:
    """A process that was asked something: ``python -m module``, which calls :func:`answer` or :func:`answers`.

    Args:
        module: Its full name.
        question: What it is told.
        environment: Variables besides those of this process.
    """

    def __init__(self, module: str, question: Any, environment: Mapping[str, str] | None = None) -> None:
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process is
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.said}
        command = [sys.executable, "-m", module]
        self.process = subprocess.Popen(command, text=True, env=os.environ | (environment or {}), **pipes)
        self.say(json.dumps(question))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()

    def say(self, line: str = "") -> None:
        """One line; without words, that another answer is wanted."""
        with contextlib.suppress(BrokenPipeError):  # who died has left its reason
            print(line, file=self.process.stdin, flush=True)

    def answer(self, timeout: float) -> Any:
        """Its next answer.

        Args:
            timeout: Seconds.
        """
        late = threading.Timer(timeout, self.process.kill)
        late.start()
        try:
            for line in self.process.stdout or ():
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
        finally:
            in_time = late.is_alive()
            late.cancel()
        status = self.process.wait()
        if not in_time:
            raise NoAnswer(f"took longer than {timeout:.0f} s")
        self.said.seek(0)
        raise NoAnswer((self.said.read().strip().splitlines() or [f"ended with status {status}"])[-1][:400])


def ask(module: str, question: Any, timeout: float, environment: Mapping[str, str] | None = None) -> Any:
    """The one answer of a :class:`Process`.

    Args:
        module: Its full name.
        question: What it is told.
        timeout: Seconds.
        environment: Variables besides those of this process.
    """
    with Process(module, question, environment) as process:
        return process.answer(timeout)


def answer(function: Callable[[Any], Any]) -> None:
    """Print what ``function`` makes of the question on standard input."""
    answers(lambda question: iter([function(question)]))


def answers(function: Callable[[Any], Iterator[Any]]) -> None:
    """Print one by one what ``function`` makes of the question, each after the first when it is wanted."""
    for found in function(json.loads(sys.stdin.readline())):
        print(MARK + json.dumps(found), flush=True)
        if not sys.stdin.readline():
            return
