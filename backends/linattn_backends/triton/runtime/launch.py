"""How a kernel is launched: compiled once, found again by what it was compiled for, started past the compiler's look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from .device import INTERPRETED, stand_in
from .notice import compiling
from .precompile import LOADING, precompile

__all__ = ["launch", "start"]

ARRAYS = ("q", "k", "v", "g", "gv", "beta", "a", "b", "u", "q_quad", "k_quad", "q_lin", "k_lin", "bias")
"""Names of arrays that an error shows of a call."""


class Launched(Protocol):
    """A call that launches: its values lie on the device, its family is what an error names."""

    v: Tensor

    @property
    def family(self) -> str:
        """The family whose recurrence it is."""
        ...


def launch(kernel: Any, count: int, call: Launched, *args: Any, **config: Any) -> None:
    """Launch on ``call``'s device; an error names the family, the kernel, the shapes and the configuration."""
    if count == 0:
        return
    try:
        device = call.v.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                start(kernel, count, device, args, config)
        else:
            if device.type == "meta":
                stand_in().family = call.family
            start(kernel, count, device, args, config)
    except Exception as error:
        given = ((name, getattr(call, name, None)) for name in ARRAYS)
        shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in given if x is not None)
        settings = ", ".join(f"{name}={value}" for name, value in config.items())
        error.add_note(
            f"linattn triton: kernel {kernel.__name__} of {call.family} failed on {shapes}; configuration {settings}"
        )
        raise


DIRECT = not INTERPRETED and triton.__version__.startswith("3.6.")
"""Whether a compiled kernel can be called past the compiler's own look-up, which costs more than the launch: the call of other
releases is not the same."""


class Ready(NamedTuple):
    """A compiled kernel and the C function that launches it, with what that takes besides grid, stream and arguments.

    Attributes:
        compiled: The kernel.
        launcher: The C function, which takes addresses as numbers: given tensors, it asks each for its address, and the driver
            about that. ``None`` for a kernel with memory of its own, which the compiler's code allocates.
        fixed: Arguments before the kernel's own.
        constants: The kernel's compile-time constants.
    """

    compiled: Any
    launcher: Callable[..., None] | None
    fixed: tuple[Any, ...]
    constants: tuple[Any, ...]

    @classmethod
    def of(cls, compiled: Any, constants: tuple[Any, ...]) -> Ready:
        """Find the C function of a compiled kernel."""
        runner = compiled.run
        if torch.version.hip is not None or runner.global_scratch_size or runner.profile_scratch_size:
            return cls(compiled, None, (), constants)
        fixed = (
            compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None, compiled.packed_metadata,
            None, None, None,
        )  # fmt: skip
        return cls(compiled, runner.launch, fixed, constants)


def watched() -> bool:
    """Whether somebody, a profiler, hooked into launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


COMPILED: dict[tuple[Any, ...], Ready] = {}
"""Compiled kernels, by everything that a kernel is compiled for: arguments, configuration, and the compiler's own settings."""


def start(kernel: Any, count: int, device: torch.device, args: tuple[Any, ...], config: dict[str, Any]) -> None:
    """Compile, or find what was compiled, and launch; who watches launches is told, in the compiler's own way."""
    if device.type == "meta":
        stand_in().start(kernel, count, args, config)
        return
    if not directly(device) or kernel.pre_run_hooks:
        kernel[(count,)](*args, **config)
        return
    key, values = identity(kernel, device, args, config)
    ready = COMPILED.get(key)
    if ready is None:
        precompile(device)
        with LOADING, compiling(kernel.__name__):
            compiled = kernel[(count,)](*args, **config)
        if compiled is not None:  # else a hook of the compiler's cache took the kernel over
            COMPILED[key] = Ready.of(compiled, tuple(config[parameter.name] for parameter in kernel.params[len(args) :]))
    elif ready.launcher is None or watched():
        ready.compiled[(count, 1, 1)](*args, *ready.constants)
    else:
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        ready.launcher(count, 1, 1, stream, *ready.fixed, *values, *ready.constants)


def directly(device: torch.device) -> bool:
    """Whether compiled kernels are launched past the compiler's look-up."""
    return DIRECT and device.type == "cuda"


def settings() -> tuple[Any, ...]:
    """The compiler's own settings that a kernel is compiled for."""
    return triton.knobs.runtime.debug, triton.knobs.compilation.instrumentation_mode


def identity(kernel: Any, device: torch.device, args: tuple[Any, ...], config: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The key of a compiled kernel, and its arguments as its launcher takes them."""
    traits, values = specialized(args)
    return (id(kernel), device, *settings(), *config.values(), *traits), values


def specialized(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What a kernel is compiled for in its arguments, and the arguments as its launcher takes them.

    Of a number, whether it is one, a multiple of 16, or long; of a tensor, its dtype and alignment. The launcher takes a
    tensor's address. Most arguments are numbers, and every launch asks this of all: a small number stands for each answer.
    """
    traits: list[Any] = []
    values: list[Any] = []
    trait, value = traits.append, values.append
    for x in args:
        if type(x) is int:
            trait(1 if x == 1 else 2 * (x & 15 == 0) + 4 * (not -(1 << 31) <= x < 1 << 31))
            value(x)
        elif x is not None and isinstance(x, Tensor):
            address = x.data_ptr()
            trait(x.dtype)
            trait(address & 15 == 0)
            value(address)
        else:
            trait(type(x))
            value(x)
    return traits, values
