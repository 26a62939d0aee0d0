"""The verdict is a function of report and manifest, and everything in it can fail."""

import copy
import datetime
import inspect
import json

import linattn
import numpy as np
import pytest
from linattn.plugin import Backend, Unsupported
from linattn.registry import check_contract, registry
from linattn_conformance import calls, known_failures, manifest, report
from linattn_conformance.broken import Honest
from linattn_conformance.broken.base import Simple
from linattn_conformance.calls import Failure, outputs_of
from linattn_conformance.capabilities import covered
from linattn_conformance.cases import every_case, generate, named, neighbours
from linattn_conformance.known_failures import KnownFailure, KnownFailuresError
from linattn_conformance.manifest import Entry, Manifest
from linattn_conformance.memory import GIB, resident
from linattn_conformance.runner import Result, Runner
from linattn_conformance.verdict import PROFILES, verdict

ENTRIES = {
    "gla/chunk/a/forward": Entry("chunk_gla", False, True, (), 0),
    "gla/chunk/a/gradient": Entry("chunk_gla", True, True, (), 0),
    "gla/chunk/b/forward": Entry("chunk_gla", False, False, (), 0),
    "kda/chunk/a/forward": Entry("chunk_kda", False, True, (), 0),
    "kda/chunk/a/gradient": Entry("chunk_kda", True, True, (), 0),
    "gla/chunk/a/compile": Entry("chunk_gla", False, False, ("torch",), 0),
    "gla/chunk/a/large": Entry("chunk_gla", False, False, (), 60, device=True),
}
HELD = Manifest("1.0.0", "1.0.0", "content", ENTRIES)


def made(profile="full", changes=None, missing=(), **other):
    ids = [name for name in ENTRIES if not name.endswith(("compile", "large")) and name not in missing]
    results = [
        {"id": name, "status": (changes or {}).get(name, "passed"), "error": 0.1, "seconds": 0.0, "message": ""} for name in ids
    ]
    base = {"profile": profile, "framework": "numpy", "device": "cpu", "memory": 0.0, "tighten": 1.0}
    return base | {"manifest": HELD.hash, "complaints": [], "results": results} | other


def declared(*patterns):
    return {name: "declared-unsupported" for name in ENTRIES if name.startswith(patterns)}


@pytest.mark.parametrize("profile", PROFILES)
def test_all_passed_is_conformant(profile):
    judged = verdict(made(profile), HELD)
    assert judged.conformant
    assert str(judged).startswith(f"conformant: {profile} (")
    assert judged.claimed == ("chunk_gla", "chunk_kda")


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("status", ["failed", "not-run", "excused"])
def test_one_case_that_did_not_pass_is_enough(profile, status):
    assert not verdict(made(profile, {"gla/chunk/a/forward": status}), HELD).conformant


@pytest.mark.parametrize("profile", PROFILES)
def test_a_missing_case_counts_as_failed(profile):
    judged = verdict(made(profile, missing=["gla/chunk/a/forward"]), HELD)
    assert judged.problems == ("gla/chunk/a/forward: not-run",)


def test_cases_for_other_frameworks_and_devices_are_not_wanted():
    assert "gla/chunk/a/compile: not-run" in verdict(made(framework="torch"), HELD).problems
    assert "gla/chunk/a/large: not-run" in verdict(made(device="cuda:0", memory=80.0), HELD).problems
    assert verdict(made(device="cuda:0", memory=16.0), HELD).conformant


@pytest.mark.parametrize(
    ("profile", "changes", "conformant"),
    [
        ("full", declared("gla/chunk/b"), False),
        ("training", declared("gla/chunk/b"), True),
        ("training", declared("kda/"), True),
        ("full", declared("kda/"), False),
        ("core", declared("gla/", "kda/"), False),
        ("training", declared("gla/", "kda/"), False),
        ("training", declared("gla/chunk/a/gradient"), False),
        ("inference", declared("gla/chunk/a/gradient"), True),
        ("inference", declared("gla/chunk/a/forward"), False),
        ("core", declared("gla/chunk/a/forward"), False),
        ("core", declared("gla/"), True),
    ],
)
def test_what_may_be_declared_unsupported(profile, changes, conformant):
    # in profile core an operator without its one core case is not claimed at all
    if profile == "core" and set(changes) == {"gla/chunk/a/forward"}:
        conformant = True
    assert verdict(made(profile, changes), HELD).conformant is conformant


