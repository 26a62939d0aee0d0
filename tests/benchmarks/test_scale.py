"""What many ranks cost: the model finds the factors that made the figures, and figures are made by ranks that there are."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from linattn.errors import OptionError
from linattn_benchmarks import costs, on_ranks, plots, replays, scale
from linattn_benchmarks.cases import parse_shape
from test_report import said

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

PAGE = Path(__file__).parents[2] / "docs" / "performance" / "scale.md"
SIZES = {"H": 2, "K": 32, "V": 16}
SETTINGS = {"device": "cpu", "dtype": "float32", "gate_dtype": "float32", "gates": "model", "seed": 1}
TOLD = {"device": "cpu", "dtype": "float32", "gate_dtype": "float32", "gates": "model", "accelerator": None}
TOLD |= {"processor": "a processor", "cores": 2, "load": 0.5}


@pytest.fixture
def true():
    """Costs that are known."""
    rng = np.random.default_rng(0)
    factors = {"hop": 0.05, "byte": 1e-6, "flop": 1e-8}
    for family in costs.FAMILIES:
        for what in scale.WHATS:
            given = zip(costs.OF_FAMILY, rng.uniform(0.5, 1, 4) * (0.3, 1e-4, 0.2, 4e-5), strict=True)
            factors |= {(family, what, name): x for name, x in given}
    return costs.Costs(factors, SIZES)


@pytest.fixture
def results(true):
    """What such a machine measures."""
    exchanges = [{"family": None, "what": "exchange", "ranks": R, "bytes": n} for R in (2, 4) for n in (1 << 10, 1 << 22)]
    calls = [
        {"family": family, "what": what, "ranks": R, "tokens": T}
        for R in (1, 2, 4)
        for family in costs.FAMILIES
        for what in scale.WHATS
        for T in (512, 2048)
    ]
    rows = [row | {"ms": dict.fromkeys(("median", "q10", "q90"), true.of(row))} for row in (*exchanges, *calls)]
    ceilings = {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14}
    return {"settings": TOLD, "sizes": SIZES, "ceilings": ceilings, "rows": rows}


def test_the_fit_finds_what_made_the_figures(true, results):
    found = costs.fit(results["rows"], SIZES)
    assert found.factors == pytest.approx(true.factors)
    assert found.ms("kda", "fwdbwd", 1024, 1e5) == pytest.approx(true.ms("kda", "fwdbwd", 1024, 1e5))
    assert costs.worst(found, results["rows"]) == pytest.approx(1)


def test_a_rate_is_told_where_more_bytes_take_longer_than_few_spread(true, results):
    (fitted, *_) = scale.sections(results)
    assert "bytes of other ranks come at 1 GB/s," in fitted.note
    assert "next to nothing" not in fitted.note
    few = next(row for row in results["rows"] if (row["ranks"], row.get("bytes")) == (4, 1 << 10))
    few["ms"]["q90"] += 3 * 1e-6 * (1 << 22) + 1
    (fitted, *_) = scale.sections(results)
    assert "bytes of other ranks come at too many GB/s to show," in fitted.note
    assert fitted.note.endswith(
        "What is computed below takes bytes for next to nothing: of many ranks it is the least that they take."
    )


@pytest.mark.parametrize(("what", "threads"), [("fwd", [True]), ("fwdbwd", [True, False])])
def test_a_backward_pass_on_a_gpu_is_timed_on_one_thread_too(what, threads, monkeypatch):
    """With a stand-in for CUDA, and times that say whether autograd would use threads of its own."""
    asked = []

    def times(call, device, seconds, group):
        asked.append(torch.autograd.is_multithreading_enabled())
        return [1.0 + asked[-1]]

    monkeypatch.setattr(on_ranks, "_times", times)
    monkeypatch.setattr(on_ranks, "_call", lambda *given: None)
    monkeypatch.setattr(on_ranks, "_peak", lambda *given: None)
    monkeypatch.setattr(on_ranks, "Torch", lambda device: SimpleNamespace(release=lambda: None))
    cases, _ = scale.cases(["gla"], [], SETTINGS | {"device": "cuda"})
    told = next(case.as_json() for case in cases if case.what == what)
    row = on_ranks._row((1, told, 0), None, "cuda", None, 0.1, False)
    assert asked == threads
    assert row["ms"]["median"] == 2.0
    assert row.get("one_thread", {}).get("ms", {}).get("median") == (1.0 if what == "fwdbwd" else None)


def test_no_factor_is_negative():
    A, x = np.random.default_rng(0).standard_normal((30, 6)), np.array([1.0, 0, 2, 0, 3, 0])
    np.testing.assert_allclose(costs.nonnegative(A, A @ x), x, atol=1e-12)
    pushed = costs.nonnegative(A, A @ np.array([1.0, -2, 2, 0, 3, -1]))
    assert min(pushed) == 0
    gradient = A.T @ (A @ pushed - A @ np.array([1.0, -2, 2, 0, 3, -1]))
    assert all(abs(g) < 1e-9 if value else g > -1e-9 for g, value in zip(gradient, pushed, strict=True))


@pytest.mark.parametrize(
    ("family", "forward"), [("simple_gla", 4 * 2 * (1 + 512)), ("gla", 4 * 2 * (32 + 512)), ("kda", 4 * 2 * (1024 + 512))]
)
def test_bytes_are_those_of_summaries_forward_and_of_states_backward(family, forward):
    assert costs.exchanged(family, "fwd", 4, SIZES) == forward
    assert costs.exchanged(family, "fwdbwd", 4, SIZES) == forward + 4 * 2 * 512
    far = 1 + costs.GATHERED // forward
    assert costs.exchanged(family, "fwd", far, SIZES) == 4 * 2 * 512, "a ring hands on states"


@pytest.mark.parametrize("family", costs.FAMILIES)
def test_transitions_have_the_numbers_that_summaries_have(family):
    import linattn

    case = scale.cases([family], parse_shape("B=1,T=4/8,H=1,K=4,V=3"), SETTINGS)[0][0]
    spec = getattr(linattn, f"summary_{family}").spec
    arrays = {arg.name: np.zeros(case.shape(arg), np.float32) for arg in case.arrays}
    A, b = getattr(linattn, f"summary_{family}")(**{arg.name: arrays[arg.name] for arg in spec.args if arg.name in arrays})
    assert (A.size, b.size) == (costs.transition(family, 4), 12)


def test_counts_alone_come_near_what_fla_reports():
    """68 % of ideal on four H800s, where the summary is a matrix state."""
    line = scale.published().lines[0]
    assert line[2] == "68%"
    assert abs(float(line[3].rstrip("%")) - 68) < 6
    assert f"{line[2]} of ideal, where counts say {line[3]}" in PAGE.read_text(encoding="utf-8")


def test_the_report_shows_measured_fitted_and_computed(results, tmp_path):
    titles = [section.title for section in scale.sections(results)]
    assert titles[:2] == ["Fitted costs", "Measured, and the fit"]
    assert titles[-2:] == ["100,000,000 tokens by ranks", "Published figures"]
    fitted, measured, *_ = scale.sections(results)
    assert fitted.note.startswith(
        "A hop takes 50 µs, bytes of other ranks come at 1 GB/s, their transitions are applied at 100 "
    )
    assert measured.note.startswith("a processor, at most 4 ranks on 2 cores; H2 K32 V16, float32.")
    assert all(line[3] == line[4] for line in measured.lines)
    paths = plots.write_png(plots.scaling(results), tmp_path)
    assert len(paths) == 5
    assert min(path.stat().st_size for path in paths) > 10_000


def test_the_floor_is_a_scan_a_pass(results):
    K, V = SIZES["K"], SIZES["V"]
    forward, backward = costs.scans("simple_gla", SIZES, 2, 4)
    assert (forward.nbytes, backward.nbytes) == (2 * (K + V) + 4,) * 2
    assert forward.ms(1000, results["ceilings"]) == pytest.approx(1e3 * 1000 * forward.nbytes / 1e12)
    forward, backward = costs.scans("kda", SIZES, 2, 4)
    assert forward.flops == 4 * K * (V + K) + 128 * (2 * K + V)
    assert backward.nbytes == 2 * (2 * K + V) + 4 * K + 4
    slow = results["ceilings"] | {"matmul_flops_per_s": 1e12}
    assert forward.ms(1000, slow) == pytest.approx(1e3 * 1000 * forward.flops / 1e12)
    (shares,) = scale.shares(results)
    assert len(shares.lines) == len(costs.FAMILIES) * 2 * 2
    for _, _, alone, ms, share, added, floor, at_floor, one_thread in shares.lines:
        assert float(share.rstrip("%")) == pytest.approx(100 * float(alone) / float(ms), abs=1)
        assert float(added) > float(floor) > 0
        assert float(at_floor.rstrip("%")) >= float(share.rstrip("%"))
        assert one_thread == "–"
    for row in results["rows"]:
        if row["family"] == "gla" and row["what"] == "fwdbwd":
            row["one_thread"] = {"ms": {"median": row["ranks"] + 1.0}}
    (shares,) = scale.shares(results)
    assert [line[-1] for line in shares.lines] == [
        "40%" if line[0] == "`gla`, fwdbwd" else "–" for line in shares.lines
    ]  # 2 ms alone, 5 with four ranks
    assert scale.shares({name: x for name, x in results.items() if name != "ceilings"}) == []


def test_ranks_that_are_started_are_measured(run, tmp_path):
    sizes = ("--shape", "B=1,T=16/32,H=1,K=8,V=8", "--ranks", "2", "--seconds", "0.01")
    out = run("scale", "gla", "delta_rule", "--device", "cpu", "--dtype", "fp32", *sizes, "--out", str(tmp_path / "scale.json"))
    assert out.exit_code == 0, out.output
    assert "Computed, not measured" in out.output
    found = json.loads((tmp_path / "scale.json").read_text())
    rows = found["results"]["rows"]
    assert [row["ranks"] for row in rows].count(2) == 2 + 2 * 2 * 2
    assert {(row["family"], row["ranks"]) for row in rows} >= {(None, 2), ("gla", 1), ("gla", 2), ("delta_rule", 2)}
    assert all(math.isfinite(row["ms"]["median"]) and row["ms"]["median"] > 0 for row in rows)
    again = run("report", str(tmp_path / "scale.json"), "--html", str(tmp_path / "scale.html"))
    assert again.exit_code == 0, again.output
    assert "100,000,000 tokens by ranks" in (tmp_path / "scale.html").read_text()


def test_memory_is_what_ranks_hold_beyond_one_alone(results):
    assert scale.memory(results) == []
    for row in results["rows"]:
        if row["family"]:
            row["peak_bytes"] = 10 * 2**20 + (row["ranks"] - 1) * 2**19
    (section,) = scale.memory(results)
    assert section.lines[0] == ("`linear_attn`, fwd", "512", "10.0", "11.5", "1.5")
    assert section.note.endswith(f"are {2 * 4 * 2 * 32 * 16 * 4 / 2**20:,.1f} MiB.")


def test_replays_stand_beside_calls_and_what_could_not_be_recorded_is_said(results):
    assert scale.replayed(results) == []
    for row in results["rows"]:
        if row["family"] == "gla" and row["tokens"] == 512:
            row["graph"] = {"ms": {"median": 0.5 * row["ms"]["median"] / row["ranks"]}}
    row["graph"] = {"failed": "rank 1: operation not permitted when stream is capturing"}
    (section,) = scale.replayed(results)
    assert section.title in [each.title for each in scale.sections(results)]
    assert [line[1] for line in section.lines] == ["1", "1", "2", "2", "4", "4", "4"]
    assert [line[-1] == "–" for line in section.lines] == [True, True, False, False, False, False, True]
    for *_, ms, replay, host, _share in section.lines[:-1]:
        assert float(ms) == pytest.approx(float(replay) + float(host), rel=0.02)
    assert section.lines[-1][-3:] == ("–", "–", "–")
    assert section.note.endswith(
        f"`{row['family']}`, {row['what']} of 4 ranks and {row['tokens']:,} tokens could not be recorded: "
        "rank 1: operation not permitted when stream is capturing."
    )


@pytest.fixture
def alone():
    """A group of one process."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_was_recorded_is_timed_and_what_fails_is_told(alone, monkeypatch):
    given, asked = [], []

    def recorded(prepare):
        given.append(prepare)
        return "a replay"

    def times(replay):
        asked.append(replay)
        return [1.0, 2.0, 3.0]

    monkeypatch.setattr(replays, "recorded", recorded)
    assert replays.replayed(len, times, alone)["ms"]["median"] == 2.0
    assert (given, asked) == ([len], ["a replay"])

    def fails(prepare):
        raise RuntimeError("CUDA error: no\nand more")

    monkeypatch.setattr(replays, "recorded", fails)
    assert replays.replayed(len, times, alone) == {"failed": "rank 0: CUDA error: no"}
    assert len(asked) == 1


