"""Faults that nobody chose: how they are made, and which share of a fresh lot the suite catches."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import linattn
import numpy as np
import pytest
from linattn.registry import registry
from linattn.spec import spec_of
from linattn_conformance import calls, manifest
from linattn_conformance.cases import every_case, named
from linattn_conformance.mutants import cli, trial
from linattn_conformance.mutants.backend import Fault, carrier, draw_fault
from linattn_conformance.mutants.cli import conformance_mutants
from linattn_conformance.mutants.conditions import Atom, Condition
from linattn_conformance.mutants.drafts import draw_draft, meeting
from linattn_conformance.mutants.effects import Effect, Region
from linattn_conformance.mutants.frameworks import ARRAYS
from linattn_conformance.mutants.visible import show
from linattn_conformance.runner import Runner
from typer import Typer
from typer.testing import CliRunner

OFF = Effect("returns", "o", ("B", "T", "HV", "V"), Region(), "scaled by", 1.5)

runner = CliRunner()
app = Typer()
app.command()(conformance_mutants)


@pytest.fixture
def mutant():
    found = carrier(registry.load("numpy"))
    registry.register(found, replace=True)
    yield found
    registry.unregister("mutant")


def fault(effect, *atoms, op="gla", form="chunk"):
    return Fault(Condition(op, form, atoms), effect, ARRAYS["numpy"]())


def call(T=8, **more):
    x = np.random.default_rng(0).standard_normal((1, T, 2, 4)).astype(np.float32)
    return linattn.chunk_gla(x, x, x, -abs(x), output_final_state=True, backend="mutant", **more)


def test_a_carrier_without_a_fault_is_right(mutant):
    x = np.random.default_rng(0).standard_normal((1, 8, 2, 4)).astype(np.float32)
    for found, want in zip(call(), linattn.chunk_gla(x, x, x, -abs(x), output_final_state=True), strict=True):
        np.testing.assert_array_equal(found, want)


def test_an_effect_strikes_in_its_region_where_its_condition_holds(mutant):
    right, _ = call()
    region = Region((("T", "from", 6), ("HV", "at", -1)))
    mutant.fault = fault(Effect("returns", "o", ("B", "T", "HV", "V"), region, "dropped"), Atom("size T", "above", 7))
    found, _ = call()
    changed = found != right
    assert changed[:, 6:, 1].all()
    assert not found[:, 6:, 1].any()
    assert changed.sum() == changed[:, 6:, 1].size
    mutant.fault = fault(Effect("returns", "o", ("B", "T", "HV", "V"), region, "dropped"), Atom("size T", "above", 8))
    np.testing.assert_array_equal(call()[0], right)
    assert mutant.fault.struck == 0


def test_history_is_a_condition(mutant):
    mutant.fault = fault(Effect("raises"), Atom("calls alike", "above", 2))
    call()
    call(9)
    call()
    with pytest.raises(RuntimeError, match="no kernel was compiled"):
        call()


def test_an_alias_overwrites_what_an_earlier_call_returned(mutant):
    mutant.fault = fault(Effect("alias"))
    held, _ = call()
    was = held.copy()
    call(scale=3.0)
    assert (held != was).any()


@pytest.mark.parametrize(
    ("effect", "atom", "message"),
    [
        (Effect("alias"), Atom("layout k", "is", "strided"), "o is written to by the next call"),
        (Effect("alias"), Atom("around thread", "is", True), "o is written to by the next call"),
        (Effect("alias"), Atom("calls alike", "above", 8), "o is written to by the next call"),
        (Effect("stale"), Atom("layout k", "is", "strided"), "o of a later call is off by"),
        (OFF, Atom("around thread", "is", True), "o of a later call is off by"),
        (OFF, Atom("calls alike", "above", 8), "o of a later call is off by"),
    ],
)
def test_a_case_of_values_sees_what_comes_later(mutant, effect, atom, message):
    """In whatever call: nothing else of this case has to do with time."""
    mutant.fault = fault(effect, atom)
    (result,) = Runner("mutant").run([named("gla/chunk/fp32/strided/T8-K4-V4-B1-H2/forward")])
    assert result.status == "failed"
    assert result.message.startswith(message)


@pytest.mark.parametrize(("name", "calls"), [("bias/T6-D4-W3-B1", 8), ("activation.silu-bias-state/T97-D40-W4", 2)])
def test_outputs_that_are_not_odd_are_looked_at_later_too(mutant, name, calls):
    case = named(f"short_conv/direct/fp32/{name}/forward")
    assert [result.status for result in Runner("mutant").run([case])] == ["passed"]
    off = Effect("returns", "o", ("B", "T", "D"), Region(), "scaled by", 1.5)
    later, written = "o of a later call is off by", "o is written to by the next call"
    for effect, after, message in ((off, calls, later), (Effect("alias"), calls - 1, written)):
        mutant.fault = fault(effect, Atom("calls alike", "above", after), op="short_conv", form="direct")
        (result,) = Runner("mutant").run([case])
        assert result.status == "failed"
        assert result.message.startswith(message)


def test_a_fault_shows_on_a_call_that_can_be_run_as_it_is_printed(mutant):
    drawn = fault(Effect("reads", "k", ("B", "T", "H", "K"), Region(), "scaled by", 0.5), Atom("size K", "is", 32))
    shown = show(drawn, registry.load("numpy"), mutant, np.random.default_rng(0), 256)
    mutant.fault = None
    assert shown.wrong in ("o is wrong", "state is wrong")
    source = shown.draft.text(ARRAYS["numpy"](), "numpy")
    *lines, last = [line for line in source.splitlines() if not line.startswith("#")]
    exec("\n".join([*lines, f"found = {last}"]), names := {"np": np, "linattn": linattn})
    assert names["k"].shape[-1] == 32
    assert np.isfinite(names["found"][0]).all()


def test_a_fault_that_nothing_shows_does_not_count(mutant):
    harmless = fault(Effect("reads", "k", ("B", "T", "H", "K"), Region(), "scaled by", 1.0))
    assert show(harmless, registry.load("numpy"), mutant, np.random.default_rng(0), 64) is None


def test_calls_meet_the_conditions_that_are_drawn():
    rng, xp, right = np.random.default_rng(3), ARRAYS["numpy"](), registry.load("numpy")
    drawn = [draw_fault(rng, right, xp, 512) for _ in range(200)]
    assert len({str(found.effect) for found in drawn}) > 150
    assert {found.effect.kind for found in drawn} >= {"reads", "returns", "gradient", "option", "writes", "stale", "alias"}
    sizes = [found for found in drawn if found.condition.atoms and found.condition.atoms[0].fact.startswith("size T")]
    for found in sizes:
        condition = Condition(found.condition.op, found.condition.form, found.condition.atoms[:1])
        spec = spec_of(condition.op, condition.form or None)
        draft = meeting(draw_draft(rng, spec, (condition.form or "chunk",), xp, 512), condition, rng, 512)
        assert condition.holds({"size T": draft.sizes["T"]}.get), found


@pytest.fixture(scope="class")
def recorded():
    """What one case of each operator calls, where recording all of the core takes as long as running it."""
    every_case()  # which is kept, for all tests
    whole = manifest.load()
    kept = {name: entry for name, entry in whole.entries.items() if name.endswith("/fp32/plain/T65-K24-V40/forward")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "load", lambda: replace(whole, entries=kept))
        patch.setattr(trial, "fresh_cases", lambda seed, profile: ())
        with cli.bench("numpy", "core", 1) as made:
            yield made


@pytest.fixture
def lot(recorded, monkeypatch):
    """The command and options of its own, on a lot that is drawn from a seed."""
    monkeypatch.setattr(cli, "bench", lambda backend, profile, seed, track: nullcontext(recorded))
    return lambda *words: runner.invoke(app, ["--count", "4", "--tokens", "32", "--seed", "5", *words])


class TestLots:
    """Of a few faults on a few cases: continuous integration has the core catch its share of a large and fresh one."""

    def test_it_tells_what_was_caught_and_what_was_missed(self, lot):
        done = lot()
        assert done.exit_code == 0
        caught, missed = (re.findall(rf"^{word}", done.stdout, re.MULTILINE) for word in ("caught by core ", "MISSED "))
        assert caught
        assert missed
        assert re.search(
            r"^seed 5: 4 faults of the numpy backend that show on a call of at most 32 tokens", done.stdout, re.MULTILINE
        )
        assert f"core        {25 * len(caught):5.1f} %  {len(caught)} of 4; the target is 85 %" in done.stdout
        assert len(re.findall(r"^missed: ", done.stdout, re.MULTILINE)) == len(missed) == 4 - len(caught)

    def test_a_seed_gives_the_same_faults_again(self, lot):
        first, second = (re.sub(r"in \d+ s", "", lot().stdout) for _ in range(2))
        assert first == second

    def test_a_family_is_recorded_once_and_dropped_for_the_next(self, lot, recorded, monkeypatch):
        """What a profile calls in all families would fill the memory."""
        begun = []
        monkeypatch.setattr(recorded, "traces", {})
        monkeypatch.setattr(recorded, "track", lambda cases: [begun.extend({case.op for case in cases}), *cases][1:])
        done = lot("--count", "8")
        assert done.exit_code == 0
        assert len(begun) == len(set(begun)) > 1
        assert len(recorded.traces) == 1

    def test_a_share_that_is_too_small_fails(self, lot):
        done = lot("--least", "99.5")
        share = re.search(r"core +(\d+\.\d) %", done.stdout)[1]
        assert done.exit_code == 1
        assert done.stdout.endswith(f"expected at least 99.5 % caught, got {share} %: --seed 5 draws the same faults again\n")


def test_a_log_says_how_far_a_recording_is(monkeypatch, capsys):
    monkeypatch.setattr(cli, "EVERY", 0.0)
    assert list(cli.tracked(["a", "b"])) == ["a", "b"]
    assert capsys.readouterr().err == "recording: 0 of 2 cases\nrecording: 1 of 2 cases\n"


def test_truths_are_kept_while_there_is_room(monkeypatch):
    monkeypatch.setattr(calls, "_kept", {})
    monkeypatch.setattr(calls, "MOST_KEPT", 3)
    for n in range(5):
        calls.kept((n,), int)
    assert list(calls._kept) == [(2,), (3,), (4,)]
    monkeypatch.setattr(calls, "ROOM", 0)
    calls.kept((5,), int)
    monkeypatch.setattr(calls, "MOST_KEPT", 10)
    calls.kept((6,), int)
    assert list(calls._kept) == [(5,), (6,)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "most"], "unknown profile 'most': known are core, inference, training, full"),
        (["--count", "0"], "--count 0: expected a number above 0"),
        (["--backend", "mlx"], "faults are made for numpy, torch, jax, and 'mlx' takes mlx arrays"),
    ],
)
def test_wrong_options(words, message):
    done = runner.invoke(app, words)
    assert done.exit_code == 2
    assert message in re.sub(r"[│\s]+", " ", done.output)


def test_gradients_that_come_in_are_a_condition():
    torch = pytest.importorskip("torch")
    found = carrier(registry.load("torch"))
    effect = Effect("gradient", "q", ("B", "T", "H", "K"), Region(), "dropped")
    found.fault = Fault(Condition("gla", "chunk", (Atom("cotangent state", "is", "none"),)), effect, ARRAYS["torch"]())
    registry.register(found, replace=True)
    try:
        x = torch.randn(1, 8, 2, 4)
        for outputs, dropped in ((lambda o, state: o.sum(), True), (lambda o, state: o.sum() + state.sum(), False)):
            q = x.clone().requires_grad_()
            outputs(*linattn.chunk_gla(q, x, x, -abs(x), output_final_state=True, backend="mutant")).backward()
            assert bool((q.grad == 0).all()) is dropped
    finally:
        registry.unregister("mutant")


def test_decoding_has_faults_too(mutant):
    drawn = fault(Effect("reads", "x", ("B", "T", "D"), Region(), "dropped"), op="short_conv", form="decode")
    shown = show(drawn, registry.load("numpy"), mutant, np.random.default_rng(0), 64)
    assert (shown.draft.operator, shown.wrong) == ("decode_short_conv", "o is wrong")
    assert "state=(state)" in shown.draft.text(ARRAYS["numpy"](), "numpy")


SHARE = r"(?m)^(core|training|full) +[0-9.]+ %  (\d+) of 100; the target is (\d+) %$"


def test_the_page_says_what_share_was_caught():
    docs = Path(__file__).parents[2] / "docs"
    printed, page = ((docs / name).read_text(encoding="utf-8") for name in ("conformance/mutants-numpy.txt", "conformance.md"))
    shares = {profile: (int(of), int(target)) for profile, of, target in re.findall(SHARE, printed)}
    seed, count = re.search(r"^seed (\d+): (\d+) faults of the numpy backend", printed, re.MULTILINE).groups()
    (forward,) = set(re.findall(r"^ +(\d+\.\d) %  \d+ of \d+ that show without a gradient$", printed, re.MULTILINE))
    said = (
        f"Of {count} faults of the NumPy backend, of seed {seed}, `full` catches {shares['full'][0]}, where the target is"
        f" {shares['full'][1]} in a hundred, `training` {shares['training'][0]}, which is its target, and `core`"
        f" {shares['core'][0]} where the target is {shares['core'][1]}: it says nothing about gradients, and catches"
        f" {float(forward):.0f} % of the faults that show without any."
    )
    assert said in page
    assert shares["training"][0] == shares["training"][1]
    assert "Of the five that are missed two rest on what no case has" in page
    assert (printed.count("\nMISSED"), printed.count("\n  no case has ")) == (5, 2)
