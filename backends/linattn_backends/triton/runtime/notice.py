"""What a first call waits for, told to who waits: in the log, or on a terminal whose program keeps none."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["compiling"]

LOG = logging.getLogger("linattn")
AFTER = 1.0
"""Seconds without a word: what lies in the compiler's cache takes less."""


@contextmanager
def compiling(what: str) -> Generator[None]:
    """Say once that ``what`` is being compiled, if that takes longer than :data:`AFTER`."""
    timer = threading.Timer(AFTER, tell, [f"linattn: compiling {what} for this GPU, once"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tell(text: str) -> None:
    """To the log, at INFO; to a terminal if the log does not take it."""
    if LOG.isEnabledFor(logging.INFO):
        LOG.info(text)
    elif sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
