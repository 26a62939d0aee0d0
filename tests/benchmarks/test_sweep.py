"""Tables and grids: what is timed and in which order, what a budget leaves, what is gone on with, and what is said of it."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from linattn.errors import OptionError, Unsupported
from linattn_benchmarks import commands, environment, fresh, grid, packing, published, reports, sections, sweep, warm
from linattn_benchmarks.cases import Case
from linattn_benchmarks.runners import Torch
from linattn_benchmarks.subjects import Fla, Linattn
from linattn_benchmarks.sweep import Entry
from test_report import Collector, said

torch = pytest.importorskip("torch")

HEADER = ",".join(published.COLUMNS)
TABLE = f"""{HEADER}
forward,tiny,1,2,40,0.2,0.1,0.9
forward,tiny,1,2,33+7,0.2,,0.9
forward,tiny,2,2,40,1000,2000,3000
backward,tiny,1,2,33+7,0.5,,0.9
"""
SETTINGS = {"device": "cpu", "dtype": "float32", "gate_dtype": "float32", "gates": "mixed", "seed": 1, "states": True}
ON_CPU = ("--device", "cpu", "--backend", "torch", "--seconds", "0.01")


@pytest.fixture
def table(tmp_path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(TABLE)
    return path


@pytest.fixture
def entries(table) -> list[Entry]:
    return published.read(table, SETTINGS)


class Clock:
    """Seconds that pass only while something is timed."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def timing(monkeypatch):
    """In place of a device: a call takes ``seconds[name]``, 10 by default; what was called, in order."""
    clock, called, seconds = Clock(), [], {}

    def timed(entry, subject, *rest):
        called.append((entry.name, subject.label))
        clock.now += seconds.get(entry.name, 10)
        return {"status": "ok", "ms": 0.1, "spread": 0.0}

    monkeypatch.setattr(sweep, "timed", timed)
    return lambda **options: sweep.run(seconds=0.1, check=False, clock=clock, **options), called, seconds


# -- the file of a published table -----------------------------------------------------------------------------------


def test_rows_of_a_table(entries):
    assert [entry.name for entry in entries] == [
        "forward 1/2 1x40",
        "forward 1/2 33+7",
        "forward 2/2 1x40",
        "backward 1/2 33+7",
    ]
    first, second, _, last = entries
    assert first.published == {"FlashQLA": 0.2, "FlashInfer": 0.1, "fla": 0.9}
    assert second.published == {"FlashQLA": 0.2, "fla": 0.9}
    assert (second.case.lengths, second.case.size["T"], second.case.size["K"]) == ((33, 7), 40, 128)
    assert (second.case.what, last.case.what) == ("fwd", "fwdbwd")
    assert [entry.backward_alone for entry in entries] == [False, False, False, True]
    assert second.case.states


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"expected the columns {HEADER}, got nothing"),
        ("a,b\n1,2\n", f"expected the columns {HEADER}, got a,b"),
        (f"{HEADER}\n", "expected rows after the header, got none"),
        (f"{HEADER}\nforward,x,1,2,40,1,1\n", ", line 2: expected 8 cells"),
        (f"{HEADER}\nsideways,x,1,2,40,1,1,1\n", ", line 2: pass must be forward or backward, got 'sideways'"),
        (f"{HEADER}\nforward,x,0,2,40,1,1,1\n", ", line 2: H must be a positive whole number, got '0'"),
        (f"{HEADER}\nforward,x,2,3,40,1,1,1\n", ", line 2: HV must be a multiple of H, got H=2 and HV=3"),
        (f"{HEADER}\nforward,x,1,2,4k,1,1,1\n", ", line 2: expected lengths such as 4096+28672 or 8x1024, got '4k'"),
        (f"{HEADER}\nforward,x,1,2,40,fast,1,1\n", ", line 2: flash_qla_ms must be a number, got 'fast'"),
        (f"{HEADER}\nforward,x,1,2,40,1,1,0\n", ", line 2: fla_ms must be a positive number, got '0'"),
        (f"{HEADER}\n" + "forward,x,1,2,40,1,1,1\n" * 2, ", line 3: forward 1/2 1x40 is there twice"),
    ],
)
def test_files_that_are_no_table(tmp_path, text, message):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(OptionError, match="^" + re.escape(f"{path}{message if message[0] == ',' else f': {message}'}") + "$"):
        published.read(path, SETTINGS)


