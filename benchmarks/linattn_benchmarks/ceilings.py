"""What this device can do: the bandwidth of a copy and the rate of a matrix product, measured in the same run as the rest.

The fastest repeat of each counts: whatever else the machine does only ever adds time.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np

from .environment import installed, load, processor
from .runners import RUNNERS, Runner

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
MATMUL_WIDTH = {"cpu": 2048, "cuda": 8192}


def measure(device: str, dtype: str) -> dict[str, Any]:
    """Bytes read and written per second, operations per second in ``dtype``, and what they were measured on.

    Narrow dtypes may run in float32 where that is faster, as on most CPUs.
    """
    runner = RUNNERS["torch" if installed("torch") else "numpy"](device)
    candidates = [dtype] if dtype == "float64" else [dtype, "float32"]
    rates = {name: matmul_rate(runner, name) for name in dict.fromkeys(candidates)}
    best = max(rates, key=lambda name: rates[name])
    return {
        "device": device,
        "name": device_name(device),
        "threads": threads(),
        "load": load(),
        "copy_bytes_per_s": copy_rate(runner),
        "matmul_flops_per_s": rates[best],
        "matmul_dtype": best,
        "measured_with": runner.name,
    }


def copy_rate(runner: Runner) -> float:
    """Bytes per second, read and written both counted."""
    count = COPY_BYTES[runner.device] // 4
    x, y = (runner.array(np.ones(count, np.float32), "float32") for _ in range(2))
    call = (lambda: y.copy_(x)) if runner.name == "torch" else (lambda: np.copyto(y, x))
    return 2 * 4 * count / (min(runner.times(call, 0.5)) / 1e3)


def matmul_rate(runner: Runner, dtype: str) -> float:
    """Operations per second."""
    width = MATMUL_WIDTH[runner.device]
    source = np.random.default_rng().standard_normal((width, width), np.float32)
    try:
        x = runner.array(source, dtype)
        times = runner.times(lambda: x @ x, 0.5)
    except (RuntimeError, TypeError, ImportError):  # no such product on this device
        return 0.0
    return 2 * width**3 / (min(times) / 1e3)


def device_name(device: str) -> str:
    """The device's own name."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return processor() or platform.machine()


def threads() -> int | None:
    """Threads that torch uses on the CPU."""
    if not installed("torch"):
        return None
    import torch

    return torch.get_num_threads()
