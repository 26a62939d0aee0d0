"""``linattn run-with``: programs that know nothing of linattn, in processes of their own.

With packages made for the test, whose functions say that they ran; with fla and mlx-lm themselves where they can be had from a
package index; with transformers.
"""

import importlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import suites
from linattn.integrations.run_with import LIBRARIES

TORCH = """
import torch
q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))
g = beta = torch.rand(1, 5, 2)
"""
PROGRAMS = {
    "fla": f"""{TORCH}
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
o, _ = chunk_gated_delta_rule(q, k, v, -g, beta)
o.sum().backward()
print(*o.shape, v.grad.isfinite().all().item())
""",
    "mamba_ssm": f"""{TORCH}
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
o = mamba_chunk_scan_combined(v, g, -torch.ones(2), k, q, 16)
o.sum().backward()
print(*o.shape, v.grad.isfinite().all().item())
""",
    "causal_conv1d": f"""{TORCH}
from causal_conv1d import causal_conv1d_fn
o = causal_conv1d_fn(v.flatten(2).mT, torch.randn(16, 4))
o.sum().backward()
print(*o.shape, v.grad.isfinite().all().item())
""",
    "mlx_lm": """
import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_update
q, k, v = (mx.random.normal((1, 5, 2, 8)) for _ in range(3))
a = b = mx.zeros((1, 5, 2))
rate = bias = mx.zeros((2,))
def loss(v):
    return gated_delta_update(q, k, v, a, b, rate, bias)[0].sum()
print(*v.shape, mx.isfinite(mx.grad(loss)(v)).all().item())
""",
}
"""A step of training by one function of each library."""
SAID = {
    "fla": "1 5 2 8 True\n",
    "mamba_ssm": "1 5 2 8 True\n",
    "causal_conv1d": "1 16 5 True\n",
    "mlx_lm": "1 5 2 8 True\n",
}
FRAMEWORK = {"mlx_lm": "mlx.core"}
PUBLISHED = {
    "fla": ("flash-linear-attention==0.6.0", "fla-core==0.6.0", "einops"),
    "mlx_lm": ("mlx-lm==0.32.2",),
}
"""What of these is nothing but Python."""


def linattn(*arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command; what it runs finds ``packages``."""
    where = os.environ if packages is None else os.environ | {"PYTHONPATH": str(packages)}
    return subprocess.run([sys.executable, "-m", "linattn", *arguments], capture_output=True, text=True, env=where, check=False)


def program(library: str, folder: Path) -> list[str]:
    pytest.importorskip(FRAMEWORK.get(library, "torch"))
    file = folder / "train.py"
    file.write_text(PROGRAMS[library])
    return [sys.executable, str(file)]


def functions_of(library: str) -> list[str]:
    pytest.importorskip(FRAMEWORK.get(library, "torch"))
    return list(importlib.import_module(f"linattn.integrations.{library}").FUNCTIONS)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder for packages made for a test."""
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


def make(library: str, folder: Path) -> None:
    """A package with the library's functions where the library has them; none of them can run."""
    for dotted in functions_of(library):
        module, _, name = dotted.rpartition(".")
        package = folder
        for part in module.split("."):
            package = package / part
            package.mkdir(exist_ok=True)
            (package / "__init__.py").touch()
        with (package / "__init__.py").open("a") as file:
            file.write(f"def {name}(*args, **kwargs):\n    raise SystemExit('theirs ran')\n")
    with (folder / library / "__init__.py").open("a") as file:
        file.write("__version__ = '7.0'\n")


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_program_that_knows_nothing_of_linattn_runs_on_it(library: str, made: Path, tmp_path: Path) -> None:
    command = program(library, tmp_path)
    make(library, made)
    done = linattn("run-with", library, "--", *command, packages=made)
    assert (done.returncode, done.stdout) == (0, SAID[library]), done.stderr
    assert f"linattn: {library} 7.0 on linattn: {', '.join(functions_of(library))}\n" in done.stderr


def test_several_libraries_are_served_in_what_the_program_starts(made: Path, tmp_path: Path) -> None:
    command = program("mamba_ssm", tmp_path)
    for library in ("mamba_ssm", "causal_conv1d"):
        make(library, made)
    (tmp_path / "launch.py").write_text(f"import subprocess\nsubprocess.run({command!r}, check=True)\n")
    with Path(command[1]).open("a") as file:
        file.write(PROGRAMS["causal_conv1d"])
    launch = [sys.executable, str(tmp_path / "launch.py")]
    done = linattn("run-with", "mamba_ssm,causal_conv1d", "--", *launch, packages=made)
    assert (done.returncode, done.stdout) == (0, SAID["mamba_ssm"] + SAID["causal_conv1d"]), done.stderr


@pytest.mark.parametrize("library", PUBLISHED)
def test_the_published_library_is_served(library: str, made: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="both need it")
    command = program(library, tmp_path)
    try:
        suites.install(PUBLISHED[library], made)
    except OSError as error:
        pytest.skip(str(error))
    done = linattn("run-with", library, "--", *command, packages=made)
    assert (done.returncode, done.stdout) == (0, SAID[library]), done.stderr
    version = PUBLISHED[library][0].partition("==")[2]
    assert f"linattn: {library} {version} on linattn: {', '.join(functions_of(library))}\n" in done.stderr
    assert "has no" not in done.stderr


def test_what_there_is_is_said() -> None:
    done = linattn("run-with", "transformer", "--", "python")
    assert done.returncode == 2
    assert " ".join(done.stderr.replace("│", " ").split()).find(f"no integration for transformer: there are {LIBRARIES[0]}") > 0
    done = linattn("run-with", "fla", "--", "no-such-program")
    assert "no-such-program: no such program" in done.stderr


def test_a_python_that_has_no_linattn_is_told(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    done = linattn("run-with", "fla", "--", python, "-c", "print('ran')")
    assert done.stdout == "ran\n"
    assert done.stderr == f"linattn run-with: linattn is not installed for {python}, which runs without it\n"


def test_the_next_sitecustomize_has_its_turn(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.flag_of_test = 'mine'\n")
    code = "import sys; print(sys.flag_of_test, 'torch' in sys.modules)"
    done = linattn("run-with", "fla", "--", sys.executable, "-c", code, packages=tmp_path)
    assert (done.stdout, done.stderr) == ("mine False\n", "")