def test_an_operator_that_is_not_claimed_has_no_case_that_passes():
    judged = verdict(made("inference", declared("gla/chunk/a")), HELD)
    assert judged.problems == ("gla/chunk/b/forward: passed, though all core cases of chunk_gla are declared unsupported",)


def test_known_failures_are_no_conformance():
    judged = verdict(made(changes={"gla/chunk/b/forward": "known-failure"}), HELD)
    assert str(judged) == "conformant except known failures: full (5 of 5 run)"
    assert not judged.conformant


@pytest.mark.parametrize(
    "change",
    [{"manifest": "other"}, {"complaints": ["known failure 'x' matches no case"]}, {"tighten": 2.0}],
    ids=lambda change: next(iter(change)),
)
def test_a_report_that_is_not_in_order(change):
    assert not verdict(made(**change), HELD).conformant


def test_a_case_cannot_be_reported_twice():
    twice = made(changes={"gla/chunk/a/forward": "failed"})
    twice["results"].append({**twice["results"][0], "status": "passed"})
    assert "the report has more than one result for a case" in verdict(twice, HELD).problems


def test_verdict_changes_nothing():
    given = made()
    before = copy.deepcopy(given)
    verdict(given, HELD)
    assert given == before


def test_unknown_profile():
    with pytest.raises(ValueError, match="unknown profile 'most': known are core, inference, training, full"):
        verdict(made("most"), HELD)


# -- manifest --------------------------------------------------------------------------------------------------------


def test_the_manifest_is_that_of_the_cases():
    made = neighbours(generate())
    wanted = manifest.from_cases(made)
    assert manifest.load() == wanted, "write it again: python -m linattn_conformance.manifest"
    assert manifest.manifest_path().read_text(encoding="utf-8") == wanted.text()
    assert set(every_case()) == set(made)


def test_a_case_that_changes_shows_in_the_manifest():
    from dataclasses import replace

    first, *others = every_case()
    changed = manifest.from_cases((replace(first, sizes=(("T", 3),)), *others))
    assert changed.content != manifest.load().content
    assert changed.hash != manifest.load().hash
    assert manifest.from_cases(tuple(others)).hash != manifest.load().hash


def test_ids_are_unique_and_readable():
    ids = [case.id for case in every_case()]
    assert len(set(ids)) == len(ids)
    assert "gla/chunk/fp32/gv-grouped-state-varlen/T65-K24-V40/gradient" in ids
    assert all(" " not in name and name.count("/") in (4, 5) for name in ids)


# -- known failures --------------------------------------------------------------------------------------------------

TODAY = datetime.date(2026, 6, 1)
LATER = datetime.date(2026, 7, 1)


def results():
    return [Result("gla/a", "failed", message="off"), Result("gla/b", "passed"), Result("kda/a", "failed")]


def test_a_known_failure_is_marked():
    found, complaints = known_failures.apply(results(), [KnownFailure("gla/a", "layout", "url", LATER)], TODAY)
    assert not complaints
    assert [result.status for result in found] == ["known-failure", "passed", "failed"]
    assert found[0].message == "layout (url, until 2026-07-01): off"


