"""Every kernel compiles: the interpreter, which runs all other tests, takes code that the compiler refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from linattn.spec import FAMILIES

pytest.importorskip("triton")


def run(script, tmp_path, *arguments):
    """What a script beside this file prints, in a process in which Triton is not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *arguments],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "ssd"])  # which is lowered to simple_gla
def test_kernels_compile(family, tmp_path):
    """For Hopper."""
    plain, gluon, *mixed = (int(word) for word in re.findall(r"\d+", run("compile_for_hopper.py", tmp_path, family)))
    assert plain > (0 if family == "mixed_attn" else 3)
    assert mixed[0] > 10
    in_gluon = ("linear_attn", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "dplr")
    assert (gluon > 3) == (family in in_gluon)


@pytest.mark.parametrize(
    ("family", "capability", "width", "dtype", "KB"),
    [
        ("gla", "8.9", 128, "bfloat16", 99),
        ("kda", "8.9", 128, "bfloat16", 99),
        ("mixed_attn", "8.9", 256, "float32", 99),
        ("gated_delta_rule", "9.0", 256, "bfloat16", 227),
    ],
)
def test_kernels_fit_into_a_block(family, capability, width, dtype, KB, tmp_path):
    """Where shared memory is least, and where tiles are largest."""
    size, kernel = run("shared_memory.py", tmp_path, family, capability.replace(".", ""), str(width), dtype).split()
    assert int(size) <= KB << 10, kernel


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_kernels_of_rows_are_what_memory_wants(capability, tmp_path):
    """Wide accesses, registers that hold what they should, and sums without atomics."""
    made = [line.split() for line in run("compile_rows.py", tmp_path, capability, tmp_path).splitlines()]
    assert {name for name, *_ in made} == {
        "conv_outputs_fwd", "conv_final_state_fwd", "conv_gradients_bwd", "conv_initial_state_bwd", "conv_tokens_fwd",
        "norm_outputs_fwd", "norm_gradients_bwd", "column_sums",
    }  # fmt: skip
    for name, registers, stack, widest in made:
        assert (int(registers) <= 176, stack, int(widest) >= 8) == (True, "0", True), name
