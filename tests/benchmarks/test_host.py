"""What eager calls cost the host: only queueing is timed, every family is called every way it has."""

from __future__ import annotations

import pytest
from linattn.spec import DECODING
from linattn_benchmarks import clocks, environment, host, reports, sections
from linattn_benchmarks.cases import SWEPT
from linattn_benchmarks.subjects import PEERS, Linattn

torch = pytest.importorskip("torch")

SETTINGS = {"device": "cpu", "dtype": "float32", "gate_dtype": "float32", "gates": "model", "seed": 1}
SOFTMAX = "softmax (SDPA)"


def test_waiting_for_the_device_is_not_timed():
    """A call takes the host a second, and the device three, which it is waited for."""
    now, queued = [0.0], []

    def call():
        now[0] += 1
        queued.append(3)

    def wait(result):
        now[0] += sum(queued)
        queued.clear()

    times = clocks.queueing_times(call, wait, seconds=200.0, clock=lambda: now[0])
    assert times == [1000.0] * 3  # 80 seconds each, waiting and all


@pytest.mark.parametrize(("way", "gradients"), [("forward", False), ("with backward", True)])
def test_the_fastest_round_counts_and_gradients_are_off_in_all_of_it(monkeypatch, way, gradients):
    enabled = []

    def timed(call, wait, seconds):
        enabled.append(torch.is_grad_enabled())
        return [3.0, 2.0, 9.0]

    monkeypatch.setattr(host, "queueing_times", timed)
    monkeypatch.setattr(host, "SIZES", {"B": 1, "T": 8, "H": 2, "K": 8, "V": 8, "C": 8})
    case = host.cases(SETTINGS, ["gla"])["gla", way]
    assert host.microseconds(case, Linattn("torch"), 1.0) == 2000.0
    assert enabled == [gradients]


@pytest.mark.parametrize("family", list(SWEPT))
def test_every_family_is_called_every_way(monkeypatch, family):
    monkeypatch.setattr(host, "SIZES", {"B": 1, "T": 20, "H": 2, "K": 8, "V": 8, "C": 16})
    seen = []
    told = {"seconds": 1e-6, "report": lambda row, results: seen.append(row)}
    found = host.run(host.cases(SETTINGS, [family]), [Linattn("torch"), PEERS[SOFTMAX]()], **told)
    ways = [way for way in host.WAYS if way != "one token in place" or family in DECODING]
    assert [row["way"] for row in found["rows"]] == ways
    assert seen[: len(ways)] == found["rows"]
    for row in found["rows"]:
        assert not row["failed"]
        assert row["us"]["linattn:torch"] > 0
        peer = row["way"] in ("forward", "with backward") and family not in ("mixed_attn", "ssd")
        assert (SOFTMAX in row["us"]) == peer
    assert host.succeeded(found)


def test_a_failure_is_said_and_fails_the_run(monkeypatch):
    def microseconds(case, subject, seconds):
        raise ZeroDivisionError("no heads")

    monkeypatch.setattr(host, "microseconds", microseconds)
    found = host.run(host.cases(SETTINGS, ["gla"]), [Linattn("torch")])
    assert not host.succeeded(found)
    *_, failed = host.sections(found)
    assert failed.lines[0] == ("gla", "forward", "linattn:torch", "ZeroDivisionError: no heads")


def test_after_its_time_no_figure_is_begun(monkeypatch):
    monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: 12.0)
    chosen = host.cases(SETTINGS, ["gla"])
    late = host.run(chosen, [Linattn("torch")], budget=-1.0)
    assert not any(row["us"] for row in late["rows"])
    assert host.sections(late) == []
    assert all(row["us"] for row in host.run(chosen, [Linattn("torch")], budget=60.0)["rows"])


def test_every_family_comes_before_the_next_way_and_ours_before_peers(monkeypatch):
    seen = []
    monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: seen.append((subject.label, case.operator)) or 1.0)
    host.run(host.cases(SETTINGS, ["gla", "kda"]), [Linattn("torch"), PEERS[SOFTMAX]()])
    assert seen[:3] == [("linattn:torch", "chunk_gla"), ("linattn:torch", "chunk_kda"), ("linattn:torch", "chunk_gla")]
    assert {label for label, _ in seen[8:]} == {SOFTMAX}


