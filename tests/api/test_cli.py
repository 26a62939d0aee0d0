"""The command line, as its user sees it."""

from __future__ import annotations

import functools
import re

import linattn
import numpy as np
import pytest
from backends_for_tests import named
from linattn import cli, installed
from linattn.call import FORMS
from linattn.spec import FAMILIES
from packaging.requirements import Requirement
from typer.testing import CliRunner


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))  # what a test adds goes again
    runner = CliRunner()
    return lambda *words: runner.invoke(cli.app, list(words))


def test_backends(run):
    linattn.register_backend(named("acme"))
    done = run("backends")
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.stdout.partition("\n\n")[0].splitlines()}
    assert "register_backend" in rows["acme"]
    assert "gla (chunk)" in rows["acme"]
    assert rows["numpy"].split()[1:] == ["linattn", "numpy", "all", "ready"]


def without_device(device):
    return named("acme", missing_device=lambda self: device())


def test_backends_says_when_there_is_no_device(run):
    linattn.register_backend(without_device(lambda: "an ACME-1"))
    lines = run("backends").stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("acme ")]
    assert row.rstrip().endswith("installed, no device here")
    assert "acme: runs on an ACME-1" in lines


def test_a_backend_that_cannot_say_whether_it_has_a_device_hides_no_other(run):
    linattn.register_backend(without_device(lambda: 1 / 0))
    lines = run("backends").stdout.splitlines()
    assert "acme: missing_device raised ZeroDivisionError: division by zero" in lines
    assert any(line.startswith("numpy ") and line.rstrip().endswith("ready") for line in lines)


@pytest.mark.parametrize("command", ["backends", "doctor"])
def test_tables_fit_a_terminal_of_80_columns(run, command, monkeypatch):
    terminal = functools.partial(installed.Console, force_terminal=True, no_color=True)
    monkeypatch.setattr(installed, "Console", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in run(command).stdout.splitlines()]
    assert any(line.startswith("triton ") for line in lines)
    assert not [line for line in lines if len(line) > 80 and not re.match(r"\w+: ", line)]  # notes are a line each


@pytest.mark.parametrize(
    ("operators", "text"),
    [
        (dict.fromkeys(FAMILIES, FORMS), "all"),
        (dict.fromkeys(FAMILIES, ("chunk",)), "all (chunk)"),
        ({op: FORMS for op in FAMILIES if op != "dplr"}, "all but dplr"),
        ({"gla": ("chunk",), "kda": ("chunk",), "rwkv6": FORMS}, "gla, kda (chunk); rwkv6"),
    ],
)
def test_operators_in_few_words(operators, text):
    kind = type("Backend", (), {f"{form}_{op}": None for op, forms in operators.items() for form in forms})
    assert installed._operators(kind()) == text


def test_version(run):
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"linattn {linattn.API_VERSION}\n")


def test_backends_shows_what_is_broken(run, monkeypatch):
    from linattn import errors
    from linattn.registry import registry

    registry.record("numpy").error = errors.BackendLoadError("backend 'numpy' of somewhere failed to load: OSError: gone")
    done = run("backends")
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("numpy ")]
    assert row.rstrip().endswith("unusable")
    assert "numpy: backend 'numpy' of somewhere failed to load: OSError: gone" in done.stdout.splitlines()
    assert done.exit_code == 0


def test_explain(run):
    done = run("explain", "chunk_simple_gla", "--framework", "numpy", "--dtype", "bf16", "-s", "T=100", "--shape", "g=HV")
    assert done.exit_code == 0
    assert done.stdout == (
        "chunk_simple_gla on numpy cpu bfloat16 B=1 T=100 H=4 K=128 N=1 HV=4 V=128\n"
        "  asked for    auto (default)\n"
        "  runs         numpy.chunk_simple_gla\n"
    )


def test_explain_agrees_with_the_call(run):
    x = np.ones((2, 16, 4, 8), np.float32)
    plan = linattn.explain("gla", x, x, x, x, gv=x)
    words = ["explain", "gla", "--framework", "numpy", "--with", "gv", "-s", "B=2", "-s", "T=16", "-s", "K=8", "-s", "V=8"]
    assert run(*words).stdout == f"{plan}\n"


@pytest.mark.parametrize(("framework", "device"), [("torch", "cuda:3"), ("torch", "mps"), ("jax", "tpu:1"), ("mlx", "metal")])
def test_explain_takes_devices_that_are_not_here(run, framework, device):
    done = run("explain", "gla", "--framework", framework, "--device", device)
    assert f" on {framework} {device.partition(':')[0]} " in done.stdout.splitlines()[0]


def test_explain_heeds_the_environment(run, monkeypatch):
    monkeypatch.setenv("LINATTN_BACKEND", "numpy, auto")
    lines = run("explain", "gla", "--framework", "numpy").stdout.splitlines()
    assert lines[1] == "  asked for    numpy, auto (LINATTN_BACKEND)"
    lines = run("explain", "gla", "--framework", "numpy", "--backend", "numpy").stdout.splitlines()
    assert lines[1] == "  asked for    numpy (argument)"


