"""The suite rejects every backend that is wrong on purpose, and accepts the same backend without a fault."""

from pathlib import Path

import pytest
from linattn_conformance.broken.base import Simple
from linattn_conformance.broken.in_place import InPlace
from linattn_conformance.broken.table import caught, fill, what
from linattn_conformance.broken.trial import Trial, every_fault, try_backend
from linattn_conformance.runner import Result

PAGE = Path(__file__).parents[2] / "docs" / "conformance-faults.md"
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")]]
}
"""What the page tells of each fault: name, what is wrong, how many cases catch it, one of them, their checks."""
EXAMPLES = {name: cells[3].strip("`") for name, cells in ROWS.items() if cells[3].startswith("`")}

HOLLOW = [kind for kind in every_fault() if kind.name == "hollow"]
"""What declares everything unsupported, so that no case fails."""


class HonestGla(Simple):
    """No fault, and one family, where ``linattn conformance --backend numpy`` has all."""

    families = ("gla",)


@pytest.mark.parametrize("kind", [kind for kind in every_fault() if kind not in HOLLOW], ids=lambda kind: kind.name)
def test_fault_is_rejected(kind):
    """Likely by the case that the page names, or by one like it: those before it take minutes."""
    example = EXAMPLES.get(kind.name, "")
    trial = try_backend(kind, enough=1, profile="full" if example else "core", first=example)
    print(f"{kind.name}: caught by {trial.reason}")
    assert trial.rejected
    assert trial.reason


def test_without_a_fault_it_is_accepted():
    trial = try_backend(HonestGla, profile="core")
    assert not trial.failed
    assert trial.verdict.conformant, trial.verdict.problems
    assert trial.verdict.claimed == ("chunk_gla",)


def test_decoding_in_place_without_a_fault_is_accepted():
    trial = try_backend(InPlace, profile="inference")
    assert not trial.failed
    assert trial.verdict.conformant, trial.verdict.problems
    assert trial.verdict.claimed == ("decode_gla",)


def test_hollow_is_rejected_by_its_verdict_alone():
    (hollow,) = HOLLOW
    trial = try_backend(hollow, profile="core")
    assert not trial.failed
    assert "no operator is claimed: every core case is declared unsupported or was not run" in trial.verdict.problems
    assert set(trial.verdict.counts) == {"declared-unsupported"}


def test_the_page_has_every_fault():
    """Write it again: python -m linattn_conformance.broken.table docs/conformance-faults.md."""
    wanted = [(f"`{kind.name}`", what(kind).replace("|", "¦")) for kind in every_fault()]
    assert [tuple(row[:2]) for row in ROWS.values()] == wanted


def test_what_the_table_says():
    failed = tuple(Result(f"gla/chunk/{check}", "failed") for check in ("forward", "forward", "nan"))
    assert caught(Trial(failed)) == ("3", "`gla/chunk/forward`", "forward 2, nan 1")
    assert caught(Trial(failed[:1])) == ("**one case**", "`gla/chunk/forward`", "forward 1")
    assert caught(Trial(refused="no\nmore")) == ("the registry", "no", "")
    assert fill("a\n<!-- faults -->\nold\n<!-- end -->\nb", "new\n") == "a\n<!-- faults -->\nnew\n<!-- end -->\nb"
