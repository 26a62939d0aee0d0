"""A question to a process of its own, and its answer: both JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

MARK = "linattn-answer:"
"""What the answer's line begins with; libraries print other lines."""


class NoAnswer(Exception):
    """The process failed, or took too long: says which."""


def ask(module: str, question: Any, timeout: float, environment: Mapping[str, str] | None = None) -> Any:
    """The answer of ``python -m module``, which calls :func:`answer`.

    Args:
        module: Its full name.
        question: What it is told.
        timeout: Seconds.
        environment: Variables besides those of this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | (environment or {}),
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"took longer than {timeout:.0f} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise NoAnswer((done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1][:400])
    return json.loads(lines[-1].removeprefix(MARK))


def answer(function: Callable[[Any], Any]) -> None:
    """Print what ``function`` makes of the question on standard input."""
    print(MARK + json.dumps(function(json.load(sys.stdin))), flush=True)