# -- the loop --------------------------------------------------------------------------------------------------------


def test_every_subject_on_every_row(timing, entries):
    run_sweep, called, _ = timing
    progress = run_sweep(entries=entries[:2], subjects=[Linattn("torch"), Linattn("numpy", "torch")])
    assert called == [(entry.name, label) for entry in entries[:2] for label in ("linattn:torch", "linattn:numpy")]
    assert (progress.left, progress.done, progress.calls) == (0, 4, 4)
    assert progress.rows[0]["found"]["linattn:torch"]["ms"] == 0.1


def test_what_is_left_is_said_at_any_time(timing, entries):
    """A run that is killed has written what it has not timed, too."""
    run_sweep, _, _ = timing
    left = []
    run_sweep(entries=entries[:3], subjects=[Linattn("torch")], report=lambda row, label, progress: left.append(progress.left))
    assert left == [2, 1, 0]


def test_a_budget_leaves_time_for_the_report(timing, entries):
    """Begun is what ends in time if it takes as long as the call before."""
    run_sweep, called, seconds = timing
    seconds |= {"forward 1/2 33+7": 20}
    assert run_sweep(entries=entries, subjects=[Linattn("torch")], budget=54.0).left == 2
    assert len(called) == 2


def test_a_run_goes_on_with_what_was_timed_and_not_with_what_failed(timing, entries):
    run_sweep, called, _ = timing
    first, second = (entry.row() for entry in entries[:2])
    first["found"] = {"linattn:torch": {"status": "wrong", "ms": 1.0}}
    second["found"] = {"linattn:torch": {"status": "failed", "reason": "busy"}}
    progress = run_sweep(entries=entries[:2], subjects=[Linattn("torch")], earlier=[first, second])
    assert called == [("forward 1/2 33+7", "linattn:torch")]
    assert progress.rows[0]["found"]["linattn:torch"]["ms"] == 1.0


def test_who_is_absent_is_not_called_and_said_once(timing, entries):
    run_sweep, called, _ = timing
    progress = run_sweep(entries=entries, subjects=[Fla()])
    assert (called, progress.refused) == ([], {"fla": ["flash-linear-attention is not installed"]})


def test_rows_are_selected_by_name(entries):
    assert [entry.name for entry in sweep.selected(entries, ["backward*", "* 2/2 *"])] == [
        "forward 2/2 1x40",
        "backward 1/2 33+7",
    ]
    with pytest.raises(OptionError, match=r"^--rows 8k: no row has such a name; the first is 'forward 1/2 1x40'$"):
        sweep.selected(entries, ["8k"])


class Recording(Torch):
    """A device that replays: every call takes as many milliseconds as it has outputs, and two copies fill its cache."""

    def __init__(self, device):
        super().__init__(device)
        self.seen = []

    def copies(self, arrays):
        return [arrays, {name: x.clone() for name, x in arrays.items()}]

    def graph_times(self, call, seconds=0.2):
        outputs = [call() for _ in range(4)]
        self.seen.append(outputs)
        return [float(len(outputs[0]))] * 10


@pytest.fixture
def device(monkeypatch):
    runner = Recording("cpu")
    monkeypatch.setattr(Linattn, "runner", lambda self, case: runner)
    return runner


def test_a_forward_pass_keeps_nothing_and_finds_no_array_in_a_cache(entries, device):
    found = sweep.figures(entries[0], Linattn("torch"), 0.1, check=True)
    assert (found["status"], found["ms"], found["ran"]) == ("ok", 2.0, "torch.chunk_gated_delta_rule")
    (outputs,) = device.seen
    assert not any(output["o"].requires_grad for output in outputs)


