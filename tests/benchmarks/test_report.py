"""What a reader sees: the command's messages, the table, the page."""

from __future__ import annotations

import html.parser
import json
import re
import sys

import linattn
import pytest
from linattn_benchmarks import environment, merging, operators, table

pytest.importorskip("torch")

SMALL = ("--shape", "T=16/32,H=2,K=8,V=8", "--no-fresh", "--seconds", "0.01")


def said(done) -> str:
    """The message without its frame."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("chunk_glaa",), "did you mean 'chunk_gla'?"),
        (("chunk_gla", "--dtype", "bf17"), "--dtype bf17: expected float16, bfloat16, float32, float64"),
        (("chunk_gla", "--gate-dtype", "int8"), "--gate-dtype int8: expected"),
        (("chunk_gla", "--gates", "zero"), "--gates zero: expected weak, mixed, model, strong"),
        (("chunk_gla", "--what", "fwd,bwd"), "--what bwd: expected fwd, fwdbwd, decode"),
        (("chunk_gla", "--shape", "T=-1"), "T must be a positive whole number"),
        (("chunk_gla", "--backend", "nobody"), "nobody"),
        (("chunk_gla", "--framework", "tinygrad"), "--framework tinygrad: expected numpy, torch, jax, mlx"),
        (("chunk_gla", "--device", "gpu"), "--device gpu: expected cpu, cuda, tpu, metal"),
        (("chunk_gla", "--device", "metal"), "--device metal: the default device of mlx is cpu here"),
        (("overhead", "chunk_gla"), "overhead takes no operators, got chunk_gla"),
        (("report",), "report: name at least one results file"),
        (("report", "nowhere.json"), "nowhere.json: No such file or directory"),
    ],
)
def test_wrong_arguments(run, words, message):
    if "metal" in words:
        pytest.importorskip("mlx.core")
    done = run(*words)
    assert done.exit_code == 2
    assert message in said(done)


def test_what_linattn_costs_is_printed_or_written(run, tmp_path, monkeypatch):
    found = {"import": {"beyond_numpy_ms": 12.5, "frameworks_loaded": []}, "dispatch_us": {"numpy": 1.5}}
    monkeypatch.setattr("linattn_benchmarks.overhead.run", lambda: found)
    assert json.loads(run("overhead").stdout) == found
    path = tmp_path / "overhead.json"
    assert run("overhead", "--out", str(path)).stdout == f"wrote {path}\n"
    assert environment.read(path)["results"] == found


def test_other_files_are_refused(run, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": 0}))
    assert f"expected a results file of schema {environment.SCHEMA}, got 0" in said(run("report", str(path)))
    path.write_text("{")
    assert f"{path}: not JSON: " in said(run("report", str(path)))
    path.write_text(json.dumps({"schema": environment.SCHEMA, "benchmark": "overhead"}))
    known = "operators, table, grid, host, parts, scale, layer, model"
    text = f"{path}: report shows results files of {known}, and this is one of overhead"
    assert text in said(run("report", str(path)))


@pytest.mark.parametrize("results", [None, {}, {"ceilings": {}, "rows": [{}]}, {"ceilings": {}, "rows": None}])
def test_damaged_files_are_named(run, tmp_path, results):
    path = tmp_path / "part.json"
    path.write_text(json.dumps(environment.document("operators", results)))
    text = f"{path}: expected what linattn bench --out writes: parts of its environment or rows are missing"
    assert text in said(run("report", str(path)))


@pytest.mark.parametrize("flag", ["--html", "--png"])
def test_without_what_draws_plots_nothing_is_measured(run, tmp_path, monkeypatch, flag):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("page", "plots"):
        monkeypatch.delitem(sys.modules, f"linattn_benchmarks.{name}", raising=False)
        monkeypatch.delattr(f"linattn_benchmarks.{name}", raising=False)
    monkeypatch.setattr(operators, "run", None)
    done = run("chunk_gla", flag, str(tmp_path / "x"))
    assert done.exit_code == 2
    assert "--html and --png need matplotlib: pip install 'linattn[bench]'" in said(done)


def test_a_wrong_backend_fails_the_command(run):
    from test_operators import Off

    linattn.register_backend(Off)
    done = run("chunk_gla", "--backend", "off", "--what", "fwd", "--no-peers", *SMALL)
    assert done.exit_code == 1
    assert "WRONG" in done.output


def test_only_the_peers_that_were_named_are_timed(run, tmp_path):
    path = tmp_path / "x.json"
    call = ("chunk_gla", "--backend", "torch", "--what", "fwd", *SMALL, "--out", str(path))
    assert run(*call, "--peer", "jla", "--peer", "softmax (SDPA)").exit_code == 0
    assert {row["library"] for row in environment.read(path)["results"]["rows"]} == {"linattn", "jla", "softmax (SDPA)"}
    assert "--peer fls: expected fla, jla, FlashQLA, FlashInfer, cuDNN, softmax (SDPA)" in said(run(*call, "--peer", "fls"))


def test_a_run_that_is_cut_off_leaves_what_it_had(run, tmp_path, monkeypatch):
    rows = iter([operators.one_row])

    def one_row(*args):
        return next(rows, cut_off)(*args)

    def cut_off(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(operators, "one_row", one_row)
    run("chunk_gla", "--backend", "torch", "--what", "fwd", "--no-peers", *SMALL, "--out", str(tmp_path / "x.json"))
    (row,) = environment.read(tmp_path / "x.json")["results"]["rows"]
    assert (row["status"], row["case"]["sizes"]["T"]) == ("ok", 16)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_several_runs_become_one_file(run, tmp_path):
    """A call that two of them timed is one row: the first times, and the first call that only the second looked at."""
    first, second, both = (tmp_path / name for name in ("first.json", "second.json", "both.json"))
    call = ("chunk_gla", "--backend", "torch", "--no-peers", "--shape", "T=16,H=2,K=8,V=8", "--seconds", "0.01")
    run(*call, "--what", "fwd", "--no-fresh", "--out", str(first))
    run(*call, "--what", "fwd,fwdbwd", "--fresh", "--out", str(second))
    done = run("report", str(first), str(second), "--out", str(both))
    assert done.exit_code == 0, done.output
    (alone,), (again, other) = (environment.read(path)["results"]["rows"] for path in (first, second))
    joined = environment.read(both)
    assert joined["environment"]["packages"] == environment.read(first)["environment"]["packages"]
    assert alone["first_call_s"] is None
    taken = {name: again[name] for name in ("first_call_s", "peak_bytes", "peak_of")}
    assert joined["results"]["rows"] == [alone | taken, other]


def test_of_two_rows_of_a_call_the_wrong_one_counts():
    """And a failure gives way to figures; what is shown is a row as it was measured."""
    failed = {"library": "fla", "backend": None, "case": {"seed": 1}, "ms": None, "status": "failed", "first_call_s": None}
    timed = failed | {"case": {"seed": 2}, "ms": {"median": 1.0}, "status": "ok"}
    wrong = failed | {"case": {"seed": 3}, "ms": {"median": 2.0}, "status": "wrong", "first_call_s": 3.0}

    def joined(*rows):
        return merging.joined(rows, merging.CALLS["operators"])

    assert joined(failed, timed) == joined(timed, failed) == [timed]
    assert joined(wrong, timed) == joined(timed, wrong) == [wrong]


def test_runs_in_different_environments_are_not_joined(run, tmp_path):
    for name, version in (("a.json", "2.11.0"), ("b.json", "2.13.0")):
        content = environment.document("operators", {"ceilings": {}, "rows": []})
        content["environment"] |= {"packages": {"torch": version}, "load": float(version[2:4])}
        environment.keep(tmp_path / name, content)
    done = run("report", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert done.exit_code == 2
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    text = f"report: {second} comes from another environment than {first}: torch is 2.13.0, not 2.11.0"
    assert text in said(done)


def test_runs_that_were_held_to_other_cores_are_joined():
    one = {"cores": 32, "load": 1.0, "packages": {}, "device": "x"}
    assert merging.shared({"a": one, "b": one | {"cores": 8, "load": 3.0}}) == one | {"cores": 8, "load": 3.0}


def test_all_numbers_of_configurations_that_runs_were_tuned_by_are_kept():
    def tuned(*runs):
        return merging.tuned({"results": {"settings": {"device": "cuda", "tune": tune}}} for tune in runs)

    assert tuned(3, [6, 3], None) == {"settings": {"device": "cuda", "tune": [3, 6, None]}}
    assert tuned(3, 3) == {}
    assert merging.tuned([{"results": {}}]) == {}


def test_what_only_some_had_installed_is_part_of_the_environment():
    one = {"python": "3.12", "packages": {"torch": "2.11.0"}, "cores": 8, "load": 1.5}
    other = {"python": "3.12", "packages": {"torch": "2.11.0", "flash-qla": "0.1.3"}, "cores": 8, "load": 60.0}
    assert merging.shared({"a": one, "b": other}) == other


class Collector(html.parser.HTMLParser):
    """Every tag, and every address that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "data") and not value.startswith("#"):
                self.addresses.append(value)