def test_a_call_is_made_on_a_stream_of_its_own_before_it_is_recorded_there(monkeypatch):
    """With a stand-in for CUDA: what it is asked for, in order."""
    did = []

    class Stream:
        def wait_stream(self, other):
            did.append("wait")

    class Graph:
        def replay(self):
            did.append("replay")

    @contextlib.contextmanager
    def inside(name):
        did.append(name)
        yield
        did.append(f"not {name}")

    stand_in = SimpleNamespace(
        Stream=Stream,
        CUDAGraph=Graph,
        current_stream=lambda: None,
        synchronize=lambda: did.append("synchronize"),
        stream=lambda stream: inside("stream"),
        graph=lambda graph, stream, capture_error_mode: inside(f"graph {capture_error_mode}"),
    )
    monkeypatch.setattr(torch, "cuda", stand_in)

    def prepare():
        did.append("prepare")
        return lambda: did.append("call")

    replay = replays.recorded(prepare)
    before = ["wait", "stream", "prepare", *["call"] * replays.WARM, "not stream", "synchronize"]
    assert did == [*before, "graph thread_local", "call", "not graph thread_local"]
    did.clear()
    replay()
    assert did == ["replay"]


FEW = ("scale", "gla", "--device", "cpu", "--dtype", "fp32", "--shape", "B=1,T=16/32,H=1,K=8,V=8", "--ranks", "2")