def test_copies_take_turns():
    calls = [lambda n=n: n for n in range(3)]
    seen = []
    runner = type("Runner", (), {"graph_times": lambda self, call, seconds: seen.extend(call() for _ in range(7)) or [1.0]})()
    assert sweep.device_times(runner, calls, 0.1) == [1.0]
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_what_cannot_be_recorded_is_timed_by_the_clock():
    runner = type("Runner", (), {"graph_times": lambda *_: None, "times": lambda *_: [3.0]})()
    assert sweep.device_times(runner, [lambda: None], 0.1) == [3.0]


def test_a_backward_pass_alone_is_what_is_left_without_the_forward_pass(entries, device):
    """The forward pass has 2 outputs, with the gradients of six arrays 8."""
    found = sweep.figures(entries[-1], Linattn("torch"), 0.1, check=False)
    assert (found["ms"], found["with_forward"]) == (6.0, 8.0)
    _, kept = device.seen
    assert all(output["o"].requires_grad for output in kept)


def test_what_is_wrong_fails_or_is_refused_says_so(entries, monkeypatch):
    def raising(error):
        def prepared(*_):
            raise error

        return prepared

    monkeypatch.setattr(fresh, "prepared", raising(ZeroDivisionError("no rows")))
    assert sweep.timed(entries[0], Linattn("torch"), 0.1, True) == {"status": "failed", "reason": "ZeroDivisionError: no rows"}
    monkeypatch.setattr(fresh, "prepared", raising(Unsupported("odd")))
    assert sweep.timed(entries[0], Linattn("torch"), 0.1, True) == {"status": "skipped", "reason": "odd"}


def test_a_wrong_result_is_marked(entries, monkeypatch):
    monkeypatch.setattr(sweep.checks, "check", lambda *_: {"ok": False, "worst": 0.5})
    found = sweep.timed(entries[0], Linattn("torch"), 0.01, True)
    assert (found["status"], found["error"]) == ("wrong", 0.5)
    assert found["ms"] > 0


# -- what is said of a table -----------------------------------------------------------------------------------------


def row_of(name: str, ms: float | None, published=None, **peers: float):
    what, heads, packed = name.split(" ")
    H, HV = map(int, heads.split("/"))
    found = {"linattn:triton": {"status": "failed", "reason": "busy"} if ms is None else {"status": "ok", "ms": ms}}
    found |= {peer: {"status": "ok", "ms": x} for peer, x in peers.items()}
    fields = {"name": name, "pass": what, "H": H, "HV": HV, "sequence_lengths": packed, "published": published or {}}
    return fields | {"found": found}


def results_of(*rows, left=0, refused=None):
    return {"settings": {}, "left": left, "refused": refused or {}, "rows": list(rows)}


def test_the_best_peer_is_measured_where_it_can_be():
    row = row_of("forward 1/2 1x8", 1.0, {"FlashQLA": 0.5, "fla": 2.0}, FlashQLA=4.0)
    assert published.best_peer(row) == ("fla", 2.0, False)
    assert published.ratio(row, "linattn:triton") == 0.5
    assert published.best_peer(row_of("forward 1/2 1x8", 1.0, {"fla": 2.0}, FlashInfer=1.5)) == ("FlashInfer", 1.5, True)
    assert published.best_peer(row_of("forward 1/2 1x8", 1.0)) is None


def test_ratios_by_group():
    results = results_of(
        row_of("forward 1/2 1x8", 2.0, {"fla": 1.0}),
        row_of("forward 2/2 1x8", 0.5, {"fla": 0.5, "FlashInfer": 2.0}, fla=1.0),
        row_of("forward 1/2 5+3", 8.0, {"fla": 1.0}),
        row_of("backward 1/2 1x8", None, {"fla": 1.0}),
        left=3,
        refused={"FlashQLA": ["flash-qla is not installed"]},
    )
    summary, beside, forward, worst, troubles = published.sections(results)
    assert summary.lines == [("forward", "2.00", "1 of 3", "8.00", "forward 1/2 5+3", "1")]
    assert summary.note == "* the best peer's figure is the published one"
    assert beside.head == ("pass", "library", "geometric mean", "least", "most", "rows below 1")
    assert beside.lines == [
        ("forward", "fla", "2.00", "2.00", "2.00", "0 of 1"),
        ("forward", "linattn:triton", "2.52", "1.00", "8.00", "0 of 3"),
    ]
    assert forward.head == ("packing", "1/2", "2/2", "mean")
    assert forward.lines == [
        ("1x8", "2.00*", "0.50", "1.00"),
        ("5+3", "8.00*", "–", "8.00"),
        ("mean", "4.00", "0.50", "2.00"),
    ]
    assert [line[0] for line in worst.lines] == ["forward 1/2 5+3", "forward 1/2 1x8", "forward 2/2 1x8"]
    assert worst.lines[0] == ("forward 1/2 5+3", "8", "1", "fla*", "8.00")
    assert troubles.lines == [
        ("backward 1/2 1x8", "linattn:triton", "failed", "busy"),
        ("", "FlashQLA", "skipped", "flash-qla is not installed"),
    ]
    assert troubles.note == "The budget left 3 calls untimed: --resume goes on with them."


