"""What stands around an operator, and operators that take it in: what is timed is checked, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from linattn_benchmarks import commands, environment, parts, reports, sections
from linattn_benchmarks.beside import OURS
from test_report import said

torch = pytest.importorskip("torch")

from linattn_benchmarks import parts_timed as timed  # noqa: E402

SMALL = ("--small", "--device", "cpu", "--seconds", "0.01", "--seed", "3")


@pytest.fixture
def results(run, tmp_path):
    """A results file of all parts at small sizes."""
    path = tmp_path / "parts.json"
    done = run("parts", *SMALL, "--no-peers", "--out", str(path))
    assert done.exit_code == 0, done.output
    return environment.read(path)["results"]


def test_every_part_is_timed_and_checked(results):
    rows = results["rows"]
    assert {row["part"] for row in rows} == {
        "short_conv", "decode_short_conv", "gated_rms_norm", "ssd", "kda, fused", "gated_delta_rule, fused",
    }  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"}
    assert all(0 <= row["error"] < 2e-3 for row in rows)
    assert all(
        (row["share"] is None) == (row["bytes"] is None) == ("conv" not in row["part"] and "norm" not in row["part"])
        for row in rows
    )
    assert parts.succeeded(results)
    assert results["settings"]["small"]
    for section in reports.sections("parts", results):
        assert f"**{section.title}**" in sections.markdown([section])
    fused = next(section for section in reports.sections("parts", results) if section.title == "kda, fused")
    assert fused.head[-2:] == (f"over {timed.APART}", f"over {timed.BARE}")


def test_bytes_are_those_that_must_move():
    conv, norm, step = (
        timed.convolution(2, 8, 16, 4, "float32"),
        timed.norm(2, 8, 16, 16, True, "float32"),
        timed.convolution_step(2, 16, 4, "float32"),
    )
    for part, wanted in ((conv, {"fwd": 2, "bwd": 3}), (norm, {"fwd": 3, "bwd": 5})):
        arrays = part.arrays("cpu", 1)
        out, weight = arrays["x"], arrays["weight"].nbytes
        for what, count in wanted.items():
            assert part.nbytes(arrays, out, what) == count * out.nbytes + (2 if what == "bwd" else 1) * weight
    arrays = step.arrays("cpu", 1)
    assert (
        step.nbytes(arrays, arrays["x"], "decode")
        == 2 * arrays["x"].nbytes + arrays["weight"].nbytes + 2 * arrays["state"].nbytes
    )


def test_what_is_wrong_is_told(monkeypatch):
    part = timed.norm(2, 70, 64, 16, True, "float32")
    right = part.ways[OURS].call
    half = timed.Way(lambda arrays: 0.5 * right(arrays))
    broken = timed.Way(lambda arrays: 1 / 0)
    lacking = timed.Way(right, module="no_such_module")
    part = replace(part, ways={OURS: half, "broken": broken, "lacking": lacking})
    monkeypatch.setattr(timed.Proof, "__init__", lambda self, part, arrays: correct(self, part, arrays))
    rows = timed.run([part], "cpu", 1, 0.01)["rows"]
    assert [row["status"] for row in rows] == ["wrong"] * 2 + ["failed"] * 2 + ["skipped"] * 2
    assert rows[2]["reason"].startswith("ZeroDivisionError")
    assert rows[-1]["reason"] == "no_such_module is not installed"
    assert not parts.succeeded({"rows": rows})
    told = parts.sections({"rows": rows})
    assert "(wrong)" in told[0].lines[0][3]
    assert [line[-1] for line in told[1].lines] == [row["reason"] for row in rows[2:]]
    assert len(timed.run([part], "cpu", 1, 0.01, peers=())["rows"]) == 4  # who is not installed is no peer that was asked for


def correct(proof, part, arrays):
    """A proof by the norm itself, where the part's own way is the one that is wrong."""
    norm = timed.norm(2, 70, 64, 16, True, "float32")
    proof.arrays = norm.cut(arrays)
    exact = {name: x.double() for name, x in proof.arrays.items()}
    proof.wanted = timed.outputs(norm.ways[OURS].call, exact, exact)


