"""What a run was made with, as far as it can matter: the code of plug-in and suite, packages, driver, compiler, environment."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["digest", "digests", "packages", "toolchain", "variables"]

SUITE = ("linattn", "linattn_conformance", "linattn_backends")
MATTERS = re.compile(
    r"(CUDA|NVIDIA|NCCL|HIP|ROCR|ASCEND|TRITON|TORCH|TORCHINDUCTOR|PYTORCH|XLA|JAX|MLX|METAL|LINATTN|OMP|MKL|OPENBLAS|GOMP|KMP|"
    r"CUBLAS|TF(?!_CLI)|NPY|FLA)_|PYTHONHASHSEED$|PYTHONOPTIMIZE$|LD_PRELOAD$"
)
"""Environment variables that change what a backend does."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|(^|_)KEY($|_)")
SKIPPED = ("__pycache__", ".git")
TIME_LIMIT = 10.0
"""Seconds that a compiler or driver has to say its version."""


def digests(kind: str) -> dict[str, str]:
    """SHA-256 of the installed files of the suite, and of the package that a backend's class is in.

    Args:
        kind: The class, with its module.
    """
    found = {name: digest(name) for name in (*SUITE, kind.partition(".")[0])}
    return {name: text for name, text in found.items() if text}


def digest(package: str) -> str:
    """SHA-256 over names and contents of a package's files, compiled bytes aside; empty for one that has no files.

    It is that of the files as they are installed, so that a wheel, and the same files in a working tree, have the same.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # __main__
        spec = None
    if spec is None:
        return ""
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [(path.relative_to(root).as_posix(), path) for root in roots for path in root.rglob("*") if path.is_file()]
    if not roots and spec.origin and Path(spec.origin).is_file():
        files = [(Path(spec.origin).name, Path(spec.origin))]
    whole = hashlib.sha256()
    for name, path in sorted(files):
        if not any(part in SKIPPED for part in path.parts) and path.suffix != ".pyc":
            whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest() if files else ""


def packages() -> dict[str, str]:
    """The version of every distribution that is installed."""
    found = {dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def toolchain() -> dict[str, str]:
    """Driver and compilers of this machine, as they name themselves; what is not there is left out."""
    driver = Path("/proc/driver/nvidia/version")
    said = {
        "C compiler": _said("cc", "--version"),
        "ptxas": _said("ptxas", "--version", line=-1),
        "C library": " ".join(platform.libc_ver()).strip(),
        "kernel": platform.version(),
        "driver": driver.read_text().partition("\n")[0] if driver.exists() else "",
    }
    return {name: text for name, text in said.items() if text}


def _said(command: str, *arguments: str, line: int = 0) -> str:
    """One line of what a program prints; empty if there is none."""
    path = shutil.which(command)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[line]


def variables(backend: str) -> dict[str, str]:
    """Those environment variables that matter, and those that are named after the backend; nothing that may be a secret."""
    own = f"{backend}_".replace("-", "_").upper()
    told = {name: value for name, value in os.environ.items() if MATTERS.match(name) or name.upper().startswith(own)}
    return {name: value for name, value in sorted(told.items()) if not SECRET.search(name)}