@pytest.mark.parametrize(
    ("peers", "note"),
    [({}, "Every peer's figure is the published one."), ({"fla": 1.0}, "Every best peer was measured in this run.")],
)
def test_where_all_peers_are_alike_no_figure_is_marked(peers, note):
    summary, *others = published.sections(results_of(row_of("forward 1/2 1x8", 2.0, {"fla": 1.0}, **peers)))
    (forward,) = [section for section in others if section.title.endswith(", forward")]
    assert (summary.note, forward.lines[0]) == (note, ("1x8", "2.00", "2.00"))
    assert any("over what is published" in section.title for section in others) == bool(peers)


def test_a_table_in_the_documentation():
    results = results_of(row_of("forward 1/2 1x8", 2.0, {"fla": 1.0}))
    text = sections.markdown(reports.sections("table", results))
    assert "**linattn:triton, forward**\n\n| packing | 1/2 | mean |\n| --- | ---: | ---: |\n| 1x8 | 2.00 | 2.00 |" in text
    assert "\n\\* published\n" in text


# -- the grid --------------------------------------------------------------------------------------------------------


def test_rows_of_the_grid():
    found = grid.entries(["gla"], {"device": "cpu"})
    names = [entry.name for entry in found]
    assert len(set(names)) == len(names)
    assert {"gla 64 forward 4/4 8x1024", "gla 128 with backward 16/64 4096+28672", "gla 128 forward 4/4 1000x33"} < set(names)
    both = {entry.name: entry.case for entry in found}
    alone, together = both["gla 128 forward 4/4 8x1024, batch"], both["gla 128 forward 4/4 8x1024"]
    assert (alone.lengths, alone.size["B"], alone.size["T"]) == ((), 8, 1024)
    assert (together.lengths, together.size["B"], together.size["T"]) == ((1024,) * 8, 1, 8192)
    assert not any(name.endswith("batch") and "+" in name for name in names)
    assert {entry.case.spec.name for entry in grid.entries([], {})} == set(grid.WIDTHS)
    assert {entry.case.size["K"] for entry in grid.entries(["kda"], {})} == {128}
    assert len(found) == len(list(grid.cells())) * 2 * 2


def test_the_first_rows_of_the_grid_cover_families_and_regimes():
    first = grid.entries([], {})[: sum(map(len, grid.WIDTHS.values())) * 2 * 2 * len(grid.COVER)]
    assert {entry.case.spec.name for entry in first} == set(grid.WIDTHS)
    assert [entry.fields["batch"] for entry in first[::28]] == [False, True] * len(grid.COVER)
    cells = {(entry.fields["HV"], grid.lengths_of(entry.fields)) for entry in first}
    assert all(any(regime.holds(*cell) for cell in cells) for regime in grid.REGIMES)
    assert [entry.case.spec.name for entry in grid.entries(["gla", "kda"], {})[:3]] == ["gla", "gla", "kda"]