def test_table_json_page_and_plots(run, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("x.json", "x.html", "plots")}
    done = run(
        *("chunk_gla", "chunk_delta_rule", "--backend", "torch", "--what", "fwd,decode", *SMALL),
        *("--out", str(files["x.json"]), "--html", str(files["x.html"]), "--png", str(files["plots"])),
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"chunk_gla +B1 T32 H2 K8 V8 +fwd +linattn:torch", done.stdout)
    assert re.search(r"decode_delta_rule +B1 T1 H2 K8 V8 +decode +linattn:torch", done.stdout)
    assert "fla skipped: flash-linear-attention is not installed" in done.stdout
    rows = environment.read(files["x.json"])["results"]["rows"]
    assert len(rows) == (2 * 2 + 2) * 7
    assert sorted(path.name for path in files["plots"].iterdir()) == [
        "ratio-to-floor.png",
        "time-chunk-delta-rule-fwd-b1-h2-k8-v8.png",
        "time-chunk-gla-fwd-b1-h2-k8-v8.png",
    ]
    check_page(files["x.html"].read_text())
    again = run("report", str(files["x.json"]))
    assert again.stdout.splitlines()[1] == next(line for line in done.stdout.splitlines() if line.startswith("operator"))


def check_page(text: str):
    """Self-contained: no script, nothing fetched; the plots are in it."""
    page = Collector()
    page.feed(text)
    assert page.tags.count("svg") == 3
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.addresses == []
    assert not re.search(r"url\((?!#)|@import", text)
    assert "decode_delta_rule" in text


def test_page_escapes_what_others_wrote():
    from linattn_benchmarks import page

    row = {"operator": "chunk_gla", "what": "fwd", "label": "", "library": "x", "backend": None, "ran": None}
    row |= {"status": "failed", "reason": "<script>alert(1)</script>", "note": None, "ms": None}
    measured = {"name": "a", "device": "cpu", "threads": 1, "load": 0.5, "copy_bytes_per_s": 1e9}
    measured |= {"matmul_flops_per_s": 1e12, "matmul_dtype": "float32"}
    text = page.html(environment.document("operators", {"ceilings": measured, "rows": [row]}))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.parametrize(("ms", "text"), [(0.01234, "0.0123"), (1.5, "1.5"), (123.4, "123"), (4567.8, "4568")])
def test_milliseconds(ms, text):
    assert table.milliseconds(ms) == text