def test_a_run_goes_on_with_the_rows_that_there_are(run, tmp_path):
    out, more = tmp_path / "scale.json", tmp_path / "more.json"
    assert run(*FEW, "--seconds", "0.01", "--warm", "2", "--out", str(out)).exit_code == 0
    found = json.loads(out.read_text())
    kept = [row for row in found["results"]["rows"] if row["ranks"] == 1 or row["family"] is None]
    for row in kept:
        row["ms"]["median"] = 12.5
    out.write_text(json.dumps(found | {"results": found["results"] | {"rows": kept}}))
    assert run(*FEW, "--seconds", "0.01", "--resume", str(out), "--out", str(more)).exit_code == 0
    rows = json.loads(more.read_text())["results"]["rows"]
    assert rows[: len(kept)] == kept
    assert [(row["ranks"], row["what"], row["tokens"]) for row in rows[len(kept) :]] == [
        (2, what, tokens) for tokens in (16, 32) for what in scale.WHATS
    ]
    other = run(*FEW[:-3], "B=1,T=16/32,H=1,K=8,V=4", *FEW[-2:], "--resume", str(out))
    assert "sizes was {'H': 1, 'K': 8, 'V': 8} there, and is {'H': 1, 'K': 8, 'V': 4} now" in said(other)


def test_what_the_time_does_not_suffice_for_is_left():
    cases = scale.cases(["gla"], parse_shape("B=1,T=16/32,H=1,K=8,V=8"), SETTINGS)[0]
    jobs = on_ranks.jobs(cases, [1, 2])
    assert list(on_ranks.rows(jobs, "cpu", None, 0.01, time.time())) == []
    rows = [on_ranks.facts(job) | {"ms": {"median": 1.0}} for job in jobs]
    assert on_ranks.jobs(cases, [1, 2], rows[3:]) == jobs[:3]
    assert list(on_ranks.rows([], "cpu", None, 0.01)) == []