def test_a_batch_of_the_grid_has_the_tokens_of_its_packed_sequences():
    """So that packing is all that differs."""
    settings = {"device": "cpu", "dtype": "float32", "seed": 3}
    packed, batch = (grid.entry_of("gla", 8, "with backward", (1, 2), (700, 700), one, settings).case for one in (False, True))
    ours = Linattn("torch")
    (_, a, pulled_a), (_, b, pulled_b) = (fresh.prepared(case, ours) for case in (packed, batch))
    for name in ("q", "v", "g"):
        assert b[name].shape[:2] == (2, 700)
        assert torch.equal(a[name].flatten(0, 1), b[name].flatten(0, 1))
    assert torch.equal(pulled_a["o"].flatten(), pulled_b["o"].flatten())


def grid_row(packed: str, ms: float, batch=False, HV=2, **peers: float):
    row = row_of(f"forward 1/{HV} {packed}", ms, **peers)
    name = f"gla 64 {row['name']}" + (", batch" if batch else "")
    return row | {"name": name, "family": "gla", "K": 64, "batch": batch}


def test_evenness_packing_and_peers():
    results = results_of(
        grid_row("1x1000", 1e-3),  # a microsecond for 2,000 tokens and heads: half a nanosecond each
        grid_row("10x100", 2e-3, fla=8e-3),
        grid_row("10x100", 1.6e-3, batch=True, fla=4e-3),
        grid_row("1x1000", 8e-3, HV=4),
    )
    summary, regimes, cells, worst, packed, beside = grid.sections(results)
    assert summary.lines == [("`gla`, K = V = 64, forward", "0.50", "2.00", "4.0", "1/4 1x1000")]
    assert regimes.lines == [("`gla`, K = V = 64, forward", "–", "–", "–", "–")]
    assert cells.head == ("heads, packing", "gla 64")
    assert cells.lines == [("1/2 1x1000", "1.00"), ("1/2 10x100", "2.00"), ("1/4 1x1000", "4.00")]
    assert worst.lines[0] == ("gla 64 forward 1/4 1x1000", "0.008", "4.0")
    assert packed.lines == [("`gla`, K = V = 64, forward", "1.25", "1.25", "1/2 10x100")]
    assert beside.lines == [("`gla`, K = V = 64, forward", "fla", "0.32", "2 of 2", "0.40", "1/2 10x100, batch")]


def test_bounds_of_the_regimes():
    """Nanoseconds a token and head: 1 at best, times what the row is named for."""
    tokens = 8 * 4096 * 16 * 1e-6
    rows = [
        grid_row("8x4096", tokens, HV=16),
        grid_row("128x256", 1.2 * tokens, HV=16),
        grid_row("8x1024", 1.4 * tokens / 4, HV=16),
        grid_row("1x32768", 2.0 * tokens, HV=16),
        grid_row("1x32768", 9.0 * tokens / 4, HV=4),  # no regime's
        grid_row("1000x33", 3.0 * 33000 * 16 * 1e-6, HV=16),
        grid_row("1x32768", 5.0 * tokens, HV=16, batch=True),  # a batch tells of packing only
    ]
    _, regimes, *_ = grid.sections(results_of(*rows))
    assert regimes.lines == [("`gla`, K = V = 64, forward", "1.40, 2 of 3", "2.00, 1 of 1", "3.00, 0 of 1", "1.20")]
    assert regimes.head[1] == "64 sequences × heads of 256 tokens or more: ≤ 1.3"


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("table",), "table: expected one CSV file, got none"),
        (("table", "a.csv", "b.csv"), "table: expected one CSV file, got a.csv, b.csv"),
        (("table", "nowhere.csv"), "nowhere.csv: No such file or directory"),
        (("table", "TABLE", "--device", "tpu"), "--device tpu: torch arrays live on cpu or cuda here, not on tpu"),
        (("table", "TABLE", "--rows", "8k", *ON_CPU), "--rows 8k: no row has such a name; the first is 'forward 1/2 1x40'"),
        (("table", "TABLE", "--resume", "gone.json", *ON_CPU), "gone.json: No such file or directory"),
        (("table", "TABLE", "--shape", "T=8"), "--shape goes with operators, scale, layer and model, not with table"),
        (("grid", "glaa"), "grid: unknown family 'glaa': did you mean 'gla'? known are gated_delta_rule, kda,"),
        (("grid", "gla", "--what", "fwd"), "--what goes with operators, layer and model, not with grid"),
        (("chunk_gla", "--rows", "x"), "--rows goes with table, grid and parts, not with chunk_gla"),
        (
            ("overhead", "--budget", "20"),
            "--budget goes with table, grid, parts, scale, layer, model and overhead --device cuda, not with overhead",
        ),
        (
            ("overhead", "--warm", "2"),
            "--warm goes with table, grid, parts, scale, layer, model and overhead --device cuda, not with overhead",
        ),
        (
            ("overhead", "--html", "x.html"),
            "--html goes with operators, table, grid, parts, scale, layer, model, overhead --device cuda and report, not with",
        ),
        (("overhead", "--device", "tpu"), "--device tpu: torch arrays live on cpu or cuda here, not on tpu"),
        (("layer", "--backend", "torch"), "--backend goes with operators, table, grid, scale and overhead --device cuda, not"),
        (
            ("report", "x.json", "--seed", "1"),
            "--seed goes with operators, table, grid, parts, scale, layer, model and overhead",
        ),
        (
            ("overhead", "glaa", "--device", "cuda"),
            "overhead: unknown family 'glaa': did you mean 'gla'? known are delta_rule,",
        ),
        (
            ("overhead", "--resume", "x.json"),
            "--resume goes with table, grid, scale and overhead --device cuda, not with overhead",
        ),
    ],
)
def test_wrong_arguments(run, table, words, message):
    done = run(*(str(table) if word == "TABLE" else word for word in words))
    assert done.exit_code == 2
    assert message in said(done)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.parametrize("words", [("table", "TABLE"), ("grid",), ("overhead", "--device", "cuda")])
