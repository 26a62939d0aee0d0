"""What is installed: all that a user runs, the marker of its types among it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_what_a_user_runs(built: Path):
    assert wheel.faults(built) == []


def test_more_or_less_than_that_is_noticed(built: Path, tmp_path: Path):
    changed = tmp_path / built.name
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "linattn/py.typed":
                new.writestr(name, old.read(name))
        new.writestr("linattn_benchmarks/results/x.json", "{}")
        new.writestr("figures/document.py", "")
    assert wheel.faults(changed) == [
        "not expected: figures/document.py",
        "not expected: linattn_benchmarks/results/x.json",
        "missing: linattn/py.typed",
    ]
