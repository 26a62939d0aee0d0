"""What is checked in fits together."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import linattn
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
NOTES = sorted((ROOT / "benchmarks" / "notes").glob("*.md"))


def test_constraints_pin_every_requirement_exactly():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        (specifier,) = pin.specifier
        assert (specifier.operator, pin.url, "+" in specifier.version) == ("==", None, False), str(pin)
    names = [canonicalize_name(pin.name) for pin in pins]
    assert names == sorted(names)
    assert "linattn" not in names


@pytest.mark.parametrize(("installed", "fusions"), [("0.10.2", True), ("0.11.0", False), ("1.0", False), (None, None)])
def test_xla_is_given_flags_that_it_knows(installed: str | None, fusions: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version)
    flags = runpy.run_path(str(ROOT / ".ci" / "xla_flags.py"))["flags"]()
    if installed is None:
        assert flags == ""
    else:
        assert "--xla_backend_optimization_level=0" in flags.split()
        assert ("--xla_cpu_use_fusion_emitters=false" in flags.split()) is fusions


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def required(lines: list[Any], groups: dict[str, list[Any]], extras: dict[str, list[str]]) -> set[str]:
    """Names of what these lines require, those of the groups and of the project's own extras that they include."""
    found: set[str] = set()
    for line in lines:
        if isinstance(line, dict):
            found |= required(groups[line["include-group"]], groups, extras)
            continue
        requirement = Requirement(line)
        if requirement.name != "linattn":
            found.add(canonicalize_name(requirement.name))
        for extra in requirement.extras if requirement.name == "linattn" else ():
            found |= required(extras[extra], groups, extras)
    return found


def test_constraints_cover_what_the_readme_installs():
    told = re.search(r'-e "\.\[([\w,]+)\]" --group (\w+)', (ROOT / "README.md").read_text(encoding="utf-8"))
    assert told
    extras, groups = project()["project"]["optional-dependencies"], project()["dependency-groups"]
    lines = [*project()["project"]["dependencies"], f"linattn[{told[1]}]", *groups[told[2]], "pip"]
    needed = required(lines, groups, extras)
    assert {"torch", "numpy", "jinja2", "ruff", "sphinx", "jax-triton"} < needed
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert needed <= {canonicalize_name(line.partition("==")[0]) for line in pinned if not line.startswith("#")}


def tracked() -> list[str]:
    """The files that git knows."""
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("no checkout")
    return found.stdout.split("\n")[:-1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_changelog_and_citation_know_this_version():
    assert f"## [{linattn.__version__}]" in read("CHANGELOG.md")
    assert f"\nversion: {linattn.__version__}\n" in read("CITATION.cff")


def test_ruff_is_the_same_before_a_commit_and_after_it():
    hook = re.search(r"ruff-pre-commit\n +rev: v([\d.]+)\n", read(".pre-commit-config.yaml"))
    assert hook
    assert f"\nruff=={hook[1]}\n" in read("constraints.txt")


def test_the_page_of_versions_has_the_bounds_which_are_what_is_tried():
    told, extras = project()["project"], project()["project"]["optional-dependencies"]
    lines = [*told["dependencies"], *extras["torch"], *extras["triton"], *extras["jax"], *extras["mlx"]]
    bounds = {"python": told["requires-python"]}
    bounds |= {found.name: str(found.specifier) for found in map(Requirement, lines) if found.name != "linattn"}
    rows = re.findall(r"^\| (\w+) \| `(>=[\d.]+)` \| ([\d.]+) \|", read("docs/versions.md"), re.MULTILINE)
    names = {"Python": "python", "NumPy": "numpy", "PyTorch": "torch", "Triton": "triton", "JAX": "jax", "MLX": "mlx"}
    assert [name for name, *_ in rows] == list(names)
    for name, bound, tried in rows:
        assert bounds[names[name]] == bound, name
        assert Version(tried) == Version(bound.removeprefix(">=")), name


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
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *NOTES]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def test_entry_points_lead_somewhere():
    groups = project()["project"]["entry-points"]
    values = [value for group in groups.values() for value in group.values()]
    roots = {path.name: path for path in ROOT.glob("*/linattn*")}
    for module in (value.partition(":")[0].split(".") for value in values):
        folder = roots[module[0]].joinpath(*module[1:])
        assert folder.with_suffix(".py").is_file() or (folder / "__init__.py").is_file(), module
