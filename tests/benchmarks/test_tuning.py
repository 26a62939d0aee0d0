"""Autotuners of Triton's kernels within the time of a benchmark: what they compile, time, choose and keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from linattn_benchmarks import tuning

pytest.importorskip("triton")

PROGRAM = """
import json, pathlib, sys

import torch, triton
import triton.language as tl
from linattn_benchmarks import tuning
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

ran, timed = [], []


class Device:
    "An H100 as far as the compiler is concerned."

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def do_bench(call, quantiles, warmup, rep):
    call()
    timed.append(ran[-1])
    return [abs(ran[-1] - 4.0)] * 3


driver.set_active(Device())
CompiledKernel.launch_metadata = lambda self, *arguments: None
CompiledKernel.run = property(lambda self: lambda *arguments: ran.append(self.metadata.num_warps))
CompiledKernel._init_handles = lambda self: None
CompiledKernel.function = None
triton.testing.do_bench = do_bench


@triton.autotune([triton.Config({}, num_warps=n) for n in (8, 1, 2, 4)], key=["N"], cache_results=True)
@triton.heuristics({"EVEN": lambda given: given["N"] % 2 == 0})
@triton.jit
def double(x, N, EVEN: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(x + i, tl.load(x + i) * 2)


def told():
    double[lambda given: (1,)](torch.zeros(16), 16)
    cubins = len([*pathlib.Path(sys.argv[1]).rglob("*.cubin")])
    found = {"timed": [*timed], "ran": ran[-1], "cubins": cubins}
    ran.clear(), timed.clear(), double.cache.clear()
    return found


turns = pathlib.Path(sys.argv[1], "turns")
with tuning.untuned():
    first = told()
with tuning.together(turns, 3):
    few = told()
with tuning.together(turns, 3):
    kept = told()
with tuning.together(turns, None):
    every = told()
print(json.dumps([first, few, kept, every]))
"""


def test_autotuners(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    (tmp_path / "program.py").write_text(PROGRAM)  # Triton reads the sources of kernels
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    untuned, few, kept, every = json.loads(done.stdout)
    assert untuned == {"timed": [], "ran": 8, "cubins": 1}, "the first that can run, which nobody remembers"
    assert few["timed"][0] == 8
    assert len(few["timed"]) == few["cubins"] == 3
    assert few["ran"] == min(few["timed"], key=lambda warps: abs(warps - 4))
    assert kept == {"timed": [], "ran": few["ran"], "cubins": 3}
    assert every == {"timed": [8, 1, 2, 4], "ran": 4, "cubins": 4}


def test_some_of_the_configurations():
    assert tuning.some([1, 2, 3], None) == tuning.some([1, 2, 3], 3) == [1, 2, 3]
    found = tuning.some(range(100), 5)
    assert len(set(found)) == 5
    assert found[0] == 0
    assert found == tuning.some(range(100), 5)
