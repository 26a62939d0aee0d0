"""The reports of conformance in the documentation are intact, and the matrix is theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from linattn_conformance import reading

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import matrices  # noqa: E402

FOLDER = DOCS / "conformance"
HELD = {held.hash: held for held in matrices.manifests()}
REPORTS = sorted((FOLDER / "reports").glob("*.json.gz"))


def name(path: Path) -> str:
    return path.name.removesuffix(".json.gz")


@pytest.mark.parametrize("path", REPORTS, ids=name)
def test_a_report_is_of_the_cases_of_this_version_or_of_those_that_lie_beside_it(path):
    found = reading.read(path)
    assert reading.verify(found, HELD[found["manifest"]]).faults == ()


def test_the_matrices_are_theirs():
    made = matrices.matrices()
    assert {name: (FOLDER / name).read_text(encoding="utf-8") for name in made} == made, "run: python docs/matrices.py"


def test_a_file_is_named_after_its_backend_and_ours_come_first():
    assert [matrices.backend(path) for path in REPORTS] == [reading.read(path)["backend"]["name"] for path in REPORTS]
    order = [matrices.backend(path) in matrices.OURS for path in matrices.ordered()]
    assert order == sorted(order, reverse=True)
    assert len(order) == len(REPORTS)
    assert set(matrices.OURS) <= set(map(matrices.backend, REPORTS))


def test_every_report_is_named_on_the_page():
    page = (FOLDER / "reports.md").read_text(encoding="utf-8")
    assert [name(path) for path in REPORTS if f'href="reports/{name(path)}.html"' not in page] == []
