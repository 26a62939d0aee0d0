"""What is said of us beside others is what the results files say."""

from __future__ import annotations

import re

from figures import RESULTS, speedups
from linattn_benchmarks import environment

RESULTS_OF_H200 = environment.read(RESULTS / "operators_h200.json")["results"]


def test_the_figure_is_up_to_date():
    assert speedups.FIGURE.read_text(encoding="utf-8") == speedups.svg(RESULTS_OF_H200), "run: python -m figures.speedups"


def test_the_figures_numbers_are_those_of_the_rows():
    """Read again from the JSON, without what made the figure."""
    times: dict[str, dict[str, float]] = {}
    for row in RESULTS_OF_H200["rows"]:
        shown = row["label"], row["case"]["gates"], row["case"]["gate_dtype"], row["what"], row["status"]
        if shown == ("B4 T4096 H16 K128 V128", "model", "float32", "fwdbwd", "ok") and "softmax" not in row["library"]:
            took = (row["graph_ms"] or row["ms"])["median"]
            times.setdefault(row["operator"].removeprefix("chunk_"), {})[row["library"]] = took
    expected = []
    for family, by in times.items():
        ours = by.pop("linattn")
        if by:
            best = min(by, key=by.__getitem__)
            expected.append((family, f"{by[best] / ours:.1f}", best))
    drawn = speedups.FIGURE.read_text(encoding="utf-8")
    found = re.findall(r'"family"[^>]*>(\w+)</text>\n.*\n.*"factor"[^>]*>([\d.]+) × <tspan class="library">([^<]+)<', drawn)
    assert sorted(found) == sorted(expected)
    assert [float(factor) for _, factor, _ in found] == sorted((float(factor) for _, factor, _ in found), reverse=True)


def test_who_is_ahead_of_us_is_who_the_page_names():
    ahead = {(call.family, call.what, call.library) for call in speedups.compared(RESULTS_OF_H200["rows"]) if call.speedup < 1}
    assert ahead == {("kda", "fwd", "cuDNN")}


def row(library: str, ms: float, **changed):
    made = {"operator": "chunk_gla", "label": "B1", "what": "fwd", "status": "ok", "library": library, "graph_ms": None}
    made |= {"case": {"gates": "model", "gate_dtype": "float32"}, "ms": {"median": ms}}
    return made | changed


def test_only_the_same_function_and_right_results_are_compared():
    rows = [row("linattn", 1.0), row("fla", 3.0), row("jla", 9.0, graph_ms={"median": 2.0}), row("softmax (SDPA)", 0.1)]
    rows += [row("cuDNN", 0.5, status="wrong"), row("FlashQLA", 0.5) | {"status": "skipped", "ms": None}]
    rows += [row("linattn", 1.0, what="fwdbwd"), row("fla", 1.0, label="B2"), row("fla", 1.0, what="decode")]
    (call,) = speedups.compared(rows)
    assert (call.ours, call.theirs, call.library, call.speedup) == (1.0, 2.0, "jla", 2.0)


def test_the_readme_tells_the_figures_numbers():
    """To who cannot see it."""
    readme = (speedups.FIGURE.parents[2] / "README.md").read_text(encoding="utf-8")
    told = re.search(r"!\[[^:]*: ([^\]]*)\]\(docs/_static/speedups\.svg\)", readme)[1]
    drawn = re.search(r"<title>(.*)</title>", speedups.FIGURE.read_text(encoding="utf-8"))[1]
    assert told.split(", ") == re.findall(r"(\w+ [\d.]+) times", drawn)
