"""Runs the examples in README.md and docs/: python blocks, their ``>>>`` results, and console sessions."""

import doctest
import gc
import multiprocessing
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from linattn.registry import registry
from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser, SkipParser

FLAGS = doctest.ELLIPSIS

# Compiling is most of what tests on JAX take: fusions above all, and programs that are cut up for many cores. Set before JAX
# starts, and for processes of tests; what is tested does not change. What XLA is known to get wrong is looked for in programs
# as users have them (test_jax_compiled.py).
os.environ.setdefault("XLA_FLAGS", runpy.run_path(str(Path(__file__).parent / ".ci/xla_flags.py"))["flags"]())
# Tensors of tests are tiny, and workers share the cores: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton interprets or compiles for the whole life of a process, and interpreted it would be chosen for every CPU tensor:
# its tests are a run of their own, and every other run says that it left them out.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
collect_ignore = [] if INTERPRETED else ["tests/triton_backend"]

# One process imports what processes of tests need most, when the first of them is started; each is a copy of it.
multiprocessing.set_forkserver_preload([
    "torch.distributed.fsdp", "torch.distributed.tensor", "linattn.distributed.on_torch", "linattn.nn",
    "linattn_backends.torch", "linattn_backends.triton", "numpy.random",
])  # fmt: skip


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """``copied(module)``: the processes that a module begins from nothing are such copies, where no import is tested."""
    context = multiprocessing.get_context("forkserver")
    return lambda module: monkeypatch.setattr(module, "get_context", lambda method: context)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".md":  # what pages show must look right
            item.add_marker(pytest.mark.filterwarnings("error::linattn.errors.InputWarning"))


def pytest_collection_finish() -> None:
    """Millions of objects of the frameworks stay to the end: looking through them for garbage took a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test and example draws the same numbers, alone or among others (``default_rng`` and JAX are given seeds)."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if mx := sys.modules.get("mlx.core"):
        mx.random.seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not INTERPRETED:
        terminalreporter.write_line("left out: tests/triton_backend (TRITON_INTERPRET=1 python -m pytest tests/triton_backend)")


def run_session(example: Example) -> str | None:
    """Run the ``$`` lines of a console block; each is followed by what it prints, ``...`` for anything.

    Python blocks of the page that start with a comment such as ``# loop.py`` are there as files.
    """
    for name, text in re.findall(r"^```python\n(?=# (\w+\.py)\n)(.*?)^```", example.document.text, re.MULTILINE | re.DOTALL):
        (Path(example.namespace["folder"]) / name).write_text(text, encoding="utf-8")
    for command, expected in commands(example.parsed):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=example.namespace["folder"],
            env={
                "JAX_PLATFORMS": "cpu",
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        found = "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())
        if not doctest.OutputChecker().check_output(expected, found, FLAGS):
            return f"$ {command}\nexpected:\n{expected}\nfound (exit code {done.returncode}):\n{found}"
    return None


def commands(session: str) -> list[tuple[str, str]]:
    """``(command, what it prints)`` of each ``$`` line; a command goes on after a backslash."""
    pairs: list[tuple[str, str]] = []
    for line in session.splitlines():
        if line.startswith("$ "):
            pairs.append((line[2:], ""))
        elif pairs and pairs[-1][0].endswith("\\") and not pairs[-1][1]:
            pairs[-1] = (f"{pairs[-1][0]}\n{line}", "")
        else:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]}{line}\n")
    return pairs


def open_page(namespace: dict[str, object]) -> None:
    """Commands of one page run in one empty folder; no page sees what another registered."""
    registry.refresh()
    namespace["folder"] = tempfile.mkdtemp(prefix="linattn-docs-")


def close_page(namespace: dict[str, object]) -> None:
    registry.refresh()
    shutil.rmtree(str(namespace["folder"]))


# The blocks of a page share their names: under pytest-xdist, run with --dist loadfile.
pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=FLAGS),
        CodeBlockParser(language="console", evaluator=run_session),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=open_page,
    teardown=close_page,
).pytest()
