"""What eager calls cost the host: only queueing is timed, every family is called every way it has."""

from __future__ import annotations

import pytest
from linattn.spec import DECODING
from linattn_benchmarks import clocks, environment, host, reports, sections
from linattn_benchmarks.cases import TIMED
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


@pytest.mark.parametrize("family", list(TIMED))
def test_every_family_is_called_every_way(monkeypatch, family):
    monkeypatch.setattr(host, "SIZES", {"B": 1, "T": 20, "H": 2, "K": 8, "V": 8, "C": 16})
    seen = []
    told = {"seconds": 1e-6, "report": lambda row, results: seen.append(results["rows"][-1])}
    found = host.run([Linattn("torch"), PEERS[SOFTMAX]()], SETTINGS, [family], **told)
    ways = [way for way in host.WAYS if way != "one token in place" or family in DECODING]
    assert [row["way"] for row in found["rows"]] == ways
    assert seen == found["rows"]
    for row in found["rows"]:
        assert not row["failed"]
        assert row["us"]["linattn:torch"] > 0
        peer = row["way"] in ("forward", "with backward") and family != "mixed_attn"
        assert (SOFTMAX in row["us"]) == peer
    assert host.succeeded(found)


def test_a_failure_is_said_and_fails_the_run(monkeypatch):
    def microseconds(case, subject, seconds):
        raise ZeroDivisionError("no heads")

    monkeypatch.setattr(host, "microseconds", microseconds)
    found = host.run([Linattn("torch")], SETTINGS, ["gla"])
    assert not host.succeeded(found)
    *_, failed = host.sections(found)
    assert failed.lines[0] == ("gla", "forward", "linattn:torch", "ZeroDivisionError: no heads")


def test_after_its_time_no_row_is_begun(monkeypatch):
    monkeypatch.setattr(host, "microseconds", lambda case, subject, seconds: 12.0)
    assert host.run([Linattn("torch")], SETTINGS, ["gla"], budget=-1.0)["rows"] == []
    assert len(host.run([Linattn("torch")], SETTINGS, ["gla"], budget=60.0)["rows"]) == 4


def test_tables_of_the_ways():
    rows = [
        {"family": "gla", "way": "forward", "us": {"linattn:triton": 80.4, "fla": 520.0}, "failed": {}},
        {"family": "kda", "way": "forward", "us": {"linattn:triton": 81.6}, "failed": {"fla": "busy"}},
        {"family": "gla", "way": "one token", "us": {"linattn:triton": 40.0}, "failed": {}},
    ]
    forward, token, _ = host.sections({"sizes": host.SIZES, "settings": SETTINGS, "rows": rows})
    assert forward.head == ("family", "linattn:triton", "fla")
    assert forward.lines == [("`gla`", "80", "520"), ("`kda`", "82", "failed")]
    assert token.lines == [("`gla`", "40", "–")]


def test_through_the_command(run, tmp_path, monkeypatch):
    """On a machine without a device its name is another's."""
    from linattn_benchmarks import commands

    monkeypatch.setattr(commands, "require", lambda device: None)
    monkeypatch.setattr(host, "SIZES", {"B": 1, "T": 8, "H": 2, "K": 8, "V": 8, "C": 8})
    monkeypatch.setattr(host, "TIMED", ["gla"])
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