def test_explain_says_when_nothing_runs(run):
    done = run("explain", "chunk_gla", "--framework", "jax", "--backend", "numpy")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[2:] == [
        "  runs         nothing: no candidate can",
        "  passed over  numpy: takes numpy arrays, not jax",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chunk_glu"], "unknown operator 'chunk_glu': did you mean 'chunk_gla'?"),
        (["gla", "--dtype", "fp8"], "unknown dtype 'fp8': known are fp16, bf16, fp32, fp64, float16"),
        (["gla", "-s", "T"], "--size T: expected SYMBOL=SIZE"),
        (["gla", "-s", "X=3"], "--size X=3: the symbols are B, T, N, P, H, HV, K, V, G, L, D, W; C is --option chunk_size"),
        (
            ["mixed_attn", "-s", "C=16"],
            "--size C=16: the symbols are B, T, N, P, H, HV, K, V, G, L, D, W; C is --option chunk_size",
        ),
        (
            ["mixed_attn", "--with", "bias", "--option", "chunk_size=x"],
            "chunk_size must be int, a static Python value, got 'x'",
        ),
        (["gla", "--framework", "pytorch"], "unknown framework 'pytorch': known are numpy, torch, jax, mlx"),
        (["gla", "--framework", "numpy", "--device", "cpu:abc"], "numpy arrays cannot be on 'cpu:abc': expected one of cpu"),
        (["gla", "--framework", "numpy", "--device", "cuda"], "numpy arrays cannot be on 'cuda': expected one of cpu"),
        (["gla", "--device", "meta"], "torch arrays cannot be on 'meta': expected one of cpu, cuda, xpu, mps, mtia, hpu, npu,"),
        (["gla", "--device", "cuda:x"], "privateuseone, each with a number after a colon or without"),
        (["gla", "--device", "cuda:"], "torch arrays cannot be on 'cuda:'"),
        (
            ["gla", "--framework", "jax", "--device", "metal"],
            "jax arrays cannot be on 'metal': expected one of cpu, gpu,",
        ),
        (
            ["gla", "--framework", "mlx", "--device", "metal:0"],
            "mlx arrays cannot be on 'metal:0': expected one of cpu,",
        ),
        (["gla", "-s", "T=many"], "--size T=many: the size must be a whole number"),
        (["gla", "--with", "beta"], "gla has no array 'beta': it has q, k, v, g, gv, initial_state, cu_seqlens"),
        (["gla", "--shape", "g=HV"], "--shape g='HV': expected one of B T HV K | B T H K"),
        (["gla", "--option", "causal=false"], "--option causal=false: gla has scale, output_final_state, chunk_size"),
        (["gla", "-s", "HV=6"], "HV must be a multiple of the query/key heads H = 4, got HV = 6"),
        (["gla", "--backend", "nunpy"], "unknown backend 'nunpy': did you mean 'numpy'?"),
    ],
)
def test_explain_refuses(run, words, message):
    done = run("explain", *words)
    assert done.exit_code == 2
    text = " ".join(done.stderr.replace("│", " ").split())
    assert message in text


def test_doctor(run, monkeypatch):
    version = installed.metadata.version

    def without_triton(name):
        if name == "triton":
            raise installed.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(installed.metadata, "version", without_triton)
    lines = [line.rstrip() for line in run("doctor").stdout.splitlines()]
    (triton,) = [line for line in lines if line.startswith("triton ") and "kernels" in line]
    assert triton.partition(" ")[2].split("  ")[-1].strip() == "triton is missing"
    assert "triton: pip install 'linattn[triton]'" in lines
    assert "torch: pip install 'linattn[torch]'" not in lines
    assert any(line.split() == ["linattn", linattn.API_VERSION] for line in lines)
    assert any(line.split() == ["numpy", version("numpy")] for line in lines)
    assert any(line.startswith("numpy    ") and line.endswith("ready") for line in lines)


def test_doctor_says_what_every_extra_is_for(run):
    text = run("doctor").stdout
    for extra in installed._extras():
        assert installed.PURPOSES[extra], extra
        assert f"\n{extra} " in text


@pytest.mark.parametrize(
    ("requirement", "complaint"),
    [
        ("numpy>=1.26", None),
        ("numpy>=1000", f"numpy {np.__version__} is not >=1000"),
        ("linattn-of-nobody", "linattn-of-nobody is missing"),
    ],
)
def test_doctor_complains_of_what_is_missing_or_too_old(requirement, complaint):
    assert installed._complaint(Requirement(requirement)) == complaint


def test_a_command_that_breaks_on_import_breaks_no_other(run, monkeypatch):
    class Broken:
        name = "broken-on-import"

        def load(self):
            raise AttributeError("no such function")

    monkeypatch.setattr(cli.importlib.metadata, "entry_points", lambda group: [Broken()])
    cli._add_commands()
    done = run("broken-on-import")
    assert (done.exit_code, done.stderr) == (2, "linattn broken-on-import is not available: no such function\n")


def test_a_command_that_cannot_be_imported_says_so(run):
    cli.app.command(name="broken-for-test")(cli._unavailable("bench", ImportError("No module named 'psutil'")))
    done = run("broken-for-test")
    assert done.exit_code == 2
    assert done.stderr == "linattn bench is not available: No module named 'psutil'\n"
