"""What was found in peers: results that can be read, and reproductions that their authors can run."""

from __future__ import annotations

from pathlib import Path

import pytest
from linattn_conformance import manifest, reading
from linattn_conformance.cases import named
from linattn_conformance.runner import Runner

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "conformance"
TOOLS = ("first_configuration", "in_interpreter", "side_by_side")
PEERS = ("fla", "flash_qla", "jla", "mlx_fast", "mlx_lm")
REPORTS = sorted(path for path in (PAGES / "reports").glob("*.json.gz") if path.name.partition("-")[0] in PEERS)
REPRODUCTIONS = sorted(path for path in (ROOT / "examples" / "peers").glob("*.py") if path.stem not in TOOLS)


@pytest.mark.parametrize("name", ["jla-sizes-h200", "flash_qla-sizes-h200"])
def test_selected_cases_are_of_the_cases_of_the_published_reports(name):
    found = reading.read(PAGES / f"{name}.json.gz")
    assert reading.edits(found) == []
    assert found["manifest"] == manifest.read(PAGES / "reports" / "manifest.json").hash


def test_what_libraries_fail_our_pytorch_path_passes():
    """On the same inputs, against the same bounds: so the fault is not the case's."""
    results = [result for report in REPORTS for result in reading.read(report)["results"]]
    of_any_device = [result for result in results if not result["id"].endswith("/large")]
    failed = {result["id"] for result in of_any_device if result["status"] == "failed"}
    assert len(failed) > 100
    assert [result.id for result in Runner("torch").run(map(named, sorted(failed))) if result.status != "passed"] == []


@pytest.mark.parametrize("path", REPRODUCTIONS, ids=lambda path: path.stem)
def test_a_reproduction_is_short_and_stands_alone(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 12
    assert not any("linattn" in line for line in lines)


@pytest.mark.parametrize("path", REPRODUCTIONS, ids=lambda path: path.stem)
def test_a_reproduction_is_shown_on_the_page_of_its_library(path):
    library = next(name for name in ("fla", "flash_qla", "jla", "mlx") if path.stem.startswith(f"{name}_"))
    assert f"examples/peers/{path.name}" in (PAGES / f"{library}.md").read_text(encoding="utf-8")
