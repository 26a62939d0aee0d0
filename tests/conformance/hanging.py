"""A clock of the pool that leaps over every limit while a backend hangs, so that no test waits for a limit to be over.

Limits can then be as long as a busy machine needs.
"""

import os
import time
from pathlib import Path

import pytest
from linattn_conformance import pool

LEAP = 1000.0
"""Seconds at a look, of which there are some before a pool has acted on one limit."""


class Clock:
    """What a pool has for the module ``time``.

    Args:
        folder: Where each process whose backend hangs has a file of its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.leapt = folder, 0.0

    def monotonic(self) -> float:
        """Seconds; at every look many more while one of these processes lives."""
        for mark in self.folder.glob("*.hangs"):
            if is_there(int(mark.stem)):
                self.leapt += LEAP
            else:
                mark.unlink()
        return time.monotonic() + self.leapt


def is_there(pid: int) -> bool:
    """True until a child of this process has been waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def hangs(folder: Path) -> str:
    """What a backend runs to hang: it names the worker, which is the parent of its process."""
    return f"import os, pathlib, time; pathlib.Path({str(folder)!r}, f'{{os.getppid()}}.hangs').touch(); time.sleep(600)"


def leap(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """Have pools use the clock, and look at it often; what a backend runs to hang."""
    monkeypatch.setattr(pool, "time", Clock(folder))
    monkeypatch.setattr(pool, "LOOK", 0.05)
    return hangs(folder)
