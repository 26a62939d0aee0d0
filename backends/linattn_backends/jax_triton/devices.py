"""The GPU that kernels are compiled for."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

__all__ = ["HOPPER", "Target", "complaint", "target"]

OLDEST = 80


class Target(NamedTuple):
    """What is chosen by a device.

    Attributes:
        capability: Compute capability, ten times.
        processors: Multiprocessors.
    """

    capability: int
    processors: int

    @property
    def roomy(self) -> bool:
        """Whether a block may have 220 KB of shared memory: Hopper, and Blackwell for data centres."""
        return 90 <= self.capability < 120


HOPPER = Target(90, 132)


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
