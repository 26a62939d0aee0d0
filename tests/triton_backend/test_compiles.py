"""Every kernel compiles: the interpreter, which runs all other tests, takes code that the compiler refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import linattn_backends.triton as package
import pytest
import triton
from linattn.spec import FAMILIES

WRITTEN = json.loads(Path(__file__).with_name("compiled.json").read_text())
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
KB_OF_A_BLOCK = {"8.0": 163, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""Shared memory that a block may have, by compute capability."""
REWRITE = "if that is wanted, python tests/triton_backend/compile_everywhere.py --write writes compiled.json anew"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Runs a script beside this file, in a process in which Triton is not interpreted; no kernel is compiled twice."""
    session = tmp_path_factory.getbasetemp()
    folder = session.parent if "PYTEST_XDIST_WORKER" in os.environ else session  # that of all workers
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "triton-cache")
    command = [sys.executable, Path(__file__).with_name("compiling.py")]

    def printed(*script):
        process.stdin.write(json.dumps([str(word) for word in script]) + "\n")
        process.stdin.flush()
        status, output, errors = json.loads(process.stdout.readline())
        assert status == 0, errors[-3000:]
        return output

    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield printed


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile(family, run):
    """For Hopper."""
    plain, gluon, *mixed = (int(word) for word in re.findall(r"\d+", run("compile_for_hopper.py", family)))
    assert plain > (0 if family == "mixed_attn" else 3)
    assert mixed[0] > 10
    in_gluon = ("linear_attn", "simple_gla", "ssd", "gla", "delta_rule", "gated_delta_rule", "kda", "dplr")
    assert (gluon > 3) == (family in in_gluon)


@pytest.mark.parametrize(
    ("family", "capability", "width", "dtype", "KB"),
    [
        ("mixed_attn", "8.9", 256, "float32", 99),
        ("gated_delta_rule", "9.0", 256, "bfloat16", 227),
    ],
)
def test_kernels_fit_into_a_block(family, capability, width, dtype, KB, run):
    """Where shared memory is least, and where tiles are largest."""
    size, kernel = run("shared_memory.py", family, capability.replace(".", ""), str(width), dtype).split()
    assert int(size) <= KB << 10, kernel


@pytest.mark.parametrize(("capability", "K", "V", "dtype"), [("9.0", 130, 90, "float32"), ("8.0", 256, 256, "bfloat16")])
def test_the_assembler_finds_registers_for_states_of_wide_heads(capability, K, V, dtype, run):
    """What it has too few for it compiles for 32, spills all of, and got wrong."""
    made = [line.split() for line in run("wide_heads.py", "dplr", capability, K, V, dtype).splitlines()]
    assert {name for name, *_ in made} == {"delta_state_fwd", "delta_state_bwd"}
    assert [line for line in made if int(line[1]) == 32 or int(line[2]) > 1024] == []


def complaints(capability, made, written):
    """What is wrong with the kernels that were ``made`` for one compute capability, and what is not as it is ``written``."""
    most = KB_OF_A_BLOCK[capability] << 10
    for name, usage in made.items():
        what, was = f"{name} for compute capability {capability}", written.get(name)
        if isinstance(usage, str):
            yield f"{what} does not compile: {usage}"
        elif usage[2] > most:
            yield f"{what} takes {usage[2]} bytes of shared memory, and a block has {most}"
        elif was is None:
            yield f"{what} is not in compiled.json, and takes {told(usage)}: {REWRITE}"
        elif usage != was:
            yield f"{what} is to take {told(was)}, and takes {told(usage)}: {REWRITE}"
    for name in written.keys() - made.keys():
        yield f"{name} is in compiled.json for compute capability {capability}, and is not launched there: {REWRITE}"


def told(usage):
    registers, spilled, shared = usage
    return f"{registers} registers with {spilled} bytes spilled and {shared} of shared memory"


def test_what_is_written_down_is_of_the_release_that_constraints_name():
    (wanted,) = re.findall(r"^triton==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert WRITTEN["triton"] == wanted, f"compiled.json is of another release of Triton: {REWRITE}"


@pytest.mark.skipif(triton.__version__ != WRITTEN["triton"], reason=f"compiled.json is of Triton {WRITTEN['triton']}")
@pytest.mark.parametrize("capability", KB_OF_A_BLOCK)
def test_what_the_compiler_makes_of_plain_kernels_is_written_down(capability, run):
    """Registers, spills and shared memory."""
    made = json.loads(run("compile_everywhere.py", capability))
    assert list(complaints(capability, made[capability], WRITTEN["compiled"][capability])) == []


@pytest.mark.parametrize("capability", KB_OF_A_BLOCK)
def test_what_is_written_down_fits_into_a_block(capability):
    """Also where no test compiles."""
    written = WRITTEN["compiled"][capability]
    assert list(complaints(capability, written, written)) == []


def test_devices_with_little_shared_memory_are_given_kernels_that_take_the_same():
    """What a kernel for 8.0 takes says what it takes for 8.9 and 12.0, so that one of them is enough to compile for."""
    least = KB_OF_A_BLOCK["8.9"] << 10
    assert [name for name, (*_, shared) in WRITTEN["compiled"]["8.0"].items() if shared > least] == []


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ([40, 0, 1024], None),
        ("RuntimeError: PassManager::run failed", "does not compile: RuntimeError: PassManager::run failed"),
        ([40, 0, 101377], "takes 101377 bytes of shared memory, and a block has 101376"),
        (
            [41, 8, 99 << 10],
            "is to take 40 registers with 0 bytes spilled and 1024 of shared memory, and takes 41 registers with 8 bytes "
            f"spilled and 101376 of shared memory: {REWRITE}",
        ),
    ],
)
def test_what_is_said_of_a_kernel_that_is_not_as_it_is_written_down(made, complaint):
    found = list(complaints("8.9", {"zero_tails": made}, {"zero_tails": [40, 0, 1024]}))
    assert found == ([] if complaint is None else [f"zero_tails for compute capability 8.9 {complaint}"])


def test_what_is_said_of_kernels_that_come_and_go():
    what = "for compute capability 8.9"
    assert list(complaints("8.9", {"new": [40, 0, 0]}, {"old": [40, 0, 0]})) == [
        f"new {what} is not in compiled.json, and takes 40 registers with 0 bytes spilled and 0 of shared memory: {REWRITE}",
        f"old is in compiled.json {what}, and is not launched there: {REWRITE}",
    ]


def test_every_plain_kernel_is_written_down():
    """Where shared memory is large, all; elsewhere all but those of states in registers and what follows Hopper's."""
    plain = {name for file, name in re.findall(r" (\w+\.py):(\w+)", package.__doc__) if "_sm90" not in file}
    after_hopper = {"delta_gate_bwd"}
    in_registers = {"diagonal_scan", "diagonal_vector_scan", "ssd_steps_fwd", "ssd_steps_bwd"}
    for capability, kernels in WRITTEN["compiled"].items():
        elsewhere = set() if capability == "9.0" else after_hopper
        assert kernels.keys() == plain - elsewhere - (in_registers if KB_OF_A_BLOCK[capability] < 220 else set())


def test_kernels_of_rows_are_what_memory_wants(tmp_path, run):
    """Wide accesses, registers that hold what they should, and sums without atomics."""
    made = [line.split() for line in run("compile_rows.py", "90", tmp_path).splitlines()]
    assert {name for name, *_ in made} == {
        "conv_outputs_fwd", "conv_final_state_fwd", "conv_gradients_bwd", "conv_initial_state_bwd", "conv_tokens_fwd",
        "norm_outputs_fwd", "norm_gradients_bwd", "features_fwd", "features_bwd", "column_sums",
    }  # fmt: skip
    for name, registers, stack, widest in made:
        assert (int(registers) <= 176, stack, int(widest) >= 8) == (True, "0", True), name


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_kernel_reads_a_register_before_it_is_written(dtype, run):
    """Of tiles of 16 and 32 channels in one kernel, which chunks of 64 tokens gave such code."""
    made = [line.split() for line in run("unwritten_registers.py", dtype).splitlines()]
    assert {"diagonal_states", "diagonal_outputs", "diagonal_gradients_bwd"} <= {name for name, *_ in made}
    assert [each for each in made if len(each) > 1] == []
