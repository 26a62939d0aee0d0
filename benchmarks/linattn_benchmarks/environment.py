"""What a figure was measured on, and how results are written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import linattn
from linattn.errors import OptionError

from . import rows

SCHEMA = 1
"""Version of the layout of results files; raised when a field changes its meaning or goes away."""

PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "jax",
    "jaxlib",
    "libtpu",
    "mlx",
    "flash-linear-attention",
    "jax-linear-attention",
    "flash-qla",
    "flashinfer-python",
    "nvidia-cudnn-frontend",
    "transformers",
    "mamba-ssm",
    "causal-conv1d",
)


def environment() -> dict[str, Any]:
    """Versions and machine, for the head of every results file."""
    return {
        "linattn": linattn.API_VERSION,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor(),
        "accelerator": accelerator(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": load(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }


def load() -> float | None:
    """How many processes want to run, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def installed(name: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's own name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def accelerator() -> str | None:
    """The first GPU or TPU, as a framework that is loaded names it; None without one."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    device = jax.devices()[0] if jax else None
    return device.device_kind if device and device.platform != "cpu" else None


def document(benchmark: str, results: Any) -> dict[str, Any]:
    """What a results file holds: the schema's version, the benchmark's name, the environment, the figures."""
    return {"schema": SCHEMA, "benchmark": benchmark, "environment": environment(), "results": results}


def write(path: Path, benchmark: str, results: Any) -> None:
    """The results file of a benchmark that was run here."""
    keep(path, document(benchmark, results))


def keep(path: Path, content: dict[str, Any]) -> None:
    """Write a results file, in a folder that is made if need be; all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(rows.text(content), encoding="utf-8")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A results file of this schema."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"{path}: not JSON: {error}") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA:
        raise OptionError(f"{path}: expected a results file of schema {SCHEMA}, got {found}")
    return content
