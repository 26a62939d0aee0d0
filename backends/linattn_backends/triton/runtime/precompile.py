"""Kernels compiled before they are launched: all that a call and its gradient will need, at once.

Five kernels or so, of up to six seconds each, would be compiled one after the other as they are launched, and for each a
program in C that launches it. Where the first of them is missing, the host code is rehearsed on tensors without memory, and
what it would launch is compiled in threads.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

from .device import Properties, properties, standing_in
from .notice import compiling

__all__ = ["LOADING", "precompile", "precompiled"]

LOADING = threading.RLock()
"""Held where a kernel's launcher is loaded to be used. All of Triton's are modules of one name, and Python, asked for a file a
second time, puts what it holds into the module of that name that was loaded last: read by two threads at once, a launcher can
be that of another kernel.
"""

Rehearse = Callable[[tuple[Any, ...]], None]

_running: ContextVar[tuple[Rehearse, tuple[Any, ...]] | None] = ContextVar("running", default=None)
"""The function that runs: how it is rehearsed, and its arguments."""


class Rehearsal:
    """The device of a rehearsal, which notes what is launched there, and for which family."""

    def __init__(self, device: torch.device):
        self.properties: Properties = properties(device)
        self.family = ""
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def start(self, kernel: Any, count: int, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Note a launch."""
        self.launches.append((kernel, args, config))


def without_memory(x: Any) -> Any:
    """A tensor like ``x``, of the device ``meta``; anything else as it is."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def precompiled(
    after: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that launches kernels, so that :func:`precompile` knows of all of them.

    ``after`` takes the arguments and the result, and does what is likely to follow.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        def rehearse(args: tuple[Any, ...]) -> None:
            given = tuple(map(without_memory, args))
            result = body(*given)
            if after is not None:
                after(given, result)

        @functools.wraps(body)
        def run(*args: Any) -> Any:
            token = _running.set((rehearse, args))
            try:
                return body(*args)
            finally:
                _running.reset(token)

        return run

    return decorate


def precompile(device: torch.device) -> None:
    """Compile what the function that runs will launch. What fails to compile says so when it is launched."""
    running = _running.get()
    if running is None:
        return
    _running.set(None)  # once: until the function ends
    rehearse, args = running
    rehearsal = Rehearsal(device)
    with standing_in(rehearsal):
        rehearse(args)
    with compiling(rehearsal.family):
        Context().run(warm_up, device, rehearsal.launches)


def warm_up(device: torch.device, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Compile in threads. In a context of its own: Triton refuses a mode inside another, and keeps one that is interrupted."""
    with LOADING, ThreadPoolExecutor(os.cpu_count()) as threads:
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            kernels = [kernel.warmup(*args, grid=(1,), **config) for kernel, args, config in launches]
        for kernel in [x for x in threads.map(with_launcher, set(kernels)) if x is not None]:
            with torch.cuda.device(device), suppress(Exception):  # the launch will meet it again
                _ = kernel.run


def with_launcher(kernel: Any) -> Any:
    """A kernel, once it is compiled, and on disk the C program that launches it; ``None`` if one of them cannot be made.

    The launcher that is loaded here is thrown away: see :data:`LOADING`.
    """
    if hasattr(kernel, "result"):
        kernel = kernel.result(ignore_errors=True)
    if kernel is None:
        return None
    try:
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    except Exception:  # likewise
        return None
    return kernel
