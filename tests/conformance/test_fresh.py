"""Fresh cases: drawn from a seed that their ids tell."""

from collections import Counter

import pytest
from linattn_conformance import fresh
from linattn_conformance.cases import every_case, named


@pytest.fixture(scope="module")
def core():
    return fresh.fresh_cases(7, "core")


def test_the_same_seed_draws_the_same_cases_and_no_other_does(core):
    assert fresh.fresh_cases(7, "core") == core
    ids, others = {case.id for case in core}, {case.id for case in fresh.fresh_cases(8, "core")}
    assert len(ids) == len(core)
    assert not ids & others
    assert not ids & {case.id for case in every_case()}


def test_each_row_comes_in_one_form_and_each_operator_has_some(core):
    rows = Counter((case.op, case.form == "decode", case.dtype, case.flags, case.sizes) for case in core)
    assert set(rows.values()) == {1}
    listed = {case.operator for case in every_case() if case.within == "core" and case.check == "forward"}
    assert {case.operator for case in core} == listed
    assert not any(case.needs_gradient for case in core)


def test_an_id_tells_its_seed(core):
    assert {fresh.seed_of(case.id) for case in core} == {7}
    assert not any(fresh.is_fresh(case.id) for case in every_case())
    for case in core[::40]:
        found = named(case.id)
        assert (found.flags, found.sizes, found.dtype) == (case.flags, case.sizes, case.dtype)


def test_a_failure_of_a_fresh_case_counts(core):
    name = core[0].id
    results = [{"id": name, "status": status, "message": "off"} for status in ("failed", "passed", "not-run")]
    old = {"id": "gla/chunk/fp32/plain/T65-K24-V40/forward", "status": "failed", "message": ""}
    assert fresh.problems([*results, old]) == [f"{name}: failed: off", f"{name}: not-run: off"]


def test_what_no_run_draws(core):
    ids = [case.id for case in core[:5]]
    assert fresh.strangers(ids, "core") == []
    assert fresh.strangers([], "core") == []
    other = "gla/chunk/fp32/plain-seed.7/T1-K1-V1/forward"
    assert fresh.strangers([*ids, other], "core") == [other]
    assert fresh.strangers([*ids, other.replace("7", "9")], "core") == [*ids, other.replace("7", "9")]


@pytest.mark.parametrize("seed", [-1, 0, 10**6])
def test_seeds_are_short(seed):
    with pytest.raises(ValueError, match=f"--seed {seed}: expected a number from 1 to 999999"):
        fresh.fresh_cases(seed)


def test_seeds_are_drawn():
    assert len({fresh.draw_seed() for _ in range(5)}) > 1
