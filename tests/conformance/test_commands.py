"""The command and the pytest plug-in, as a vendor's CI runs them."""

import errno
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from linattn_conformance import cli, fresh, packed, reading, recording
from linattn_conformance.cases import every_case
from linattn_conformance.options import check_writable
from linattn_conformance.report import report_hash, results_hash
from linattn_conformance.runner import Runner
from linattn_conformance.worker import Setting
from typer import Typer
from typer.testing import CliRunner

HONEST = "linattn_conformance.broken.on_numpy:Honest"
WRONG = "linattn_conformance.broken.on_numpy:WrongScale"
PATTERN = "gla/chunk/fp32/state/T15-*"
APP = Typer()
APP.command()(cli.conformance)


def run(*arguments, **variables):
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


def conformance(*arguments):
    """The command in this process, which imports everything once; its workers are processes of their own."""
    done = CliRunner().invoke(APP, arguments)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


def test_a_selection_that_passes():
    done = conformance("--backend", HONEST, "--case", PATTERN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cases" in done.stdout
    assert "a selection gives no verdict" in done.stdout


def test_a_selection_that_fails_says_how_to_run_it_again(tmp_path):
    done = conformance("--backend", WRONG, "--case", PATTERN, "--report", str(tmp_path / "report.json"))
    assert done.returncode == 1
    name = "gla/chunk/fp32/state/T15-K24-V40-C16/gradient"
    assert f"linattn conformance --backend {WRONG} --device cpu --case '{name}'" in done.stdout
    assert {result["status"] for result in json.loads((tmp_path / "report.json").read_text())["results"]} == {"failed"}


def test_a_selection_is_one_of_the_profile():
    core, all_of_it = (
        conformance("--backend", HONEST, "--profile", profile, "--case", "gla/*", "--list").stdout.split()
        for profile in ("core", "full")
    )
    assert core == [name for name in all_of_it if name in set(core)]
    assert 0 < len(core) < len(all_of_it) / 2
    assert not any(name.endswith("/gradient") for name in core)
    assert any(name.endswith("/gradient") for name in all_of_it)


def test_a_selection_of_fresh_cases():
    """Of the seed that is given, by a pattern; without one there are none."""
    chosen = ("--backend", HONEST, "--profile", "core", "--case", "gla/chunk/fp32/*", "--list")
    plain, seeded = (conformance(*chosen, *seed).stdout.split() for seed in ((), ("--seed", "14")))
    fresh = [name for name in seeded if "-seed.14/" in name]
    assert fresh
    assert [name for name in seeded if name not in fresh] == plain
    refused = conformance("--backend", HONEST, "--case", "gla/*seed.14/*")
    assert refused.returncode == 2


def test_a_selection_that_another_profile_has():
    refused = conformance("--backend", HONEST, "--profile", "core", "--case", PATTERN)
    assert refused.returncode == 2
    complaint = f"--case {PATTERN}: no case of profile core for numpy on cpu matches: of profile full 2 would (--profile full)"
    assert complaint.replace(" ", "") in "".join(refused.stderr.replace("│", " ").split())


def test_listing_runs_nothing():
    done = conformance("--backend", HONEST, "--profile", "core", "--list")
    assert done.returncode == 0
    assert "gla/chunk/fp32/plain/T65-K24-V40/forward" in done.stdout.splitlines()
    assert not any(line.endswith("/gradient") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--backend", "nunpy"], "did you mean 'numpy'?"),
        (["--backend", "numpy", "--profile", "most"], "unknown profile 'most'"),
        (["--backend", "numpy", "--tighten", "2"], "never widened"),
        (["--backend", "numpy", "--framework", "torch"], "takes numpy arrays, not torch"),
        (["--backend", "numpy", "--case", "nothing"], "--case nothing: no case of profile full for numpy on cpu matches"),
        (
            ["--backend", "numpy", "--case", PATTERN, "--case", "nothing"],
            "--case nothing: no case of profile full for numpy on cpu matches",
        ),
        (["--backend", "numpy", "--workers", "-1"], "--workers -1: expected a number not below 0"),
        (["--backend", "numpy", "--time-limit", "0"], "--time-limit 0: expected a number above 0"),
        (["--backend", "numpy", "--memory-limit", "-1"], "--memory-limit -1: expected a number not below 0"),
        (["--backend", "numpy", "--budget", "nan"], "--budget nan: expected a number not below 0"),
        (["--backend", "numpy", "--report", "nowhere/report.json"], "--report nowhere/report.json: No such file or directory"),
        (["--backend", "numpy", "--report", "."], "--report .: Is a directory"),
        (["--backend", "numpy", "--device", "cuda"], "NumPy has no device 'cuda': expected cpu"),
        (["--backend", "numpy", "--device", "cpu:abc"], "NumPy has no device 'cpu:abc': expected cpu"),
        (
            ["--backend", "numpy", "--known-failures", "nowhere.toml"],
            "--known-failures nowhere.toml: there is no such file",
        ),
        (["--backend", "numpy", "--environment", "fast"], "--environment fast: expected NAME=VALUE"),
        (["--backend", "numpy", "--resume", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--backend", "numpy", "--case", PATTERN, "--again", "*"], "--again: expected with --resume"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_usage(arguments, complaint):
    done = conformance(*arguments)
    assert done.returncode == 2
    assert complaint in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("framework", "device", "complaint"),
    [
        ("torch", "nowhere", "no torch array can be made on device 'nowhere': Expected one of cpu, cuda, "),
        ("torch", "meta", "no torch array can be made on device 'meta': Cannot copy out of meta tensor; no data!"),
        ("jax", "nowhere", "no jax array can be made on device 'nowhere': Unknown backend nowhere. "),
        ("jax", "cpu:7", "JAX has no device 'cpu:7' here: expected cpu:0 to cpu:"),
    ],
)
def test_a_device_that_is_not_there(framework, device, complaint):
    pytest.importorskip(framework)
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Runner(framework, device=device)


def test_a_report_can_be_written_before_anything_is_run(tmp_path):
    """And what was there stays until it is replaced."""
    path = tmp_path / "report.json"
    check_writable("--report", path)
    assert not path.exists()
    path.write_text("of yesterday")
    check_writable("--report", path)
    assert path.read_text() == "of yesterday"
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nothing there")
    check_writable("--report", link)
    assert link.is_symlink()


def test_the_command_that_runs_a_case_again_has_all_that_it_depends_on():
    name = "gla/chunk/fp32/plain/T65-K24-V40/forward"
    assert Setting("acme").command(name) == f"linattn conformance --backend acme --device cpu --case '{name}'"
    command = Setting("acme", "jax", "cuda:1", 0.5).command(name)
    assert command == f"linattn conformance --backend acme --device cuda:1 --framework jax --tighten 0.5 --case '{name}'"


def test_a_budget_is_of_the_whole_run():
    """The cases are drawn before it is known which there are, and a report is written when no case is run any more."""
    assert cli.left_for_cases(180.0, 20.0) == 150.0
    assert cli.left_for_cases(20.0, 20.0) == 0.0
    assert cli.left_for_cases(0.0, 20.0) == math.inf


def test_a_run_goes_on_where_its_budget_ended(tmp_path):
    """The second run takes over what the first has done."""
    part, whole = tmp_path / "part.json", tmp_path / "whole.json.gz"
    everything = "--backend", HONEST, "--profile", "core", "--environment", "tuned=no"
    arguments = *everything, "--case", "*/chunk/fp32/plain/T65-K24-V40/forward"
    conformance(*arguments, "--budget", "0.01", "--report", str(part))
    report = json.loads(part.read_text())
    assert {result["status"] for result in report["results"]} == {"not-run"}
    report["results"][0].update(status="passed", message="")
    report["results"][1].update(status="failed", message="as found before")
    part.write_text(json.dumps(report))
    refused = conformance(*arguments, "--resume", str(part))
    assert "its results_hash does not belong to its results: they were edited" in " ".join(
        refused.stderr.replace("│", " ").split()
    )
    report["complaints"] = ["known failure 'kda/*' matches no case", "loading the backend again, the process died"]
    report["results_hash"] = results_hash(report["results"])
    part.write_text(json.dumps({**report, "hash": report_hash(report)}))
    done = conformance(*arguments, "--resume", str(part), "--report", str(whole))
    results = json.loads(packed.read(whole))["results"]
    assert done.returncode == 1
    assert json.loads(packed.read(whole))["complaints"] == ["loading the backend again, the process died"]
    assert [result["id"] for result in results if result["status"] == "failed"] == [report["results"][1]["id"]]
    assert results[1]["message"] == "as found before"
    assert {result["status"] for result in results} == {"failed", "passed", "declared-unsupported"}
    again = report["results"][1]["id"]
    conformance(*arguments, "--resume", str(whole), "--again", f"{again[:-3]}*", "--report", str(part))
    (result,) = [result for result in json.loads(part.read_text())["results"] if result["id"] == again]
    assert (result["status"], result["message"]) != ("failed", "as found before")
    other = report["results"][2]["id"]
    for more, complaint in (
        (["--again", "gla/nothing/*"], f"--again gla/nothing/*: no result in {part} matches"),
        (["--again", again, "--case", other], f"--again {again}: {again} is not among the cases of this run"),
    ):
        refused = conformance(*everything, "--resume", str(part), *more)
        assert refused.returncode == 2
        assert complaint.replace(" ", "") in "".join(refused.stderr.replace("│", " ").split())
    refused = conformance("--backend", HONEST, "--profile", "core", "--resume", str(part))
    assert refused.returncode == 2
    assert "its environment is {'tuned': 'no'}, and here it is {}" in " ".join(refused.stderr.replace("│", " ").split())


STUCK = """
import pathlib, time
from linattn_conformance.broken.on_process import OnProcess

class Stuck(OnProcess):
    name = "stuck"

    def strike(self):
        pathlib.Path(__file__).with_name("hit").touch()
        time.sleep(600)
"""


def terminated(tmp_path, backend, end, *arguments):
    """Exit status and errors of a run that was told to end as soon as it had hit what it waits for, and what was left of it."""
    (tmp_path / "stuck.py").write_text(STUCK)
    (tmp_path / "loading.py").write_text(STUCK + "\nStuck().strike()\n")
    command = [sys.executable, "-m", "linattn_conformance", "--backend", f"{backend}:Stuck", *arguments]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    running = subprocess.Popen(command, env=path, text=True, stderr=subprocess.PIPE, start_new_session=True)
    while not (tmp_path / "hit").exists() and running.poll() is None:
        time.sleep(0.1)
    end(running.pid, signal.SIGTERM)
    complaint = running.communicate(timeout=60)[1]  # whoever is left holds the pipe open
    return running.returncode, complaint


@pytest.mark.parametrize("end", [os.kill, os.killpg], ids=["the command", "its workers too"])
def test_a_run_that_is_terminated_reports_what_it_has_found(end, tmp_path):
    """As batch systems end one whose time is over."""
    report = tmp_path / "report.json"
    cases = "--case", "gla/chunk/fp32/plain/T65-K24-V40/forward", "--case", "gla/chunk/fp32/state/T97-K24-V40/forward"
    assert terminated(tmp_path, "stuck", end, "--report", str(report), *cases) == (1, "")
    results = json.loads(report.read_text())["results"]
    assert [(result["status"], result["message"]) for result in results] == [
        ("passed", ""),
        ("not-run", "not tried: the run was ended by SIGTERM"),
    ]


HALF = """
import pathlib, time
from linattn_conformance.broken.on_process import OnProcess

class Half(OnProcess):
    name = "half"
    healed = property(lambda self: pathlib.Path(__file__).with_name("healed").exists())

    def forward(self, op, arrays, options):
        o, state = super().forward(op, arrays, options)
        return o + (arrays["v"].shape[1] == 65 and not self.healed), state

    def strike(self):
        time.sleep(0 if self.healed else 600)
"""


def test_a_run_that_is_killed_has_left_what_it_had_found(tmp_path, monkeypatch):
    """Its report and a line; what had failed stays in the history when it is run again."""
    first, second = "gla/chunk/fp32/plain/T65-K24-V40/forward", "gla/chunk/fp32/state/T97-K24-V40/forward"
    report, log = tmp_path / "report.json", tmp_path / "log"
    (tmp_path / "half.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = "--backend", "half:Half", "--report", str(report), "--log", str(log), "--case", first, "--case", second
    code = "import typer; from linattn_conformance import cli, recording; recording.EVERY = 0.0; typer.run(cli.conformance)"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen([sys.executable, "-c", code, *arguments], env=path, text=True, stderr=subprocess.PIPE)
    while running.poll() is None and not (report.exists() and '"failed"' in report.read_text()):
        time.sleep(0.05)
    running.kill()
    told = running.communicate(timeout=60)[1]  # whoever is left holds the pipe open
    assert re.fullmatch(r"1 of 2 cases, 1 failed, \d+ s", told.splitlines()[-1])
    left = reading.read(report)
    assert [(result["id"], result["status"]) for result in left["results"]] == [(first, "failed"), (second, "not-run")]
    assert left["results"][1]["message"] == "not tried: the run had not come to it when this was written"
    assert [(run["kind"], run["cases"]) for run in left["history"]] == [("run", 1)]
    assert left["log"] == hashlib.sha256(log.read_bytes()).hexdigest()
    assert reading.verify(left).faults == ()

    (tmp_path / "healed").touch()
    conformance(*arguments, "--resume", str(report))
    whole = reading.read(report)
    assert [result["status"] for result in whole["results"]] == ["failed", "passed"]
    assert [(run["kind"], run["cases"]) for run in whole["history"]] == [("run", 1), ("resume", 1)]
    assert reading.verify(whole).faults == ()
    conformance(*arguments, "--resume", str(report), "--again", first)
    again = reading.read(report)
    assert [result["status"] for result in again["results"]] == ["passed", "passed"]
    (replaced,) = again["history"][2]["replaced"]
    assert (replaced["id"], replaced["status"]) == (first, "failed")
    assert reading.verify(again).faults == ()


def test_a_run_whose_report_cannot_be_written_yet_goes_on(tmp_path, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    record = SimpleNamespace(path=tmp_path / "report.json", found=lambda *_: None, write=full)
    recording.Record.keep(record, [], 0.0)
    assert capsys.readouterr().err == "the report cannot be written now: [Errno 28] No space left on device\n"


def test_nothing_but_files_is_replaced_while_a_run_goes_on(tmp_path):
    """Who reads a pipe has one report, that of the end."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    assert not packed.is_replaced(pipe)
    recording.Record.keep(SimpleNamespace(path=pipe), [], 0.0)
    link.symlink_to(file)
    packed.write(link, "told")
    assert link.is_symlink()
    assert file.read_text() == "told"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_run_that_is_terminated_while_it_loads_leaves_no_process(tmp_path):
    assert terminated(tmp_path, "loading", os.kill) == (128 + signal.SIGTERM, "")


def test_the_core_comes_first():
    mine = [case for case in every_case() if case.op == "gla"]
    cases = cli.core_first(mine)
    assert cases == [case for case in mine if case.core] + [case for case in mine if not case.core]
    cases = cli.by_profile([case for case in every_case() if case.op == "gla"])
    kinds = [(case.core, case.needs_gradient) for case in cases]
    assert list(dict.fromkeys(kinds)) == [(True, False), (True, True), (False, False), (False, True)]


def test_a_run_that_is_cut_short_has_seen_every_operator():
    cases = cli.by_profile(every_case())
    assert sorted(case.id for case in cases) == sorted(case.id for case in every_case())
    rest = [case for case in cases if not case.core and case.needs_gradient]
    operators = {case.operator for case in rest}
    assert {case.operator for case in rest[: len(operators)]} == operators
    groups = [(case.operator, case.dtype, case.flags) for case in rest]
    assert set(groups[: len(set(groups))]) == set(groups)


def test_the_command_needs_no_pytest():
    code = "import sys; sys.modules['pytest'] = None; import linattn_conformance.cli, linattn_conformance.checks"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


def plugin(*arguments):
    """As pytest finds it, without the plug-ins of others, which take seconds to load."""
    words = ["-m", "pytest", "-p", "linattn_conformance", "--noconftest", "-p", "no:cacheprovider"]
    return run(*words, "--pyargs", "linattn_conformance", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_pytest_has_one_item_a_case():
    done = plugin("--linattn-backend", HONEST, "--linattn-case", PATTERN, "-vv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_case[gla/chunk/fp32/state/T15-K24-V40-C16/gradient] PASSED" in done.stdout


def test_pytest_fails_with_the_case():
    done = plugin("--linattn-backend", WRONG, "--linattn-case", PATTERN)
    assert done.returncode == 1
    assert "2 failed" in done.stdout


def test_pytest_exits_with_the_verdict_whatever_it_ran(tmp_path):
    """Deselected cases are not run, so they count as failed."""
    path = tmp_path / "report.json"
    done = plugin(
        "--linattn-backend",
        HONEST,
        "--linattn-profile",
        "core",
        "-k",
        "T65 and chunk and gla and plain",
        "--linattn-report",
        str(path),
    )
    assert "failed" not in done.stdout.partition("linattn verdict")[0]
    assert done.returncode == 1
    assert "linattn verdict: not conformant: core" in done.stdout
    found = reading.read(path)
    assert found["verdict"]["outcome"] == "not conformant"
    left = [result for result in found["results"] if fresh.is_fresh(result["id"])]
    assert {(result["status"], result["message"]) for result in left} == {("not-run", "pytest did not run it")}
    assert f"{left[0]['id']}: not-run: pytest did not run it" in found["verdict"]["problems"]
    assert reading.verify(found).faults == ()


def test_pytest_says_what_is_wrong_with_the_options():
    done = plugin("--linattn-backend", "nunpy")
    assert done.returncode == 4
    assert "did you mean 'numpy'?" in done.stderr


def test_forms_agree_where_there_is_one():
    pytest.importorskip("mlx.core")
    done = conformance("--backend", "mlx_fast", "--case", "gated_delta_rule/chunk/fp32/state/T97-K24-V40/agree")
    assert done.returncode == 0, done.stdout
