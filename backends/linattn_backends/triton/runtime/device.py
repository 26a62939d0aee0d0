"""What tiles are chosen by, of a device; and who runs launches on tensors that have no memory.

Tensors of the device ``meta`` have shapes and strides alone. Inside :func:`standing_in`, every launch on them goes to what it
was given: so the host code of this package serves the arrays of another framework (:mod:`linattn_backends.jax_triton`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import triton

from ..lib.tiles import INTERPRETED

__all__ = ["StandIn", "hopper", "not_hopper", "processors", "roomy", "stand_in", "standing_in"]


class StandIn(Protocol):
    """The device that ``meta`` tensors stand for."""

    processors: int
    roomy: bool
    hopper: bool

    def start(self, kernel: Any, count: int, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Launch ``count`` programs of a kernel."""
        ...


_stand_in: ContextVar[StandIn] = ContextVar("stand_in")


def stand_in() -> StandIn:
    """What ``meta`` stands for here."""
    return _stand_in.get()


@contextmanager
def standing_in(device: StandIn) -> Iterator[None]:
    """Inside, ``meta`` stands for ``device``."""
    token = _stand_in.set(device)
    try:
        yield
    finally:
        _stand_in.reset(token)


@functools.cache
def _of_cuda(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; an interpreter counts as one."""
    if device.type == "meta":
        return stand_in().processors
    return _of_cuda(device).multi_processor_count if device.type == "cuda" else 1


def roomy(device: torch.device) -> bool:
    """Whether a block may have 220 KB of shared memory, as on Hopper."""
    if device.type == "meta":
        return stand_in().roomy
    return device.type != "cuda" or _of_cuda(device).shared_memory_per_block_optin >= 220 << 10


def hopper(device: torch.device) -> bool:
    """Whether kernels in Gluon for NVIDIA's compute capability 9.0 run."""
    return stand_in().hopper if device.type == "meta" else not_hopper(device) is None


@functools.cache
def not_hopper(device: torch.device) -> str | None:
    """Why such kernels do not run on a device; ``None`` if they do.

    They are for one release of the compiler, like the language, which has no interpreter. AMD's devices say 9 as well.
    """
    if INTERPRETED.value:
        return "kernels are interpreted"
    if device.type != "cuda" or torch.version.hip is not None:
        return "the device is not NVIDIA's"
    found = _of_cuda(device)
    if (found.major, found.minor) != (9, 0):
        return f"the device has compute capability {found.major}.{found.minor}, not 9.0"
    return None if triton.__version__.startswith("3.6.") else f"Triton is {triton.__version__}, not 3.6"
