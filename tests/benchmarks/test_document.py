"""The figures in the documentation are those in the results files."""

from __future__ import annotations

from pathlib import Path

import pytest
from linattn_benchmarks import document, environment

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if document.BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_page_is_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert document.fill(text) == text, f"run: python -m linattn_benchmarks.document docs/{page.relative_to(DOCS)}"


@pytest.mark.parametrize("path", sorted(environment.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_files_are_of_this_schema(path):
    content = environment.read(path)
    assert content["benchmark"] in document.RENDERERS
    assert content["environment"]["linattn"]


def test_fill_is_idempotent(tmp_path):
    results = {"import": {"beyond_numpy_ms": 12.34, "frameworks_loaded": []}, "dispatch_us": {"numpy": 1.234}}
    environment.write(tmp_path / "overhead.json", "overhead", results)
    once = document.fill("<!-- results: overhead.json -->\nold\n<!-- end -->\n", tmp_path)
    assert "| 12.3 ms |" in once
    assert "| 1.23 µs |" in once
    assert "old" not in once
    assert document.fill(once, tmp_path) == once
