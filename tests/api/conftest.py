"""Arrays of both frameworks under one spelling, and a clean registry for every test."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backends_for_tests import GOOD
from linattn.registry import registry


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch):
    """No test sees what another registered, and none sees the user's environment."""
    monkeypatch.delenv("LINATTN_BACKEND", raising=False)
    yield
    registry.refresh()


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``make(2, 8, dtype="float32")``: a random array of the framework under test."""
    rng = np.random.default_rng(0)
    if request.param == "numpy":
        return lambda *shape, dtype="float32": rng.standard_normal(shape).astype(dtype)
    torch = pytest.importorskip("torch")
    return lambda *shape, dtype="float32": torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, dtype))


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


numbers = itertools.count()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(dist, name, source)``: put a distribution with one entry point on the path."""

    def install(dist: str, name: str = "", source: str = GOOD, requires: str = "", api: str = ">=1,<2") -> None:
        name = name or dist
        module = f"plugin_module_{next(numbers)}"  # its own, so that no test finds another's in sys.modules
        folder = tmp_path / dist
        info = folder / f"{dist.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        requirement = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n{requirement}")
        (info / "entry_points.txt").write_text(f"[linattn.backends]\n{name} = {module}:Plugin\n")
        (folder / f"{module}.py").write_text(textwrap.dedent(source.format(name=name, api=api)))
        monkeypatch.syspath_prepend(folder)
        registry.refresh()

    return install


@pytest.fixture
def nothing_is_computed(monkeypatch: pytest.MonkeyPatch):
    """No method of the backends for arrays of both frameworks is called; what is called stands in the list."""
    called: list[str] = []

    def noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *args, **options: called.append(name) or function(*args, **options))

    for backend in [registry.load(name) for name in ("numpy", "torch") if importlib.util.find_spec(name)]:
        for name in [x for x in dir(backend) if re.match("(chunk|recurrent|parallel|decode)_|short_conv|gated_rms", x)]:
            monkeypatch.setattr(backend, name, noted(getattr(backend, name), name))
    yield called
    assert called == []
