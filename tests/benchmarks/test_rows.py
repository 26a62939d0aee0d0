"""Files of results: a row a line."""

from __future__ import annotations

import json

import pytest
from figures import RESULTS
from linattn_benchmarks import rows

ROW = {"operator": "gla", "sizes": {"B": 1, "T": 64}, "ms": {"median": 0.5, "runs": [0.4, 0.5]}, "why": "x" * 100}
WRITTEN = """\
{
 "schema": 1,
 "environment": {"packages": {"numpy": "2.4"}, "load": null},
 "rows": [
  %s,
  %s
 ],
 "of": {
  "a": [
   {"rows": []}
  ]
 }
}
"""


def test_a_row_is_a_line_however_long_and_what_is_short_is_too():
    content = {"schema": 1, "environment": {"packages": {"numpy": "2.4"}, "load": None}, "rows": [ROW, ROW]}
    content |= {"of": {"a": [{"rows": []}]}}
    assert rows.text(content) == WRITTEN % (json.dumps(ROW), json.dumps(ROW))
    assert json.loads(rows.text(content)) == content


@pytest.mark.parametrize("content", [{}, [], 1, "a", [[1, 2], [{}]], {"a": {"b": [[1], [{"c": [2]}]]}}], ids=str)
def test_it_says_what_it_was_given(content):
    assert json.loads(rows.text(content)) == content


def test_what_is_not_finite_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.text({"rows": [{"ms": float("nan")}]})


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_that_are_kept_are_written_so(path):
    text = path.read_text(encoding="utf-8")
    assert rows.text(json.loads(text)) == text
