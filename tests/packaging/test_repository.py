"""What is checked in makes sense on any machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import linattn
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
THIS = Path(__file__).relative_to(ROOT).as_posix()

# Spelled in pieces, so that this file does not find itself.
LOCAL = {
    "the host of a package registry": "pypi" + r"\.org|pythonhosted" + r"\.|registry\.npm",
    "a path of one machine": r"(?<![\w.}])/(wor" + r"k|home|root|Users)/\w",
    "an address of one machine": r"file:/" + r"/",
    "an issue number": r"(?i)\b(issue|pull request|PR) #?\d+",
}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.split("\n")[:-1]


@pytest.mark.parametrize("what", LOCAL)
def test_no_file_mentions(what: str):
    found = []
    for name in tracked():
        path = ROOT / name
        if name == THIS or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{n}: {line}" for n, line in enumerate(text.splitlines(), 1) if re.search(LOCAL[what], line)]
    assert not found


def test_constraints_pin_every_requirement_exactly():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        (specifier,) = pin.specifier
        assert (specifier.operator, pin.url, "+" in specifier.version) == ("==", None, False), str(pin)
    names = [canonicalize_name(pin.name) for pin in pins]
    assert names == sorted(names)
    assert "linattn" not in names


def test_changelog_knows_this_version():
    assert f"## [{linattn.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_random_generator_is_seeded():
    """What fails must fail again; PyTorch's, MLX's and NumPy's global ones get a seed before every test."""
    unseeded = "default_rng" + "()"
    folders = ("tests/", "conformance/", "benchmarks/", "examples/", "conftest.py")
    names = [name for name in tracked() if name.startswith(folders) and name.endswith(".py")]
    assert [name for name in names if unseeded in (ROOT / name).read_text(encoding="utf-8")] == []


def test_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text.splitlines()[1]
    assert "END OF TERMS AND CONDITIONS" in text


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_entry_points_lead_somewhere():
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    values = [value for group in groups.values() for value in group.values()]
    roots = {path.name: path for path in ROOT.glob("*/linattn*")}
    for module in (value.partition(":")[0].split(".") for value in values):
        folder = roots[module[0]].joinpath(*module[1:])
        assert folder.with_suffix(".py").is_file() or (folder / "__init__.py").is_file(), module