def test_a_case_that_was_not_run_may_still_fail():
    before = [Result("gla/a", "failed"), Result("gla/b", "not-run", message="not tried: the 5 s of the run were over")]
    found, complaints = known_failures.apply(before, [KnownFailure("gla/*", "layout", "url", LATER)], TODAY)
    assert not complaints
    assert [result.status for result in found] == ["known-failure", "not-run"]
    assert found[1] == before[1]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        (KnownFailure("gla/b", "r", "url", LATER), "known failure 'gla/b' does not fail: gla/b (1 in all)"),
        (KnownFailure("gla/*", "r", "url", LATER), "known failure 'gla/*' does not fail: gla/b (1 in all)"),
        (KnownFailure("dplr/*", "r", "url", LATER), "known failure 'dplr/*' matches no case"),
        (KnownFailure("gla/a", "r", "url", TODAY), "known failure 'gla/a' expired on 2026-06-01: url"),
    ],
)
def test_a_list_that_is_not_true_any_more(entry, complaint):
    found, complaints = known_failures.apply(results(), [entry], TODAY)
    assert complaints == [complaint]
    assert found == results()


def test_reading_known_failures(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text('[[known-failure]]\npattern = "gla/*"\nreason = "r"\nlink = "u"\nexpires = 2026-07-01\n')
    assert known_failures.load(path) == [KnownFailure("gla/*", "r", "u", LATER)]
    path = tmp_path / "known.json"
    path.write_text(json.dumps({"known-failure": [{"pattern": "gla/*", "reason": "r", "link": "u", "expires": "2026-07-01"}]}))
    assert known_failures.load(path) == [KnownFailure("gla/*", "r", "u", LATER)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"reason": " "}, "known.json, known failure 1: reason must be a text that is not empty"),
        ({"expires": "soon"}, "known.json, known failure 1: expires must be a date such as 2026-12-31, got 'soon'"),
        ({"expires": 2026}, "known.json, known failure 1: expires must be a date such as 2026-12-31, got 2026"),
        ({"because": "x"}, "known.json, known failure 1: must have exactly pattern, reason, link, expires, got "),
    ],
)
def test_a_list_that_is_wrong(tmp_path, change, complaint):
    entry = {"pattern": "gla/*", "reason": "r", "link": "u", "expires": "2026-07-01"} | change
    path = tmp_path / "known.json"
    path.write_text(json.dumps({"known-failure": [entry]}))
    with pytest.raises(KnownFailuresError) as caught:
        known_failures.load(path)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "expected a TOML or JSON file: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "must hold a list called known-failure, and nothing else"),
        ('{"known_failure": []}', "must hold a list called known-failure, and nothing else"),
        ('{"known-failure": {}}', "must hold a list called known-failure, and nothing else"),
    ],
)
def test_a_file_that_holds_no_list(tmp_path, text, complaint):
    path = tmp_path / "known.json"
    path.write_text(text)
    with pytest.raises(KnownFailuresError) as caught:
        known_failures.load(path)
    assert str(caught.value) == f"--known-failures {path}: {complaint}"


def test_an_entry_that_is_none(tmp_path):
    path = tmp_path / "known.json"
    path.write_text('{"known-failure": ["gla/*"]}')
    with pytest.raises(KnownFailuresError, match="known failure 1: must have pattern, reason, link, expires, got 'gla/"):
        known_failures.load(path)


# -- the runner ------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    names = set()

    def register(kind):
        linattn.register_backend(kind(), replace=True)
        names.add(kind.name)
        return Runner(kind.name)

    yield register
    for name in names:
        linattn.unregister_backend(name)


def case(name):
    (found,) = [case for case in every_case() if case.id == name]
    return found


SMALL = "gla/chunk/fp32/state/T15-K24-V40-C16/forward"
SMALL_GRADIENT = "gla/chunk/fp32/state/T15-K24-V40-C16/gradient"


def one(runner, name=SMALL):
    (result,) = runner.run([case(name)])
    return result


def test_passed_with_its_error(registered):
    result = one(registered(Honest))
    assert (result.status, result.message) == ("passed", "")
    assert 0 < result.error < 1


def test_declared_unsupported_with_its_reason(registered):
    class Small(Simple):
        name = "small"

        def supports(self, call):
            return Unsupported("T must be 1") if call.T != 1 else None

    result = one(registered(Small))
    assert (result.status, result.message) == ("declared-unsupported", "T must be 1")
    assert one(registered(Small), "gla/parallel/fp32/state/T65-K24-V40/forward").message == "has no parallel_gla"


