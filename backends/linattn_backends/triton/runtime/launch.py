"""How a kernel is launched: compiled once, found again by what it was compiled for, started past the compiler's look-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from ..lib.tiles import INTERPRETED as _INTERPRETED
from .device import stand_in
from .precompile import LOADING, compile_ahead

__all__ = ["launch", "start"]

INTERPRETED = bool(_INTERPRETED.value)


class Launched(Protocol):
    """A call that launches: its first array says where, its family what for."""

    q: Tensor

    @property
    def family(self) -> str:
        """The family whose recurrence it is."""
        ...


def launch(kernel: Any, count: int, call: Launched, *args: Any, **config: Any) -> None:
    """Launch on ``call``'s device; an error names the family, the kernel, the shapes and the configuration."""
    if count == 0:
        return
    try:
        device = call.q.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                start(kernel, count, device, args, config)
        else:
            start(kernel, count, device, args, config)
    except Exception as error:
        call = getattr(call, "given", None) or call
        given = ((name, getattr(call, name, None)) for name in ("q", "k", "v", "g", "w", "gv", "beta", "a", "b", "u"))
        shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in given if x is not None)
        settings = ", ".join(f"{name}={value}" for name, value in config.items())
        error.add_note(
            f"linattn triton: kernel {kernel.__name__} of {call.family} failed on {shapes}; configuration {settings}"
        )
        raise


DIRECT = not INTERPRETED and triton.__version__.startswith("3.6.")
"""Whether a compiled kernel can be called past the compiler's own look-up, which costs more than the launch: the call of other
releases is not the same."""


class Ready:
    """A compiled kernel, launched by the C function that the compiler made for it.

    That takes addresses as numbers. Given tensors, it asks each for its address, and the driver about that.
    """

    def __init__(self, compiled: Any, constants: Sequence[Any]):
        self.compiled, self.constants = compiled, constants
        runner = compiled.run
        self.plain = torch.version.hip is None and not (runner.global_scratch_size or runner.profile_scratch_size)
        if self.plain:
            self.launch = runner.launch
            self.fixed = (
                compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None, compiled.packed_metadata,
                None, None, None,
            )  # fmt: skip

    def __call__(self, count: int, device: torch.device, args: Sequence[Any]) -> None:
        """Launch ``count`` programs; who watches launches is told, in the compiler's own way."""
        if not self.plain or watched():
            self.compiled[(count, 1, 1)](*args, *self.constants)
            return
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        given = [x.data_ptr() if isinstance(x, Tensor) else x for x in args]
        self.launch(count, 1, 1, stream, *self.fixed, *given, *self.constants)


def watched() -> bool:
    """Whether somebody, a profiler, hooked into launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


COMPILED: dict[tuple[Any, ...], Ready] = {}
"""Compiled kernels, by everything that a kernel is compiled for: arguments, configuration, and the compiler's own settings."""


def start(kernel: Any, count: int, device: torch.device, args: tuple[Any, ...], config: dict[str, Any]) -> None:
    """Compile, or find what was compiled, and launch."""
    if device.type == "meta":
        stand_in().start(kernel, count, args, config)
        return
    if not DIRECT or kernel.pre_run_hooks:
        kernel[(count,)](*args, **config)
        return
    knobs = triton.knobs
    settings = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    key = (id(kernel), device, *settings, *config.values(), *map(trait, args))
    ready = COMPILED.get(key)
    if ready is None:
        compile_ahead(device)
        with LOADING:
            compiled = kernel[(count,)](*args, **config)
        if compiled is None:  # a hook of the compiler's cache took the kernel over
            return
        COMPILED[key] = Ready(compiled, [config[parameter.name] for parameter in kernel.params[len(args) :]])
    else:
        ready(count, device, args)


def trait(x: Any) -> Any:
    """What a kernel is compiled for in an argument: whether a number is one, a multiple of 16 or long; dtype and alignment.

    Most arguments are numbers, and each launch asks this of all: one number of three bits takes the least time.
    """
    if type(x) is int:
        return (x == 1) | (x % 16 == 0) << 1 | (x.bit_length() > 31) << 2
    if x is not None and isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return type(x)