def test_without_a_device(run, table, words):
    done = run(*(str(table) if word == "TABLE" else word for word in words))
    assert done.exit_code == 2
    assert "--device cuda: torch sees no CUDA device" in said(done)


def test_table_through_the_command(run, table, tmp_path):
    files = {name: tmp_path / name for name in ("x.json", "x.html", "plots")}
    first = run("table", str(table), *ON_CPU, "--rows", "forward*", "--out", str(files["x.json"]))
    assert first.exit_code == 0, first.output
    rows = environment.read(files["x.json"])["results"]["rows"]
    assert [row["found"]["linattn:torch"]["status"] for row in rows] == ["ok"] * 3
    again = ("--resume", str(files["x.json"]), "--out", str(files["x.json"]))
    shown = ("--html", str(files["x.html"]), "--png", str(files["plots"]))
    done = run("table", str(table), *ON_CPU, *again, *shown)
    assert done.exit_code == 0, done.output
    both = environment.read(files["x.json"])["results"]["rows"]
    assert both[:3] == rows
    assert both[3]["found"]["linattn:torch"]["ms"] < both[3]["found"]["linattn:torch"]["with_forward"]
    assert "linattn:torch: time over the best peer's" in done.stdout
    assert "Every peer's figure is the published one." in done.stdout
    assert "flash-qla is not installed" in done.stdout
    assert len(list(files["plots"].iterdir())) == 2
    page = Collector()
    page.feed(files["x.html"].read_text())
    assert (page.tags.count("svg"), page.addresses, "script" in page.tags) == (2, [], False)
    assert run("report", str(files["x.json"])).stdout in done.stdout
    lines = files["x.json"].read_text().splitlines()
    assert len([line for line in lines if line.lstrip().startswith('{"name"')]) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"benchmark": "grid"}, "expected results of table, got those of grid"),
        ({"settings": {"device": "cuda"}}, "device was cuda there, and is cpu now"),
    ],
)
def test_runs_that_are_another_are_not_gone_on_with(run, table, tmp_path, content, message):
    path = tmp_path / "old.json"
    held = environment.document(content.get("benchmark", "table"), {"rows": [], "settings": content.get("settings", {})})
    environment.keep(path, held)
    done = run("table", str(table), "--resume", str(path), *ON_CPU)
    assert done.exit_code == 2
    assert f"--resume {path}: {message}".replace(" ", "") in said(done).replace(" ", "")  # a long path is broken


