"""Other projects' tests: fetched from the package index, and run by pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
PIP = ("pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:")

Case = ElementTree.Element
"""One case of a JUnit report."""


def fetch(requirement: str, folder: Path, only: str = "", **environment: str) -> Path:
    """Unpack the sdist of a package in ``folder``.

    Args:
        requirement: ``NAME==VERSION``.
        folder: Where to.
        only: What is unpacked: files with this in their path. Default: all.
        **environment: Variables for the package's own set-up.

    Returns:
        The folder that the archive holds.

    Raises:
        OSError: It cannot be had.
    """
    before = set(folder.glob("*.tar.gz"))
    command = [sys.executable, "-m", *PIP, "-d", str(folder), requirement]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"no sdist of {requirement}: {(done.stderr.strip().splitlines() or ['pip says nothing'])[-1]}")
    (archive,) = set(folder.glob("*.tar.gz")) - before
    with tarfile.open(archive) as files:
        files.extractall(folder, [file for file in files if only in file.name], filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(
    arguments: Sequence[str],
    root: Path,
    plugin: str,
    *,
    prefix: Sequence[str] = (),
    packages: Iterable[Path] = (),
    **environment: str,
) -> list[Case]:
    """Run tests, whose failures nobody reads: they are not rewritten to tell more, nor are plug-ins of others loaded.

    Args:
        arguments: pytest's: files, and which of their tests.
        root: The folder to run in.
        plugin: A module of this folder that pytest loads first.
        prefix: A command that runs another one: ``linattn run-with fla --``.
        packages: Folders to import from, before what is installed.
        **environment: Variables for the process.

    Raises:
        RuntimeError: pytest wrote no report: what it said instead.
    """
    plugins = ["--assert=plain", f"-p{plugin}", "-pno:cacheprovider"]
    variables = os.environ | {"PYTHONPATH": path(packages), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [*prefix, sys.executable, "-m", "pytest", "-q", *plugins, f"--junitxml={report}", *arguments]
        log = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"{root}: pytest wrote no report\n{log.stdout[-3000:]}{log.stderr[-3000:]}")
        return list(ElementTree.parse(report).iter("testcase"))


def path(packages: Iterable[Path] = ()) -> str:
    """Where tests find ``packages``, what lies here, and all that is found now, as ``PYTHONPATH``."""
    return os.pathsep.join([str(HERE), *map(str, packages), *filter(None, [os.environ.get("PYTHONPATH")])])
