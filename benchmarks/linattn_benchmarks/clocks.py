"""Clocks, their spread, and the peak memory of this process."""

from __future__ import annotations

import ctypes
import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def wall_times(call: Callable[[], Any], seconds: float = 1.0, least: int = 5, most: int = 10_000) -> list[float]:
    """Milliseconds of calls, one by one, after one to warm up: as many as fit; ``least``, or 3 if that takes too long."""
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < most:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        times.append((end - start) * 1e3)
        spent = end - begin
        if spent >= seconds and (len(times) >= least or (spent >= 10 * seconds and len(times) >= 3)):
            break
    return times


QUEUED = 20
"""Calls in a row, few enough that no queue is full."""


def queueing_times(
    call: Callable[[], Any],
    wait: Callable[[Any], None],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Milliseconds of the host for a call that another device runs: means of :data:`QUEUED` calls in a row, ``wait`` apart."""
    wait(call())
    times: list[float] = []
    begin = clock()
    while not times or clock() - begin < seconds:
        start = clock()
        for _ in range(QUEUED):
            result = call()
        times.append((clock() - start) * 1e3 / QUEUED)
        wait(result)
    return times


def spread(times: list[float]) -> dict[str, float | int]:
    """Median, tenth and ninetieth percentile, smallest and number."""
    q10, median, q90 = np.quantile(times, (0.1, 0.5, 0.9))
    return {"median": float(median), "q10": float(q10), "q90": float(q90), "min": min(times), "n": len(times)}


def resident_peak(call: Callable[[], Any]) -> int | None:
    """Bytes by which the resident memory of this process rose at most during a call; None where the system cannot say."""
    release_free_memory()
    try:
        CLEAR_REFS.write_text("5")  # the high-water mark starts again from here
    except OSError:
        return None
    before = status_bytes("VmRSS")
    result = call()
    peak = status_bytes("VmHWM") - before
    del result
    return max(peak, 0)


def release_free_memory() -> None:
    """Give what the allocator keeps back to the system, so that a call that uses it again is seen to (glibc only)."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str) -> int:
    """One figure of ``/proc/self/status``."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")
