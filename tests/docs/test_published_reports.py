"""The reports of conformance in the documentation are intact, and the matrix is theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from linattn_conformance import manifest, reading, rendering

FOLDER = Path(__file__).parents[2] / "docs" / "conformance"
HELD = manifest.read(FOLDER / "reports" / "manifest.json")
REPORTS = sorted((FOLDER / "reports").glob("*.json.gz"))


def name(path: Path) -> str:
    return path.name.removesuffix(".json.gz")


@pytest.mark.parametrize("path", REPORTS, ids=name)
def test_a_report_is_of_the_cases_that_lie_beside_it(path):
    assert reading.verify(reading.read(path), HELD).faults == ()


def test_the_matrix_is_theirs():
    written = (FOLDER / "matrix.md").read_text(encoding="utf-8")
    assert written == rendering.matrix_markdown([reading.read(path) for path in REPORTS], HELD)


def test_every_report_is_named_on_the_page():
    page = (FOLDER / "reports.md").read_text(encoding="utf-8")
    assert [name(path) for path in REPORTS if f'href="reports/{name(path)}.html"' not in page] == []
