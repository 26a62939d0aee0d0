"""The suite rejects every backend that is wrong on purpose, and accepts the same backend without a fault."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from linattn_conformance import manifest
from linattn_conformance.broken import table
from linattn_conformance.broken.base import Simple
from linattn_conformance.broken.in_place import InPlace
from linattn_conformance.broken.table import caught, fill, read, row, tried, what
from linattn_conformance.broken.trial import Trial, every_fault, plainness, try_backend
from linattn_conformance.cases import named
from linattn_conformance.runner import Result

PAGE = Path(__file__).parents[2] / "docs" / "conformance-faults.md"
ROWS = read(PAGE.read_text(encoding="utf-8"))
"""What the page tells of each fault. Written again: python -m linattn_conformance.broken.table docs/conformance-faults.md."""

HOLLOW = [kind for kind in every_fault() if kind.name == "hollow"]
"""What declares everything unsupported, so that no case fails."""


class HonestGla(Simple):
    """No fault, and one family, where ``linattn conformance --backend numpy`` has all."""

    families = ("gla",)


@pytest.mark.parametrize("kind", [kind for kind in every_fault() if kind not in HOLLOW], ids=lambda kind: kind.name)
def test_fault_is_rejected(kind):
    """By what the page names."""
    by = ROWS[f"`{kind.name}`"][2]
    trial = tried(kind, by)
    print(f"{kind.name}: caught by {trial.reason}")
    assert trial.rejected
    assert trial.reason
    assert caught(trial)[0] == by


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
    assert [found[:2] for found in ROWS.values()] == [(f"`{kind.name}`", what(kind)) for kind in every_fault()]


def test_every_case_that_the_page_names_is_in_the_manifest():
    named = {by.strip("`") for _, _, by, _ in ROWS.values() if by.startswith("`")}
    assert len(named) > 20
    assert named <= manifest.load().entries.keys()


def test_what_the_table_says():
    kind = SimpleNamespace(name="acme", __doc__="Is wrong.\n\nSo.")
    failed = Result("gla/chunk/forward", "failed", message=f"{'o' * 100}ff\nmore")
    assert row(kind, Trial(failed)) == ("`acme`", "Is wrong.", "`gla/chunk/forward`", f"{'o' * 99}…")
    assert row(kind, Trial(refused="no\nmore")) == ("`acme`", "Is wrong.", "the registry", "no")
    assert fill("a\n<!-- faults -->\nold\n<!-- end -->\nb", "new\n") == "a\n<!-- faults -->\nnew\n<!-- end -->\nb"


class Late(Simple):
    """Has a ``|`` in its name for the dtypes."""

    name = "late"

    def forward(self, op, arrays, options):
        o, state = super().forward(op, arrays, options)
        return o + (arrays["v"].shape[1] > 64), state


def test_the_table_keeps_the_case_that_it_has_while_it_catches(capsys):
    kept = "gla/chunk/fp32/state/T97-K24-V40/forward"
    before = ("`late`", "", f"`{kept}`", "")
    again = read(fill("<!-- faults -->\n<!-- end -->", table.table([Late], {"`late`": before})))
    assert again["`late`"][:3] == ("`late`", what(Late), f"`{kept}`")
    assert again["`late`"][3].startswith("o is off by")
    for gone in ("gla/chunk/fp32/state/T15-K24-V40-C16/forward", "gla/chunk/fp32/no/such/case"):
        plainest = tried(Late, f"`{gone}`").failed.id
        assert plainness(named(plainest)) <= plainness(named(kept))
        assert named(plainest).size["T"] > 64