def test_rows_that_nobody_timed_are_counted_and_not_kept(run, table, tmp_path, monkeypatch):
    def first_only(entries, *rest):
        progress = sweep.Progress([entry.row() for entry in entries], left=len(entries) - 1)
        progress.rows[0]["found"]["linattn:torch"] = {"status": "ok", "ms": 0.1, "spread": 0.0}
        return progress

    monkeypatch.setattr(sweep, "run", first_only)
    path = tmp_path / "x.json"
    run("table", str(table), *ON_CPU, "--out", str(path))
    results = environment.read(path)["results"]
    assert [row["name"] for row in results["rows"]] == ["forward 1/2 1x40"]
    assert results["left"] == 3


def test_a_table_that_is_wrong_fails_the_command(run, table, monkeypatch):
    monkeypatch.setattr(sweep.checks, "check", lambda *_: {"ok": False, "worst": None})
    done = run("table", str(table), *ON_CPU, "--rows", "forward 2/2 *")
    assert done.exit_code == 1
    assert "wrong" in done.stdout


def test_grid_through_the_command(run, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "WIDTHS", {"simple_gla": (16,), "delta_rule": (16,)})
    monkeypatch.setattr(grid, "HEADS", ((1, 1), (1, 2)))
    monkeypatch.setattr(grid, "PACKINGS", ((20,), (12, 8), (7, 7, 7)))
    monkeypatch.setattr(grid, "COVER", (((1, 2), (20,)),))
    path = tmp_path / "x.json"
    done = run("grid", *ON_CPU, "--no-check", "--warm", "1", "--no-peers", "--out", str(path), "--png", str(tmp_path / "plots"))
    assert done.exit_code == 0, done.output
    rows = environment.read(path)["results"]["rows"]
    assert len(rows) == 2 * 2 * 2 * (3 + 2)
    assert all(row["found"]["linattn:torch"]["status"] == "ok" for row in rows)
    assert "packed over a batch of the same sequences" in done.stdout
    assert len(list((tmp_path / "plots").iterdir())) == 2
    text = sections.markdown(reports.sections("grid", environment.read(path)["results"]))
    assert text.count("| heads, packing | simple_gla 16 | delta_rule 16 |") == 2


def test_first_calls_are_not_waited_for_longer_than_they_may_take(case):
    heard = []
    calls = warm.of_cases([(case("chunk_gla", T=8), Linattn("torch"))])
    found = warm.first_calls(calls, 1, lambda *done: heard.append(done), seconds=0.01)
    assert found == warm.Warmed(1, ["linattn:torch chunk_gla fwd"])
    assert (heard, multiprocessing.active_children()) == ([], [])


def test_first_calls_are_those_that_are_timed_in_time(run, tmp_path, monkeypatch):
    """Neither what an earlier run has timed nor more than the budget is enough for."""
    monkeypatch.setattr(grid, "WIDTHS", {"simple_gla": (16,)})
    monkeypatch.setattr(grid, "HEADS", ((1, 1),))
    monkeypatch.setattr(grid, "PACKINGS", tuple((20 + i,) for i in range(9)))
    monkeypatch.setattr(grid, "COVER", ())
    monkeypatch.setattr(sweep, "timed", lambda *_: {"status": "ok", "ms": 1.0, "spread": 0.0})
    heard = []
    monkeypatch.setattr(warm, "first_calls", lambda calls, *_, **__: heard.append(calls) or warm.Warmed(len(calls), []))
    path, timed = tmp_path / "x.json", ("grid", *ON_CPU, "--no-check", "--no-peers", "--warm", "1")
    done = run(*timed, "--rows", "* 1/1 1x2[0-2]", "--out", str(path))
    assert done.exit_code == 0, done.output
    done = run(*timed, "--resume", str(path), "--budget", "10", "--seconds", "2.5")
    assert done.exit_code == 0, done.output
    cases = [[Case.from_json(json.loads(call.request)["case"]) for call in calls] for calls in heard]
    assert [[(case.size["T"], case.what) for case in each] for each in cases] == [
        [(20, "fwd"), (20, "fwdbwd"), (21, "fwd"), (21, "fwdbwd"), (22, "fwd"), (22, "fwdbwd")],
        [(20, "fwd"), (20, "fwdbwd"), (21, "fwd"), (21, "fwdbwd")],  # as batches of one
    ]


