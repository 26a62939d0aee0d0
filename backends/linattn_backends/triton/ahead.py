"""Kernels compiled before they are launched: all that a call and its gradient will need, at once.

Five kernels or so, of up to six seconds each, would be compiled one after the other as they are launched, and for each a
program in C that launches it. Where the first of them is missing, the host code is rehearsed on tensors without memory, and
what it would launch is compiled in threads.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from typing import Any

import torch
import triton
from torch import Tensor

from .devices import hopper, processors, roomy, standing_in

__all__ = ["compile_ahead", "foreseen"]

_running: ContextVar[Callable[[], None] | None] = ContextVar("running", default=None)


class Rehearsal:
    """Stands for a device, and notes what is launched there."""

    def __init__(self, device: torch.device):
        self.processors, self.roomy, self.hopper = processors(device), roomy(device), hopper(device)
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def start(self, kernel: Any, count: int, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Note a launch."""
        self.launches.append((kernel, args, config))


def without_memory(x: Any) -> Any:
    """A tensor like ``x``, of the device ``meta``; anything else as it is."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def foreseen(after: Callable[[tuple[Any, ...], Any], Any] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that launches kernels, so that :func:`compile_ahead` knows of all of them.

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
            token = _running.set(lambda: rehearse(args))
            try:
                return body(*args)
            finally:
                _running.reset(token)

        return run

    return decorate


def compile_ahead(device: torch.device) -> None:
    """Compile what the function that runs will launch. What fails to compile says so when it is launched."""
    rehearse = _running.get()
    if rehearse is None:
        return
    _running.set(None)  # once: until the function ends
    stage = Rehearsal(device)
    with standing_in(stage):
        rehearse()
    Context().run(warm_up, device, stage.launches)


def warm_up(device: torch.device, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Compile in threads. In a context of its own: Triton refuses a mode inside another, and keeps one that is interrupted."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            kernels = [kernel.warmup(*args, grid=(1,), **config) for kernel, args, config in launches]
        for kernel in set(kernels):
            threads.submit(load, kernel, device)


def load(kernel: Any, device: torch.device) -> None:
    """Load a kernel, with what launches it: a C program that a C compiler makes, for which a launch would wait."""
    if hasattr(kernel, "result"):
        kernel = kernel.result(ignore_errors=True)
    if kernel is not None:
        with torch.cuda.device(device):
            _ = kernel.run
