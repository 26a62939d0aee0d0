"""The tables of operators in README.md and docs/operators.md say what the specs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from linattn.spec import FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPERATORS = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")


def rows(text: str, header: str) -> list[list[str]]:
    """Cells of the table whose header line starts with ``header``."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(header):
            break
    next(lines)
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def section(family: str) -> str:
    return OPERATORS.partition(f"\n## {family}\n")[2].partition("\n## ")[0]


def code(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def test_readme_lists_every_family_and_its_arrays():
    table = {code(family)[0]: code(arrays) for family, arrays, _ in rows(README, "| family |")}
    expected = {
        name: [arg.name for arg in spec.args if arg.name not in ("q", "k", "v")]
        for name, spec in FAMILIES.items()
        if name != "mixed_attn"
    }
    assert table == {**expected, "mixed_attn": ["bias"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_page_has_the_equations(family: str):
    text = " ".join(section(family).partition("```{equation}")[2].partition("```")[0].split())
    assert text == " ".join(FAMILIES[family].recurrence.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_page_has_the_arrays(family: str):
    spec = FAMILIES[family]
    documented = [(code(name)[0], code(shape), "optional" in name) for name, shape, _ in rows(section(family), "| array |")]
    expected = [(arg.name, [s.strip() for s in arg.shape.split("|")], arg.optional) for arg in (*spec.args, *spec.keyword_args)]
    assert documented == expected


def test_operators_page_has_the_chains_of_lowering():
    for name, spec in FAMILIES.items():
        if spec.lowering:
            assert f"{name} → {spec.lowering.to}" in OPERATORS


def test_readmes_smoke_run_names_what_there_is():
    (paths,) = re.findall(r"a smoke run [^`]*`\.venv/bin/python -m pytest ([^`]*)`", README)
    assert [path for path in paths.split() if not (ROOT / path).exists()] == []
