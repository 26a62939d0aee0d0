"""The examination of kernels on a GPU, run here with the PyTorch backend on a CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import examine  # noqa: E402
from roads import ROADS, Lengths  # noqa: E402

FEW = ("decode_ssd", "linear_attn: all tokens")


def run(*arguments):
    command = [sys.executable, str(Path(examine.__file__)), *arguments, "--device", "cpu", "--backend", "torch"]
    return subprocess.run(command, capture_output=True, text=True)


def test_what_is_found_is_kept_and_not_run_again(tmp_path):
    file = tmp_path / "right.json"
    file.write_text(json.dumps({FEW[0]: {"ok": True, "errors": {"o": 0.25}}}))
    done = run("right", str(file), *FEW)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "right: 2 of 2"
    kept = json.loads(file.read_text())
    assert kept[FEW[0]]["errors"] == {"o": 0.25}
    assert set(kept[FEW[1]]["errors"]) == {"o", "dq", "dk", "dv"}


def test_what_finds_no_time_is_said(tmp_path):
    done = run("right", str(tmp_path / "right.json"), FEW[0], "--within", "0.2")
    assert (done.returncode, done.stdout) == (1, "BAD decode_ssd not within 0.2 s\nright: 0 of 1\n")


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


def test_the_control_compiles_for_hopper():
    """Its barriers among it: on a device it runs under a sanitizer alone."""
    pytest.importorskip("triton")
    from handover import handover_control
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compiled
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {"x": "*fp32", "out": "*fp32", "n": "i32", "TILE": "constexpr"}
    kernel = compiled(GluonASTSource(handover_control, signature, {(3,): 128}), target=GPUTarget("cuda", 90, 32))
    assert "mbarrier" in kernel.asm["ptx"]
