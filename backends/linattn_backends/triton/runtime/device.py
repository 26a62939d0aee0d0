"""What kernels and tiles are chosen by, of a device; and who runs launches on tensors that have no memory.

Tensors of the device ``meta`` have shapes and strides alone. Inside :func:`standing_in`, every launch on them goes to what it
was given: so the host code of this package serves the arrays of another framework (:mod:`linattn_backends.jax_triton`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
import triton

__all__ = ["INTERPRETED", "Properties", "StandIn", "properties", "stand_in", "standing_in"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU too; decided when Triton is imported."""


class Properties(NamedTuple):
    """What is chosen by, of a device.

    Attributes:
        num_sms: Streaming multiprocessors; an interpreter counts as one.
        large_smem: Whether a block may have 220 KB of shared memory, as on Hopper.
        not_hopper: Why kernels in Gluon for NVIDIA's compute capability 9.0 do not run; ``None`` if they do.
    """

    num_sms: int
    large_smem: bool
    not_hopper: str | None


class StandIn(Protocol):
    """The device that ``meta`` tensors stand for; ``family`` is that of the call that launched last."""

    properties: Properties
    family: str

    def start(self, kernel: Any, count: int, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Launch ``count`` programs of a kernel."""
        ...


_stand_in: ContextVar[StandIn] = ContextVar("stand_in")


def stand_in() -> StandIn:
    """The device that ``meta`` stands for here."""
    return _stand_in.get()


@contextmanager
def standing_in(device: StandIn) -> Iterator[None]:
    """Let ``meta`` stand for ``device`` inside."""
    token = _stand_in.set(device)
    try:
        yield
    finally:
        _stand_in.reset(token)


def properties(device: torch.device) -> Properties:
    """The properties of a device, or of what stands for it."""
    return stand_in().properties if device.type == "meta" else measured(device)


@functools.cache
def measured(device: torch.device) -> Properties:
    """The properties of a device that is there. Every choice asks here: this is what a test of another device replaces."""
    if device.type == "cpu":
        return Properties(1, True, not_hopper(None))
    if device.type != "cuda":
        units = torch.get_device_module(device).get_device_properties(device).max_compute_units
        return Properties(units, False, not_hopper(None))
    found = torch.cuda.get_device_properties(device)
    return Properties(found.multi_processor_count, found.shared_memory_per_block_optin >= 220 << 10, not_hopper(found))


def not_hopper(found: Any) -> str | None:
    """Why kernels in Gluon do not run on a device of CUDA with these properties, or on another if ``None``.

    They are for one release of the compiler, like the language, which has no interpreter. AMD's devices say 9 as well.
    """
    if INTERPRETED:
        return "kernels are interpreted"
    if found is None or torch.version.hip is not None:
        return "the device is not NVIDIA's"
    if (found.major, found.minor) != (9, 0):
        return f"the device has compute capability {found.major}.{found.minor}, not 9.0"
    return None if triton.__version__.startswith("3.6.") else f"Triton is {triton.__version__}, not 3.6"
