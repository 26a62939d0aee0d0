"""The figures in the documentation are those in the results files."""

from __future__ import annotations

from pathlib import Path

import pytest
from figures import RESULTS, document, first_steps
from linattn_benchmarks import environment, reports

ROOT = Path(__file__).parents[2]
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in WRITTEN if document.BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_is_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert document.fill(text) == text, f"run: python -m figures.document {page.relative_to(ROOT)}"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_results_files_are_of_this_schema(path):
    content = environment.read(path)
    assert content["benchmark"] in document.RENDERERS
    assert content["environment"]["linattn"]


def test_the_first_steps_were_taken_as_the_page_has_them():
    found = environment.read(RESULTS / "first_steps.json")["results"]
    assert [row["command"] for row in found] == first_steps.commands()


def test_looks_for_mistakes_keep_to_their_budget():
    """A hundredth of the calls, the shortest that there are included."""
    found = environment.read(RESULTS / "overhead.json")["results"]["guards"]
    assert {name: cost["share"] for name, cost in found.items() if cost["share"] > 0.01} == {}


def test_every_report_of_tables_can_stand_in_a_page():
    assert set(reports.SECTIONS) <= set(document.RENDERERS)


def test_fill_is_idempotent(tmp_path):
    results = {"import": {"beyond_numpy_ms": 12.34, "frameworks_loaded": []}, "dispatch_us": {"numpy": 1.234}}
    results["guards"] = {"numpy, T = 1": {"look_us": 12.6, "call_us": 1234.5, "share": 0.00021}}
    environment.write(tmp_path / "overhead.json", "overhead", results)
    once = document.fill("<!-- results: overhead.json -->\nold\n<!-- end -->\n", tmp_path)
    assert "| 12.3 ms |" in once
    assert "| 1.23 µs |" in once
    assert "| 13 µs beside 1,234 µs of the call; 0.021% of the first 1,024 |" in once
    assert "old" not in once
    assert document.fill(once, tmp_path) == once


def rows_of_two():
    row = {"operator": "chunk_gla", "label": "B1 T8", "case": {"dtype": "bfloat16", "gate_dtype": "float32", "gates": "model"}}
    row |= {"status": "ok", "ms": {"median": 0.5}, "graph_ms": None, "library": "linattn", "backend": "triton", "ran": None}
    row |= {"floor": {"ms": 0.125}, "peak_bytes": 3 << 20, "first_call_s": 1.25, "what": "fwd"}
    both = row | {"what": "fwdbwd", "ms": {"median": 2.0}, "graph_ms": {"median": 1.5}, "floor": {"ms": 0.25}}
    fla = both | {
        "library": "fla",
        "backend": None,
        "status": "wrong",
        "ms": {"median": 1.0},
        "graph_ms": None,
        "first_call_s": None,
    }
    plain = both | {"operator": "chunk_linear_attn", "status": "failed", "ms": None, "graph_ms": None, "peak_bytes": None}
    ceilings = {"name": "chip", "device": "cuda", "copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e12}
    ceilings |= {"matmul_dtype": "bfloat16", "threads": None, "load": None}
    narrow = both | {"case": row["case"] | {"gate_dtype": "bfloat16"}, "ms": {"median": 0.75}, "graph_ms": None}
    return {"ceilings": ceilings, "rows": [row, both, fla, plain, narrow, row | {"label": "B1 T16"}]}


def test_libraries_stand_side_by_side():
    """A graph's time where there is one; what was not called has a dash, and an operator without a gate no kind of gates."""
    lines = document.side_by_side(rows_of_two()).replace("\u00a0", " ").splitlines()
    said = (
        "Operands in bfloat16, gates in float32 unless said; ms, forward / with backward, of graph replays where a call can be"
    )
    assert f". {said} recorded." in lines[0]
    assert lines[2:] == [
        "B1 T8:",
        "",
        "| operator | gates | floors | linattn:triton | fla |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| `chunk_gla` | model | 0.125 / 0.25 | 0.5 / 1.5 | – / 1 (wrong) |",
        "| `chunk_linear_attn` |  | – / 0.25 | – / failed | – / – |",
        "| `chunk_gla` | model, bfloat16 | – / 0.25 | – / 0.75 | – / – |",
        "",
        "B1 T16:",
        "",
        "| operator | gates | floors | linattn:triton |",
        "| --- | ---: | ---: | ---: |",
        "| `chunk_gla` | model | 0.125 / – | 0.5 / – |",
    ]


def test_memory_and_first_calls_stand_side_by_side():
    assert document.memory(rows_of_two()).replace("\u00a0", " ").splitlines() == [
        "B1 T8:",
        "",
        "| operator | gates | linattn:triton | fla |",
        "| --- | ---: | ---: | ---: |",
        "| `chunk_gla` | model | 3.0 MiB, 1.2 s | 3.0 MiB |",
        "| `chunk_gla` | model, bfloat16 | 3.0 MiB, 1.2 s | – |",
    ]