def test_first_calls_are_mixed_among_neighbours():
    calls = [warm.FirstCall(str(i), str.strip, "") for i in range(50)]
    places = [int(call.spoken) for call in warm.mixed(calls, 20)]
    assert sorted(places) == [*range(50)]
    assert places != sorted(places)
    assert [sorted(places[i : i + 20]) for i in (0, 20, 40)] == [[*range(20)], [*range(20, 40)], [*range(40, 50)]]


def call(name, builds=""):
    return warm.FirstCall(name, str.strip, "", builds)


def test_nobody_waits_for_what_another_process_builds():
    line = [call("ours 1"), call("peer 1", "peer"), call("peer 2", "peer"), call("ours 2"), call("other 1", "other")]

    def begun(line, making, built, processes=3):
        return [each.spoken for each in warm.may_begin(line, making, {"", *built}, processes)]

    assert begun(line, [], []) == ["ours 1", "peer 1", "ours 2"]
    assert begun(line[2:], [line[1]], []) == ["ours 2", "other 1"]
    assert begun(line[2:], [line[0]], ["peer"]) == ["peer 2", "ours 2"]
    assert begun([line[2]], [line[1]], []) == []
    assert begun(line, line[:3], [], 3) == []


def test_the_first_call_of_a_peer_is_made_before_its_others(case):
    calls = warm.of_cases([(case("chunk_gla", T=T), Linattn("numpy")) for T in (8, 9, 10)])
    assert [each.builds for each in calls] == [""] * 3
    heard = []
    found = warm.first_calls([each._replace(builds="peer") for each in calls], 2, lambda *done: heard.append(done))
    assert found == warm.Warmed(3, [])
    assert heard == [(1, 3), (2, 3), (3, 3)]


def die(request):
    os._exit(3)


def test_first_calls_that_nobody_is_left_to_make_are_said():
    calls = [call("fine"), warm.FirstCall("a call that kills", die, "", "peer"), call("never", "peer")]
    found = warm.first_calls(calls, 1)
    assert (found.calls, found.left) == (3, ["a call that kills", "fine", "never"])
    assert found.ended.startswith("A process in the process pool was terminated abruptly")


def give_up(request):
    raise SystemExit("no compiler")


def test_a_first_call_that_gives_up_leaves_the_others():
    calls = [call("fine"), warm.FirstCall("a call that gives up", give_up, "", "peer"), call("another", "peer")]
    assert warm.first_calls(calls, 1) == warm.Warmed(3, [])


def test_first_calls_say_where_they_are(monkeypatch):
    """On a terminal that is a bar; in a log, lines."""

    def first_calls(calls, processes, told, *, seconds, tune):
        assert (processes, seconds, tune) == (3, 30.0, 1)
        told(1, 2)
        return warm.Warmed(2, ["fla chunk_gla fwd"], "one died")

    monkeypatch.setattr(warm, "first_calls", first_calls)
    monkeypatch.setattr(commands, "SPOKEN_EVERY", -1.0)
    log = io.StringIO()
    asked = commands.Asked({}, (), 0.1, budget=60.0, warm=3)
    commands.heat([], asked, commands.Console(file=log, width=80), 1)
    assert log.getvalue().splitlines() == [
        "first calls: 1 of 2 in 0 s",
        "2 first calls in 0 s",
        "no more first calls: one died",
        "not waited for: fla chunk_gla fwd",
    ]


def test_several_runs_of_a_table_are_not_joined(run, tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        environment.keep(path, environment.document("table", results_of()))
    told = said(run("report", *map(str, paths)))
    assert "report: expected results files of one of operators, parts, layer, model, or one file of table, grid, host" in told


def test_a_row_is_json(entries):
    row = replace(entries[0], case=replace(entries[0].case, states=False)).row()
    assert json.loads(json.dumps(row)) == row
    assert packing.parsed(row["sequence_lengths"]) == (40,)
