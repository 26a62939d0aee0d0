"""The command line, as its user sees it."""

from __future__ import annotations

import linattn
import pytest
from backends_for_tests import named
from linattn import cli
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
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "register_backend" in rows["acme"]
    assert "gla (chunk)" in rows["acme"]
    assert rows["numpy"].split()[1:] == ["linattn", linattn.API_VERSION, "numpy", "all", "ready"]


def test_backends_shows_what_is_broken(run, monkeypatch):
    from linattn import errors
    from linattn.registry import registry

    registry.record("numpy").error = errors.BackendLoadError("backend 'numpy' of somewhere failed to load: OSError: gone")
    done = run("backends")
    assert "unusable: backend 'numpy' of somewhere failed to load: OSError: gone" in done.stdout
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
    import numpy as np

    x = np.ones((2, 16, 4, 8), np.float32)
    plan = linattn.explain("gla", x, x, x, x, gv=x)
    words = ["explain", "gla", "--framework", "numpy", "--with", "gv", "-s", "B=2", "-s", "T=16", "-s", "K=8", "-s", "V=8"]
    assert run(*words).stdout == f"{plan}\n"


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
        (["gla", "-s", "X=3"], "--size X=3: the symbols are B, T, N, P, H, HV, K, V, L; C is --option chunk_size"),
        (["mixed_attn", "-s", "C=16"], "--size C=16: the symbols are B, T, N, P, H, HV, K, V, L; C is --option chunk_size"),
        (
            ["mixed_attn", "--with", "bias", "--option", "chunk_size=x"],
            "chunk_size must be int, a static Python value, got 'x'",
        ),
        (["gla", "--framework", "pytorch"], "unknown framework 'pytorch': known are numpy, torch, jax, mlx"),
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
    found = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    lines = run("doctor").stdout.splitlines()
    (triton,) = [line for line in lines if line.startswith("triton") and "kernels" in line]
    assert triton.split() == ["triton", "missing", "NVIDIA", "kernels", "pip", "install", "'linattn[triton]'"]
    assert any(line.split()[:2] == ["linattn", linattn.API_VERSION] for line in lines)
    assert any(line.startswith("numpy    ") and line.rstrip().endswith("ready") for line in lines)


def test_doctor_is_not_taken_in_by_a_folder(run, monkeypatch):
    monkeypatch.setattr(cli, "OPTIONAL", (("tests", "triton", "NVIDIA kernels"),))
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    (row,) = [line for line in run("doctor").stdout.splitlines() if line.startswith("tests ")]
    assert row.split()[1] == "missing"


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
