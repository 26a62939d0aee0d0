"""What this device can do: the bandwidth of a copy and the rate of a matrix product, measured in the same run as the rest.

The fastest repeat of each counts: whatever else the machine does only ever adds time.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from linattn.errors import OptionError

from .environment import installed, load, processor
from .runners import RUNNERS, Runner

COPY_BYTES = {"cpu": 256 << 20}
MATMUL_WIDTH = {"cpu": 2048}
ACCELERATOR_BYTES, ACCELERATOR_WIDTH = 2 << 30, 8192

FRAMEWORKS = {"cpu": ("torch", "numpy"), "cuda": ("torch", "jax"), "tpu": ("jax",), "metal": ("mlx",)}
"""What to measure each kind of device with: the first that is installed and sees one."""


def measure(device: str, dtype: str) -> dict[str, Any]:
    """Bytes read and written per second, operations per second in ``dtype``, and what they were measured on.

    Narrow dtypes may run in float32 where that is faster, as on most CPUs.
    """
    runner = runner_of(device)
    candidates = [dtype] if dtype == "float64" else [dtype, "float32"]
    rates = {name: matmul_rate(runner, name) for name in dict.fromkeys(candidates)}
    best = max(rates, key=lambda name: rates[name])
    return {
        "device": device,
        "name": device_name(runner),
        "cuda": cuda_version() if device == "cuda" and runner.name == "torch" else None,
        "threads": threads(),
        "load": load(),
        "copy_bytes_per_s": copy_rate(runner),
        "matmul_flops_per_s": rates[best],
        "matmul_dtype": best,
        "measured_with": runner.name,
    }


def runner_of(device: str) -> Runner:
    """A framework that can run on this kind of device here.

    Raises:
        OptionError: None can; each says why.
    """
    reasons = []
    for name in FRAMEWORKS.get(device, ()):
        runner = RUNNERS[name](device)
        reason = runner.refusal()
        if reason is None:
            return runner
        reasons.append(reason)
    raise OptionError(f"--device {device}: {'; '.join(reasons) or 'expected ' + ', '.join(FRAMEWORKS)}")


def copy_rate(runner: Runner) -> float:
    """Bytes per second, read and written both counted."""
    count = COPY_BYTES.get(runner.device, ACCELERATOR_BYTES) // 4
    call = copy_of(runner, runner.array(np.ones(count, np.float32), "float32"))
    return 2 * 4 * count / (min(runner.times(call, 0.5)) / 1e3)


def copy_of(runner: Runner, x: Any) -> Any:
    """A call that reads ``x`` once and writes as much; where arrays cannot be written to, it adds one."""
    if runner.name == "numpy":
        y = np.zeros_like(x)
        return lambda: np.copyto(y, x)
    if runner.name == "torch":
        y = x.clone()
        return lambda: y.copy_(x)
    return runner.forward(lambda arrays: (arrays["x"] + 1, None), {"x": x})


def matmul_rate(runner: Runner, dtype: str) -> float:
    """Operations per second."""
    width = MATMUL_WIDTH.get(runner.device, ACCELERATOR_WIDTH)
    source = np.random.default_rng(0).standard_normal((width, width), np.float32)
    try:
        call = runner.forward(lambda arrays: (arrays["x"] @ arrays["x"], None), {"x": runner.array(source, dtype)})
        times = runner.times(call, 0.5)
    except (RuntimeError, TypeError, ImportError):  # no such product on this device
        return 0.0
    return 2 * width**3 / (min(times) / 1e3)


def device_name(runner: Runner) -> str:
    """The device's own name."""
    if runner.device == "cpu":
        return processor() or platform.machine()
    if runner.name == "torch":
        import torch

        return torch.cuda.get_device_name()
    if runner.name == "jax":
        import jax

        return jax.devices(runner.device)[0].device_kind
    return platform.machine()


def cuda_version() -> str | None:
    """Of the toolkit that torch was built with."""
    import torch

    return torch.version.cuda


def threads() -> int | None:
    """Threads that torch uses on the CPU."""
    if not installed("torch"):
        return None
    import torch

    return torch.get_num_threads()