def test_declared_unsupported_but_not_before_writing_to_the_inputs(registered):
    class Scribbles(Simple):
        name = "scribbles"

        def supports(self, call):
            frame = inspect.currentframe()
            while "leaves" not in frame.f_locals:
                frame = frame.f_back
            frame.f_locals["leaves"][2][:] = 0.0
            return Unsupported("not today")

    result = one(registered(Scribbles))
    assert (result.status, result.message) == ("failed", "v was written to")


def test_why_a_compiler_fails_is_part_of_the_message(registered):
    class Compiled(Simple):
        name = "compiled"

        def forward(self, op, arrays, options):
            try:
                raise TypeError("pointers of two dtypes")
            except TypeError as reason:
                error = RuntimeError("at 17:16:\n" + "line after line\n" * 1000)
                error.add_note("kernel prepare of dplr failed")
                raise error from reason

    message = one(registered(Compiled)).message
    assert message.startswith("RuntimeError: at 17:16:\nline after line\n")
    assert message.endswith("line after line\n\nkernel prepare of dplr failed\ncaused by TypeError: pointers of two dtypes")
    assert len(message) < 4100


def test_forward_only(registered):
    class ForwardOnly(Simple):
        name = "forward-only"
        differentiable = False

    runner = registered(ForwardOnly)
    assert one(runner).status == "passed"
    result = one(runner, SMALL_GRADIENT)
    assert (result.status, result.message) == ("declared-unsupported", "is forward-only, and a gradient is asked for")


def test_no_gradients_and_not_saying_so(registered):
    class Silent(Backend):
        name = "silent"
        api = ">=1,<2"
        frameworks = ("numpy",)
        chunk_gla = vars(Honest)["chunk_gla"]
        run, forward = Simple.run, Simple.forward

    runner = registered(Silent)
    assert one(runner).status == "passed"
    result = one(runner, SMALL_GRADIENT)
    assert (result.status, result.message) == ("failed", "has no vjp method and does not say differentiable = False")


def test_lowered_calls_are_the_backends_own(registered):
    assert one(registered(Honest), "simple_gla/chunk/fp32/state/T15-K24-V40-C16/forward").status == "passed"


def test_an_exception_in_the_kernel_is_a_failure(registered):
    class Raises(Simple):
        name = "raises"

        def forward(self, op, arrays, options):
            raise RuntimeError("out of registers")

    result = one(registered(Raises))
    assert (result.status, result.message) == ("failed", "RuntimeError: out of registers")


def test_bounds_may_be_tightened_and_never_widened(registered):
    registered(Honest)
    loose, tight = one(Runner("honest")), one(Runner("honest", tighten=0.5))
    assert tight.error == pytest.approx(2 * loose.error)
    assert one(Runner("honest", tighten=1e-3)).status == "failed"
    for factor in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="bounds may be tightened, never widened"):
            Runner("honest", tighten=factor)


@pytest.mark.parametrize("name", [
    "gla/chunk/bf16/reset/T262181-K64-V128-B1-H65/large", "gla/chunk/fp16/far-state/T33-K24-V40/forward",
    "gla/chunk/fp32/state/T65-K24-V40/gradient",
])  # fmt: skip
def test_what_is_declared_needs_no_truth_and_no_memory(name, registered, monkeypatch):
    """The backend is asked about arrays of 12 GiB that are never made."""
    pytest.importorskip("torch")
    from linattn_backends.torch import TorchBackend

    class Declares(TorchBackend):
        name = "declares"

        def supports(self, call):
            return Unsupported(f"takes no {call.dtype} of {call.T} tokens")

    runner = registered(Declares)
    monkeypatch.setattr(calls, "truth_of", None)
    monkeypatch.setattr(type(runner.adapter), "far", None)
    before = resident()
    with runner.watching():
        result = runner.run_one(case(name))
    assert (result.status, case(name).dtype in result.message) == ("declared-unsupported", True)
    assert resident() - before < GIB