def test_figures_of_an_earlier_run_are_taken_over_and_failures_are_not(monkeypatch):
    seen = []
    monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: seen.append(case.operator) or 5.0)
    earlier = [
        {"family": "gla", "way": "forward", "us": {"linattn:torch": 12.0}, "failed": {}},
        {"family": "gla", "way": "with backward", "us": {}, "failed": {"linattn:torch": "busy"}},
        {"family": "kda", "way": "forward", "us": {"linattn:torch": 9.0}, "failed": {}},
    ]
    found = host.run(host.cases(SETTINGS, ["gla"]), [Linattn("torch")], earlier=earlier)
    assert seen == ["chunk_gla", "recurrent_gla", "decode_gla"]
    figures = {(row["family"], row["way"]): row["us"]["linattn:torch"] for row in found["rows"]}
    assert (figures["gla", "forward"], figures["kda", "forward"]) == (12.0, 9.0)
    assert figures["gla", "with backward"] == 5.0
    assert not any(row["failed"] for row in found["rows"])


def test_tables_of_the_ways():
    rows = [
        {"family": "gla", "way": "forward", "us": {"linattn:triton": 80.4, "fla": 520.0}, "failed": {}},
        {"family": "kda", "way": "forward", "us": {"linattn:triton": 81.6}, "failed": {"fla": "busy"}},
        {"family": "gla", "way": "one token", "us": {"linattn:triton": 40.0}, "failed": {}},
    ]
    forward, token, _ = host.sections({"sizes": host.SIZES, "settings": SETTINGS, "rows": rows})
    assert forward.title == "forward, µs of the host a call, ours to be at most 80"
    assert forward.head == ("family", "linattn:triton", "fla")
    assert forward.lines == [("`gla`", "80", "520"), ("`kda`", "82", "failed")]
    assert token.lines == [("`gla`", "40", "–")]


def test_through_the_command(run, tmp_path, monkeypatch):
    """On a machine without a device its name is another's."""
    from linattn_benchmarks import commands

    monkeypatch.setattr(commands, "require", lambda device: None)
    monkeypatch.setattr(host, "SIZES", {"B": 1, "T": 8, "H": 2, "K": 8, "V": 8, "C": 8})
    monkeypatch.setattr(host, "SWEPT", ["gla"])
    monkeypatch.setattr(Linattn, "refusal", lambda self, case: None)
    monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: 12.0)
    path = tmp_path / "x.json"
    done = run("overhead", "--device", "cuda", "--backend", "torch", "--out", str(path), "--html", str(tmp_path / "x.html"))
    assert done.exit_code == 0, done.output
    content = environment.read(path)
    assert (content["benchmark"], len(content["results"]["rows"])) == ("host", 4)
    assert content["results"]["settings"]["dtype"] == "bfloat16"
    assert "one token in place, µs of the host a call" in done.stdout
    assert "| `gla` | 12 |" in sections.markdown(reports.sections("host", content["results"]))
    assert "<h2>forward, µs" in (tmp_path / "x.html").read_text()


def test_first_calls_are_made_beforehand(run, tmp_path, monkeypatch):
    """By processes that know nothing of what is replaced here."""
    from linattn_benchmarks import commands

    heard = []
    monkeypatch.setattr(commands, "require", lambda device: None)
    monkeypatch.setattr(Linattn, "refusal", lambda self, case: None)
    monkeypatch.setattr(
        commands.warm, "first_calls", lambda calls, *_, **__: heard.extend(calls) or commands.warm.Warmed(4, [])
    )
    monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: 12.0)
    done = run("overhead", "gla", "--device", "cuda", "--backend", "torch", "--no-peers", "--warm", "2", "--budget", "60")
    assert done.exit_code == 0, done.output
    assert {call.spoken for call in heard} == {
        "linattn:torch chunk_gla fwd",
        "linattn:torch chunk_gla fwdbwd",
        "linattn:torch recurrent_gla decode",
        "linattn:torch decode_gla decode",
    }


def test_a_run_that_was_cut_off_is_gone_on_with(run, tmp_path, monkeypatch):
    from linattn_benchmarks import commands

    monkeypatch.setattr(commands, "require", lambda device: None)
    monkeypatch.setattr(Linattn, "refusal", lambda self, case: None)
    path = tmp_path / "x.json"
    words = ("--device", "cuda", "--backend", "torch", "--no-peers", "--out", str(path))
    for us, family in ((12.0, "gla"), (9.0, "kda")):
        monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: us)  # noqa: B023
        again = ("--resume", str(path)) if path.exists() else ()
        assert run("overhead", family, *words, *again).exit_code == 0
    rows = environment.read(path)["results"]["rows"]
    assert [(row["family"], row["us"]["linattn:torch"]) for row in rows] == [("gla", 12.0)] * 4 + [("kda", 9.0)] * 4
