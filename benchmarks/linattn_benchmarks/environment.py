"""What a figure was measured on, and how results are written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import linattn

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "torch", "triton", "jax", "jaxlib", "mlx")


def environment() -> dict[str, Any]:
    """Versions and machine, for the head of every results file."""
    return {
        "linattn": linattn.API_VERSION,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }


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


def write(path: Path, benchmark: str, results: Any) -> None:
    """One results file: the benchmark's name, the environment, the figures."""
    document = {"benchmark": benchmark, "environment": environment(), "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
