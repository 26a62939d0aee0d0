"""The GPU that kernels are compiled for."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from linattn_backends.triton.runtime.device import Properties

__all__ = ["HOPPER", "INTERPRETER", "Target", "complaint", "target"]

OLDEST = 80
NO_GLUON = "jax-triton takes no kernels in Gluon"


class Target(NamedTuple):
    """A GPU.

    Attributes:
        capability: Compute capability, ten times.
        num_sms: Streaming multiprocessors.
    """

    capability: int
    num_sms: int

    @property
    def properties(self) -> Properties:
        """What kernels and tiles are chosen by. Hopper and Blackwell for data centres have the large shared memory."""
        return Properties(self.num_sms, 90 <= self.capability < 120, NO_GLUON)


HOPPER = Target(90, 132)
INTERPRETER = Properties(1, True, NO_GLUON)


def present() -> Any:
    """The first GPU; ``None`` if there is none."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


@functools.cache
def target() -> Target:
    """The GPU of this process; what is traced for one without having it is for Hopper."""
    device = present()
    if device is None:
        return HOPPER
    return Target(round(10 * float(device.compute_capability)), device.core_count)


@functools.cache
def complaint() -> str | None:
    """Why the GPU of this process cannot be used."""
    device = present()
    if device is None:
        return None
    if "cuda" not in device.client.platform_version.lower():
        return "runs on NVIDIA GPUs, not AMD"
    found = target().capability / 10
    return None if found >= OLDEST / 10 else f"needs compute capability {OLDEST / 10} or newer, got {found}"