def test_real_sizes_are_those_of_models_and_bounds():
    titles = [part.title for part in timed.at_real_sizes()]
    assert len(set(titles)) == len(titles)
    for shape in ("B8 T2048 H1/80", "B1 T8192 H8/128", "B1 T8192 H1/48"):
        assert f"ssd {shape} N128 P64 bfloat16" in titles
    for T in (24, 32, 64):
        assert f"kda, fused T8192 H{T}/{T} D128, 8 packed bfloat16" in titles


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("parts", "short_con", *SMALL),
            "parts: unknown operator 'short_con': known are short_conv, decode_short_conv, gated_rms_norm",
        ),
        (
            ("parts", *SMALL, "--rows", "x*"),
            "--rows x*: no row has such a name; the first is 'short_conv B2 T70 D64 W4 float32'",
        ),
        (
            ("parts", *SMALL, "--dtype", "bf16"),
            "--dtype goes with operators, table, grid, scale, layer, model and overhead --device",
        ),
        (("chunk_gla", "--small"), "--small goes with parts, layer and model, not with chunk_gla"),
    ],
)
def test_wrong_arguments(run, words, message):
    done = run(*words)
    assert done.exit_code == 2
    assert message in said(done)


def test_rows_are_chosen(run, tmp_path):
    path = tmp_path / "parts.json"
    assert run("parts", "gated_rms_norm", "short_conv", *SMALL, "--rows", "*D64 W4*", "--out", str(path)).exit_code == 0
    assert {row["part"] for row in json.loads(path.read_text())["results"]["rows"]} == {"short_conv"}


def test_other_libraries_are_asked_by_name():
    part = timed.fused_delta("kda", 64, 1, 1, 1, 16, "float32")
    ours = [OURS, timed.APART, timed.BARE]
    assert [name for name, _ in timed.asked_of(part, ())] == ours
    assert [name for name, _ in timed.asked_of(part, ("cuDNN",))] == [*ours, "cuDNN, maps apart", "cuDNN, bare"]
    assert [name for name, _ in timed.asked_of(part, None)] == list(part.ways)


def test_a_budget_leaves_parts(run, monkeypatch):
    """What is begun in time is finished."""
    part = timed.norm(2, 70, 64, 16, True, "float32")
    clock = iter((1.0, 3.0))
    monkeypatch.setattr(timed.time, "monotonic", lambda: next(clock))
    rows = timed.run([part, part], "cpu", 1, 0.01, peers=(), check=False, end=2.0)["rows"]
    assert [row["what"] for row in rows] == ["fwd", "bwd"]
    monkeypatch.undo()
    monkeypatch.setattr(commands.sweep, "RESERVE", 10.0)
    done = run("parts", "gated_rms_norm", "short_conv", *SMALL, "--budget", "10")
    assert "the budget left 2 of 2 parts untimed" in done.stderr


def test_first_calls_are_made_by_others(run):
    """In a process of its own each, before anything is timed; one that fails says why, and fails again where it is timed."""
    done = run("parts", "gated_rms_norm", *SMALL, "--warm", "1")
    assert (done.exit_code, "2 first calls in" in done.stderr) == (0, True)
    (call,) = timed.first_calls([timed.norm(2, 70, 64, 16, True, "float32")], "cpu", 1, (), True)
    assert call.spoken == "linattn gated_rms_norm B2 T70 D64 groups of 16, gate after float32"
    assert call.function(call.request) is None
    assert call.function(call.request.replace('"linattn"', '"mamba_ssm"')) == "mamba_ssm is not installed"


def test_runs_of_different_parts_are_shown_as_one(run, tmp_path):
    """Of a row that both have, the first file's counts."""
    paths = [tmp_path / name for name in ("first.json", "second.json")]
    assert run("parts", "gated_rms_norm", *SMALL, "--out", str(paths[0])).exit_code == 0
    assert run("parts", "gated_rms_norm", "short_conv", *SMALL, "--out", str(paths[1])).exit_code == 0
    assert run("report", *map(str, paths), "--out", str(tmp_path / "both.json")).exit_code == 0
    first, _, both = (json.loads(path.read_text())["results"]["rows"] for path in (*paths, tmp_path / "both.json"))
    assert both[: len(first)] == first
    assert {row["part"] for row in both} == {"gated_rms_norm", "short_conv"}
