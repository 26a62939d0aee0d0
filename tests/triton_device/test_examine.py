"""The examination of kernels on a GPU, run here with the PyTorch backend on a CPU."""

import argparse
import json
import os
import sys
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import examine  # noqa: E402
from roads import ROADS, Lengths  # noqa: E402

FEW = ("decode_ssd", "linear_attn: all tokens")


@pytest.fixture
def run(monkeypatch, capsys):
    """The command in this process, and its status and what it prints; what it looks at it runs in processes of their own."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["examine.py", *arguments, "--device", "cpu", "--backend", "torch"])
        with pytest.raises(SystemExit) as ended:
            examine.main()
        return int(ended.value.code), capsys.readouterr().out

    return run


def test_what_is_found_is_kept_and_not_run_again(tmp_path, run):
    file = tmp_path / "right.json"
    file.write_text(json.dumps({FEW[0]: {"ok": True, "errors": {"o": 0.25}}}))
    status, said = run("right", str(file), *FEW)
    assert (status, said.splitlines()[-1]) == (0, "right: 2 of 2")
    kept = json.loads(file.read_text())
    assert kept[FEW[0]]["errors"] == {"o": 0.25}
    assert set(kept[FEW[1]]["errors"]) == {"o", "dq", "dk", "dv"}


def test_what_finds_no_time_is_said(tmp_path, run):
    said = "BAD decode_ssd not within 0.2 s\nright: 0 of 1\n"
    assert run("right", str(tmp_path / "right.json"), FEW[0], "--within", "0.2") == (1, said)


def test_a_wrong_call_is_found(monkeypatch):
    road = ROADS[FEW[0]]
    assert examine.right(road, "cpu", "torch")["ok"]
    monkeypatch.setattr("linattn.decode_ssd", lambda state, x, D, **given: x * (1.2 if state.dtype == torch.float32 else 1))
    assert not examine.right(road, "cpu", "torch")["ok"]


def test_bits_that_change_are_found(monkeypatch):
    found = examine.over_and_over([FEW[0]], "cpu", "torch", 0.2)
    assert found["ok"]
    assert found["calls"] > 1
    monkeypatch.setattr("linattn.decode_ssd", lambda x, state, **given: x + torch.rand(()))
    assert examine.over_and_over([FEW[0]], "cpu", "torch", 0.2)["differ"] == [FEW[0]]


@pytest.mark.parametrize("name", ROADS)
def test_every_road_is_a_valid_call(name):
    """With sequences as short as can be, for time."""
    lengths = ROADS[name].lengths
    short = replace(lengths, of=tuple(min(n, 3) for n in lengths.of)) if lengths != Lengths((1,), batch=24) else lengths
    assert examine.finite(replace(ROADS[name], lengths=short), "cpu", "torch")["ok"]


def test_kernels_of_partitions_are_known_by_name():
    assert "delta_state_fwd_sm90" in examine.specialised()
    assert "delta_scores_fwd_sm90" not in examine.specialised()


SANITIZER = """#!/bin/sh
while case $1 in --*) true;; *) false;; esac; do options="$options $1"; shift; done
case "$*" in
    *controls.py*copies) exit {copies};;
    *controls.py*) exit {others};;
esac
echo "$options" >>{log}
echo '{{"ok": true}}'
"""


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Puts a tool on the path, which answers calls of some controls with a status and those of others with another one."""
    pytest.importorskip("triton")

    def place(copies, others=0):
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(SANITIZER.format(copies=copies, others=others, log=tmp_path / "log"))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return place


@pytest.fixture
def sanitized(tmp_path, monkeypatch, capsys):
    """Runs a road under the tool: what is said, and the options that the tool had."""
    monkeypatch.setattr(sys, "argv", ["examine.py", "sanitized", str(tmp_path / "racecheck.json"), FEW[0], "--tool=racecheck"])

    def run():
        with pytest.raises(SystemExit) as ended:
            examine.main()
        assert ended.value.code == 0
        return capsys.readouterr().out.splitlines(), (tmp_path / "log").read_text()

    return run


def test_controls_that_a_tool_reports_are_told_and_such_kernels_left_out(tmp_path, sanitizer, sanitized):
    sanitizer(copies=9)
    said, options = sanitized()
    assert said == [
        "control handover             not reported",
        "control ring                 not reported",
        "control captures             not reported",
        "control third                not reported",
        "control copies               reported",
        "control copies and stores    not reported",
        "control sums                 not reported",
        "control product              not reported",
        "control product of copies    reported",
        f"racecheck looks at all kernels but {', '.join(examine.specialised())}",
        f"ok  {FEW[0]} ",
        "sanitized: 1 of 1",
    ]
    assert all(f"--kernel-name-exclude=kernel_substring={name}" in options for name in examine.specialised())
    kept = json.loads((tmp_path / "racecheck.json").read_text())["controls"]
    assert {name for name, reported in kept.items() if reported} == {"copies", "product of copies"}
    sanitizer(copies=0)
    assert sanitized()[0][:10] == said[:10]


def test_a_tool_that_reports_no_control_looks_at_all_kernels(sanitizer, sanitized):
    sanitizer(copies=0)
    said, options = sanitized()
    assert "racecheck looks at all kernels" in said
    assert options == " --tool=racecheck --error-exitcode=9 --kernel-name-exclude=kernel_substring=at::\n"


def test_a_control_that_fails_is_no_report(sanitizer):
    sanitizer(copies=0, others=3)
    with pytest.raises(RuntimeError, match=r"^control 'ring' under racecheck: $"):
        examine.reported("ring", argparse.Namespace(tool="racecheck", deadline=time.monotonic() + 60))


HAS = {
    "handover": "mbarrier.try_wait",
    "ring": "mbarrier.try_wait",
    "captures": "setmaxnreg.dec",
    "third": "mbarrier.try_wait",
    "copies": "cp.async.mbarrier.arrive.noinc",
    "copies and stores": "cp.async.mbarrier.arrive.noinc",
    "sums": "shfl.sync",
    "product": "wgmma.mma_async",
    "product of copies": "wgmma.mma_async",
}
"""An instruction of each control; others have it, too."""


@pytest.mark.parametrize("name", HAS)
def test_controls_compile_for_hopper(name):
    """On a device they run under a sanitizer alone."""
    pytest.importorskip("triton")
    from controls import CONTROLS
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compiled
    from triton.experimental.gluon._runtime import GluonASTSource

    assert list(CONTROLS) == list(HAS)
    control = CONTROLS[name]
    arrays = "*bf16" if control.dtype == torch.bfloat16 else "*fp32"
    signature = {"x": arrays, "y": arrays, "out": "*fp32", "n": "i32", "TILE": "constexpr"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(3)}
    source = GluonASTSource(control.kernel, signature, {(4,): control.shape[0]}, aligned)
    assert HAS[name] in compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
