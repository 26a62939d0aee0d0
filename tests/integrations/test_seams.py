"""What takes the place of what, on packages made for the test."""

import importlib
import subprocess
import sys
import types
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from linattn.errors import ShapeError, Unsupported
from linattn.integrations.run_with import LIBRARIES
from linattn.integrations.seams import AfterImport, FallbackWarning, Integration, serving, stood_for


def ours(x: int, how: str = "well") -> str:
    if how == "badly":
        raise Unsupported("nothing here does it badly")
    if how == "wrongly":
        raise ShapeError("x is too long")
    return f"ours {x}"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a function, under two names, that another module took before."""
    folder = tmp_path / "peer_of_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .ops import compute\n")
    (folder / "ops.py").write_text(
        "def compute(x, how='well'):\n    'The docstring.'\n    return f'theirs {x} {how}'\ndef other(x):\n    return x\n"
    )
    (tmp_path / "user_of_test.py").write_text("from peer_of_test import compute as run\nfrom peer_of_test.ops import other\n")
    (tmp_path / "later_of_test.py").write_text("from peer_of_test.ops import compute\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "peer_of_test"
    for name in ("peer_of_test", "peer_of_test.ops", "user_of_test", "later_of_test", "modeling_of_test"):
        sys.modules.pop(name, None)


@pytest.fixture
def integration(package: str, monkeypatch: pytest.MonkeyPatch) -> Integration:
    monkeypatch.setattr("linattn.integrations.seams.metadata.version", lambda name: "1.0")
    return Integration(package, package, {f"{package}.ops.compute": ours})


def test_every_module_that_holds_it_gets_ours_and_gets_it_back(integration: Integration) -> None:
    user = importlib.import_module("user_of_test")
    before, other = user.run, user.other
    with integration.enable():
        assert user.run(3) == importlib.import_module("peer_of_test").compute(3) == "ours 3"
        later = importlib.import_module("later_of_test")
        assert later.compute(4) == "ours 4"
        assert user.other is other
        assert (user.run.__name__, user.run.__doc__) == ("compute", "The docstring.")
    assert user.run is later.compute is importlib.import_module("peer_of_test.ops").compute is before


def test_enabling_twice_and_disabling_what_is_not_enabled_do_nothing_more(integration: Integration) -> None:
    user = importlib.import_module("user_of_test")
    integration.disable()
    integration.enable()
    once = user.run
    integration.enable()
    assert user.run is once
    integration.disable()
    assert stood_for(user.run) is None


@pytest.mark.parametrize(("how", "reason"), [("badly", "nothing here does it badly"), ("wrongly", "x is too long")])
def test_a_refused_call_goes_back_and_says_why_once(integration: Integration, how: str, reason: str) -> None:
    user = importlib.import_module("user_of_test")
    with integration.enable(), pytest.warns(FallbackWarning) as warned:
        assert [user.run(5, how) for _ in range(3)] == [f"theirs 5 {how}"] * 3
    assert [str(warning.message) for warning in warned] == [
        f"peer_of_test.ops.compute runs where it ran before, not on linattn: {reason}"
    ]


def test_any_other_error_of_ours_is_raised() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serving(lambda: "theirs", broken, "broken")()


def test_what_the_package_lacks_is_said_by_name(package: str, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linattn.integrations.seams.metadata.version", lambda name: "1.0")
    with Integration(package, package, {f"{package}.ops.compute": ours, f"{package}.gone.away": ours}).enable():
        pass
    assert [(record.levelname, record.getMessage()) for record in said.records] == [
        ("INFO", "peer_of_test 1.0 on linattn: peer_of_test.ops.compute"),
        ("WARNING", "peer_of_test 1.0 has no peer_of_test.gone.away: its callers go where they went before"),
    ]


def test_a_package_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nobodys_package'"):
        Integration("nobodys_package", "nobodys-package", {}).enable()


def test_a_hook_sees_a_module_after_it_ran_and_only_what_concerns_it(package: str) -> None:
    seen: list[str] = []
    hook = AfterImport(lambda name: name == "peer_of_test.ops", lambda module: seen.append(module.compute(1)))
    hook.install()
    hook.install()
    assert sys.meta_path.count(hook) == 1
    importlib.import_module("user_of_test")
    assert seen == ["theirs 1 well"]
    hook.remove()
    assert hook not in sys.meta_path


def test_a_kernel_that_somebody_chose_wins(package: str, tmp_path: Path) -> None:
    """The ``kernels`` package makes a module of a function, and gives that a forward of its own when a kernel is chosen."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from linattn.integrations import transformers as integration

    (tmp_path / "modeling_of_test.py").write_text(
        "import torch\n"
        "def use_kernel_func_from_hub_with_fallback(name, package):\n"
        "    def decorator(function):\n"
        "        members = {'forward': lambda self, *a, **k: function(*a, **k), 'kernel_layer_name': name}\n"
        "        return type('Func', (torch.nn.Module,), members)()\n"
        "    return decorator\n\n"
        '@use_kernel_func_from_hub_with_fallback("chunk_gla", "fla")\n'
        "def torch_gla(q, **kwargs):\n"
        "    return 'theirs'\n"
    )
    seam = integration.seams_of("model_of_test", (tmp_path / "modeling_of_test.py").read_text())
    assert seam == [integration.Seam("model_of_test", "torch_gla", "fla", "chunk_gla")]
    integration.FUNCTIONS["fla.chunk_gla"], right = (lambda q: "ours"), integration.FUNCTIONS["fla.chunk_gla"]
    try:
        module = importlib.import_module("modeling_of_test")
        module.__name__ = "transformers.models.model_of_test.modeling_of_test"
        function = module.torch_gla
        integration.enable()
        assert module.torch_gla(1, position_ids=2) == "ours"
        function.forward = types.MethodType(lambda self, *a, **k: "the hub's", function)
        assert module.torch_gla(1) == "the hub's"
        function.forward = type(function).forward.__get__(function)
        assert module.torch_gla(1) == "ours"
        integration.disable()
        assert module.torch_gla is function
    finally:
        integration.FUNCTIONS["fla.chunk_gla"] = right


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "linattn", *arguments], capture_output=True, text=True, check=False)


def test_run_with_says_what_there_is() -> None:
    done = run("run-with", "transformer", "--", "python")
    assert done.returncode == 2
    assert " ".join(done.stderr.replace("│", " ").split()).find(f"no integration for transformer: there are {LIBRARIES[0]}") > 0
    done = run("run-with", "fla", "--", "no-such-program")
    assert "no-such-program: no such program" in done.stderr


def test_run_with_tells_a_python_that_has_no_linattn(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = str(tmp_path / "bin" / "python")
    done = run("run-with", "fla", "--", python, "-c", "print('ran')")
    assert done.stdout == "ran\n"
    assert done.stderr == f"linattn run-with: linattn is not installed for {python}, which runs without it\n"


def test_run_with_leaves_the_next_sitecustomize_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.flag_of_test = 'mine'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run("run-with", "fla", "--", sys.executable, "-c", "import sys; print(sys.flag_of_test, 'torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("mine False\n", "")


def test_importing_linattn_imports_no_integration() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, linattn; print([m for m in sys.modules if 'integrations' in m])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
