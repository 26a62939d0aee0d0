"""Arrays of both frameworks under one spelling, and a clean registry for every test."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
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
