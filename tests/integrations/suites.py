"""Other projects' tests: fetched from the package index, and run by pytest in a process of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).parent
PIP = ("pip", "download", "-q", "--no-deps", "--no-build-isolation", "--no-binary", ":all:")

EVERY = 5.0
"""Seconds after which a run says again what became of its tests."""
RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How pytest ends when it has run what there is."""


class Case(NamedTuple):
    """What became of a case.

    Attributes:
        node: What pytest calls it, in its arguments too: ``"tests/test_gla.py::test_chunk[B1]"``.
        ended: ``"passed"``, ``"failed"`` or ``"skipped"``.
        why: What was said of it, if it did not pass; ``case_journal.NOT_RUN`` of one that did not end.
    """

    node: str
    ended: str
    why: str = ""

    @property
    def file(self) -> str:
        """Where it is, as its name says."""
        return self.node.partition("::")[0]


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


def install(requirements: Iterable[str], folder: Path) -> None:
    """Put packages that are nothing but Python into ``folder``; ``OSError`` where they cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *requirements]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip says nothing"])[-1])


def run(arguments: Sequence[str], root: Path, plugin: str, **options: Any) -> list[Case]:
    """What became of each case of tests; the arguments are those of :func:`progress`."""
    *_, cases = progress(arguments, root, plugin, **options)
    return cases


def progress(
    arguments: Sequence[str],
    root: Path,
    plugin: str,
    *,
    prefix: Sequence[str] = (),
    packages: Iterable[Path] = (),
    until: float = math.inf,
    **environment: str,
) -> Generator[list[Case]]:
    """Run tests, whose failures nobody reads: they are not rewritten to tell more, nor are plug-ins of others loaded.

    Args:
        arguments: pytest's: files, and which of their tests.
        root: The folder to run in.
        plugin: A module of this folder that pytest loads first; empty for none.
        prefix: A command that runs another one: ``linattn run-with fla --``.
        packages: Folders to import from, before what is installed.
        until: When all processes end, whatever they do, by :func:`time.monotonic`.
        **environment: Variables for the process.

    Yields:
        At once and every few seconds, what has become of each case so far; the last time, of all.

    Raises:
        RuntimeError: pytest ended without having run them: what it said.
    """
    plugins = ["--assert=plain", "-pcase_journal", "-pno:cacheprovider", *(f"-p{name}" for name in [plugin] if name)]
    plugins += [f"--rootdir={root}", "--continue-on-collection-errors"]
    with tempfile.TemporaryDirectory() as folder:
        journal, log = Path(folder, "journal"), Path(folder, "log")
        where = {"PYTHONPATH": path(packages), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "JUDGED_JOURNAL": str(journal)}
        command = [*prefix, sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
        variables = os.environ | where | environment
        with log.open("w") as said, _group(command, cwd=root, env=variables, stdout=said, stderr=said) as process:
            yield []
            while _runs(process, until):
                yield _cases(journal)
            ended = process.poll()
        yield _cases(journal)
        if ended is not None and ended not in RAN:
            raise RuntimeError(f"{root}: pytest ended with {ended}\n{log.read_text()[-6000:]}")


@contextlib.contextmanager
def _group(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends here, with all that it started; it ends first, so that it counts none of them as broken."""
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _runs(process: subprocess.Popen[bytes], until: float) -> bool:
    """Whether a process still runs and may, after a few seconds if so."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, min(EVERY, until - time.monotonic())))
    return process.poll() is None and time.monotonic() < until


def _cases(journal: Path) -> list[Case]:
    """What a journal says of each case last; of a line that is being written, nothing."""
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
    found = (Case(*json.loads(line)) for line in lines)
    return list({case.node: case for case in found}.values())


def path(packages: Iterable[Path] = ()) -> str:
    """Where tests find ``packages``, what lies here, and all that is found now, as ``PYTHONPATH``."""
    return os.pathsep.join([str(HERE), *map(str, packages), *filter(None, [os.environ.get("PYTHONPATH")])])