def test_the_witness_leaves_no_trace(registered):
    from linattn.ops._family import OPERATORS

    before = dict(vars(Honest)), OPERATORS["chunk_gla"].__globals__["target"]
    one(registered(Honest))
    assert (dict(vars(Honest)), OPERATORS["chunk_gla"].__globals__["target"]) == before


def test_the_witness_sees_a_method_that_never_ran(registered):
    runner = registered(Honest)
    with runner.watching():
        runner.witness.reset()
        assert runner.witness.complaint() == "no method of backend 'honest' ran"


def test_backends_keep_their_contract_while_they_are_watched(registered):
    """One that is loaded by another one's call among them; static methods have signatures too."""
    runner = registered(Honest)
    with runner.watching():
        runner.witness.watching = True
        check_contract(registry.load("numpy"))


# -- the report ------------------------------------------------------------------------------------------------------


def test_report(registered, tmp_path):
    runner = registered(Honest)
    held = manifest.load()
    results = list(runner.run([case(SMALL)]))
    written = report.make(runner.subject, held, "core", results, [], 1.25)
    judged = verdict(written, held)
    report.write(tmp_path / "report.json", written, judged)
    read = json.loads((tmp_path / "report.json").read_text())
    assert set(read) == {
        "schema", "suite", "api", "backend", "framework", "device", "memory", "versions", "platform", "environment", "profile",
        "tighten", "manifest", "results", "results_hash", "complaints", "seconds", "verdict", "hash", "selection", "seeds",
        "digests", "packages", "toolchain", "variables", "began", "ended", "workers", "log", "history",
    }  # fmt: skip
    assert read["schema"] == 3
    assert read["backend"] == {
        "name": "honest",
        "distribution": "",
        "version": "",
        "class": "linattn_conformance.broken.on_numpy.Honest",
    }
    assert set(read["results"][0]) == {"id", "status", "error", "seconds", "message"}
    assert read["results_hash"] == report.results_hash(read["results"])
    assert read["hash"] == report.report_hash(read)
    assert read["verdict"]["outcome"] == "not conformant"
    assert verdict(read, held) == judged


def test_the_hash_tells_results_apart():
    one, two = ({"id": "a", "status": status, "error": None, "seconds": 0.0, "message": ""} for status in ("passed", "failed"))
    assert report.results_hash([one]) != report.results_hash([two])


ASKED = {
    "gla/chunk/fp32/fp64.g/T3/forward": "declared-unsupported",
    "gla/chunk/fp32/plain/T3/forward": "passed",
    "gla/chunk/fp32/plain/T4/forward": "declared-unsupported",
    "gla/chunk/fp64/plain/T3/forward": "declared-unsupported",
}


def test_a_backend_without_float64_is_held_to_the_other_cases():
    assert covered("core", "chunk_gla", ASKED) == ""
    fewer = {**ASKED, "gla/chunk/fp32/plain/T5/forward": "declared-unsupported"}
    told = "chunk_gla: takes 1 of its 3 cases that are not float64, and profile core wants 50% of a claimed operator's"
    assert covered("core", "chunk_gla", fewer) == told


def test_a_backend_with_float64_is_held_to_all():
    taken = {**ASKED, "gla/chunk/fp64/plain/T4/forward": "passed", "gla/chunk/fp64/plain/T5/forward": "declared-unsupported"}
    told = "chunk_gla: takes 2 of its 6 cases, and profile core wants 50% of a claimed operator's"
    assert covered("core", "chunk_gla", taken) == told


@pytest.mark.parametrize("found", [np.zeros((2, 3)), (np.zeros(2),) * 3])
def test_what_is_no_output_and_state_is_said(found):
    case = named("gla/chunk/fp32/plain/T65-K24-V40/forward")
    with pytest.raises(Failure) as caught:
        outputs_of(case, found)
    assert str(caught.value) == f"(o, final_state) is expected, and a {type(found).__name__} is returned"
