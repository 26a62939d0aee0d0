"""Type checkers see the exact signatures: what is right passes, what is wrong is reported, line by line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pyright() -> set[tuple[str, int]]:
    """``(file, line)`` of each error."""
    settings = HERE / "pyrightconfig.json"
    done = run("basedpyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(settings))
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(d["file"]).name, d["range"]["start"]["line"] + 1) for d in found if d["severity"] == "error"}


def mypy() -> set[tuple[str, int]]:
    done = run("mypy", "--strict", "--no-error-summary", "--no-incremental", str(HERE / "correct.py"), str(HERE / "wrong.py"))
    assert not done.stderr, done.stderr
    errors = (re.match(r"(.+?):(\d+): error:", line) for line in done.stdout.splitlines())
    return {(Path(error[1]).name, int(error[2])) for error in errors if error}


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("checker", [pyright, mypy])
def test_exactly_the_wrong_lines_are_reported(checker):
    """Both read the installed package, whose types they take only if ``py.typed`` says that there are some."""
    pytest.importorskip(checker.__name__.replace("pyright", "basedpyright"))
    lines = (HERE / "wrong.py").read_text(encoding="utf-8").splitlines()
    wrong = {("wrong.py", number) for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert checker() == wrong
