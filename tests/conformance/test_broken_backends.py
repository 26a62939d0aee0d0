"""The suite rejects every backend that is wrong on purpose, and accepts the same backend without a fault."""

import pytest
from linattn_conformance.broken import Honest
from linattn_conformance.broken.in_place import InPlace
from linattn_conformance.broken.trial import every_fault, try_backend

FOUND = {}


@pytest.mark.parametrize("kind", every_fault(), ids=lambda kind: kind.name)
def test_fault_is_rejected(kind):
    trial = try_backend(kind)
    FOUND[kind.name] = trial.reason
    print(f"{kind.name}: caught by {trial.reason}")
    assert trial.rejected
    assert trial.reason


def test_without_a_fault_it_is_accepted():
    trial = try_backend(Honest)
    assert not trial.failed
    assert trial.verdict.conformant, trial.verdict.problems
    assert trial.verdict.claimed == ("chunk_gla", "chunk_kda")


def test_decoding_in_place_without_a_fault_is_accepted():
    trial = try_backend(InPlace, profile="inference")
    assert not trial.failed
    assert trial.verdict.conformant, trial.verdict.problems
    assert trial.verdict.claimed == ("decode_gla",)


def test_hollow_is_rejected_by_its_verdict_alone():
    (hollow,) = [kind for kind in every_fault() if kind.name == "hollow"]
    trial = try_backend(hollow)
    assert not trial.failed
    assert "no operator is claimed: every core case is declared unsupported or was not run" in trial.verdict.problems
    assert set(trial.verdict.counts) == {"declared-unsupported"}