def test_what_a_run_wrote_before_it_failed_is_there(run, tmp_path, monkeypatch):
    def rows(*args):
        yield {"family": None, "what": "exchange", "ranks": 2, "bytes": 1024, "ms": {"median": 1.0}}
        raise OptionError("scale: rank 1 of 2: out of memory")

    monkeypatch.setattr(on_ranks, "rows", rows)
    out = run(*FEW, "--out", str(tmp_path / "scale.json"))
    assert "scale: rank 1 of 2: out of memory" in said(out)
    assert len(json.loads((tmp_path / "scale.json").read_text())["results"]["rows"]) == 1


def test_first_calls_go_on_behind_one_that_fails(monkeypatch):
    cases = scale.cases(["gla"], parse_shape("B=1,T=16/32,H=1,K=8,V=8"), SETTINGS)[0]
    jobs = on_ranks.jobs(cases, [1])
    heard = []

    def rows(jobs, *args):
        for job in jobs:
            heard.append(job)
            if len(heard) == 2:
                raise OptionError("scale: rank 0 of 1: out of memory")
            yield on_ranks.facts(job)

    monkeypatch.setattr(on_ranks, "rows", rows)
    assert on_ranks.first_calls(jobs, "cpu", None, 1, None) == len(jobs) - 1
    assert heard == jobs


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("scale", "glaa", "--device", "cpu"), "scale: unknown family 'glaa': did you mean 'gla'?"),
        (("scale", "--device", "cpu", "--shape", "T=64"), "scale: expected two numbers of tokens of a rank or more"),
        (("scale", "--device", "cpu", "--shape", "T=64/128,B=2"), "scale: expected shapes that differ in T alone"),
        (("scale", "--device", "cpu", "--graph"), "--graph: expected --device cuda, whose calls can be recorded, got cpu"),
        (("grid", "--device", "cpu", "--graph"), "--graph goes with scale, not with grid"),
        (("scale", "--device", "cpu", "--ranks", "1"), "scale: expected two ranks or more to compare with one, got 1"),
        (("grid", "--device", "cpu", "--ranks", "2"), "--ranks goes with scale, not with grid"),
    ],
)
def test_what_it_does_not_take_is_said(run, words, message):
    out = run(*words)
    assert out.exit_code == 2
    assert message in said(out)
