"""What takes the place of what, on packages made for the test."""

import functools
import importlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from linattn.errors import ShapeError, Unsupported
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


def test_blocks_may_be_in_each_other_and_overlap(integration: Integration) -> None:
    """The last of them gives back; a call outside of any block stays, until ``disable()``, which ends all."""
    user = importlib.import_module("user_of_test")
    with integration.enable():
        with integration.enable():
            pass
        assert user.run(1) == "ours 1"
    assert user.run(1) == "theirs 1 well"
    first, second = integration.enable(), integration.enable()
    for block in (first, first):
        block.__exit__(None, None, None)
        assert user.run(1) == "ours 1"
    second.__exit__(None, None, None)
    assert user.run(1) == "theirs 1 well"
    integration.enable()
    with integration.enable():
        pass
    assert user.run(1) == "ours 1"
    with integration.enable():
        integration.disable()
        integration.enable()
    assert user.run(1) == "ours 1"


def test_a_block_is_not_entered_again_when_it_is_over(integration: Integration) -> None:
    block = integration.enable()
    said = "this call of enable() has had its block, or is over by disable(): call enable() again"
    with block, pytest.raises(RuntimeError) as caught, block:
        pass
    assert str(caught.value) == said
    with pytest.raises(RuntimeError) as caught, block:
        pass
    assert str(caught.value) == said


def test_what_is_wrapped_around_ours_is_not_ours(integration: Integration) -> None:
    user = importlib.import_module("user_of_test")
    integration.enable()
    wrapped = functools.wraps(user.run)(lambda x: "wrapped")
    assert stood_for(wrapped) is None
    user.run = wrapped
    integration.disable()
    assert user.run is wrapped


def test_an_object_that_only_says_it_is_a_function_is_none(integration: Integration) -> None:
    """As what ``mlx.core.compile`` makes does."""

    class Pretended:
        __slots__ = ()
        __class__ = property(lambda self: FunctionType)  # pyright: ignore[reportAssignmentType]

        def __call__(self) -> None: ...

    user: Any = importlib.import_module("user_of_test")
    user.compiled = Pretended()
    assert isinstance(user.compiled, FunctionType)
    with integration.enable():
        assert user.run(3) == "ours 3"


def test_a_module_whose_name_begins_as_ours_is_served(integration: Integration, tmp_path: Path) -> None:
    (tmp_path / "linattn_of_test.py").write_text("from peer_of_test import compute\n")
    user = importlib.import_module("linattn_of_test")
    try:
        with integration.enable():
            assert user.compute(3) == "ours 3"
    finally:
        del sys.modules["linattn_of_test"]


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


def test_a_package_that_is_not_of_its_distribution_says_its_own_version(package: str, said: Any, tmp_path: Path) -> None:
    """As a checkout does, or a part of it under another distribution's name."""
    (tmp_path / package / "__init__.py").write_text("from .ops import compute\n__version__ = '2.0.dev1'\n")
    with Integration(package, "nobodys-distribution", {f"{package}.ops.compute": ours}).enable():
        pass
    assert [record.getMessage() for record in said.records] == ["peer_of_test 2.0.dev1 on linattn: peer_of_test.ops.compute"]


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


def test_a_hook_that_was_removed_while_a_module_is_imported_does_not_see_it(package: str, tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    hook = AfterImport(lambda name: name == "modeling_of_test", seen.append)
    (tmp_path / "modeling_of_test.py").write_text("import sys\nsys.hook_of_test.remove()\n")
    vars(sys)["hook_of_test"] = hook
    hook.install()
    try:
        importlib.import_module("modeling_of_test")
    finally:
        del vars(sys)["hook_of_test"]
    assert seen == []


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


def test_importing_linattn_imports_no_integration() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, linattn; print([m for m in sys.modules if 'integrations' in m])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
