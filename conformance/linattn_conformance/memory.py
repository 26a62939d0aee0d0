"""Memory of processes, as the system sees it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["GIB", "allocated", "entries", "installed", "resident"]

GIB = 2**30
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident(pid: int | None = None) -> int:
    """Bytes of memory that a process and those that it started hold, this one alone by default; 0 where nobody says.

    Without ``/proc``, and for this process alone, it is the most that it ever held.
    """
    try:
        own = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * PAGE
        return own + sum(map(resident, _started(pid))) if pid else own
    except (OSError, ValueError, IndexError):
        return _peak() if pid is None else 0


def _started(pid: int) -> list[int]:
    """The processes that a process started."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def _peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def _mallinfo() -> Any:
    """The function, where there is one."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


def allocated() -> int:
    """Bytes that this process has from the allocator and has not given back; where it does not say, all that it holds."""
    function = _mallinfo()
    if function is None:
        return resident()
    found = function()
    return found.uordblks + found.hblkhd


def entries(folder: str) -> int:
    """How many entries a folder of ``/proc/self`` has: ``fd`` one for each open file, ``task`` one for each thread; 0 where
    there is none.
    """
    try:
        return len(os.listdir(f"/proc/self/{folder}"))
    except OSError:
        return 0


def installed() -> int:
    """Bytes of memory that the machine has; what is assumed where it does not say is plenty."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * PAGE
    except (AttributeError, ValueError, OSError):
        return 64 * GIB
