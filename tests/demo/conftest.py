"""A backend for the arrays of every framework: the oracle, through NumPy. It shows that the model is one code for all."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from linattn.demo.run import arrays_of
from linattn.plugin import Backend
from linattn.registry import registry


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LINATTN_BACKEND", raising=False)
    yield
    registry.refresh()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side; PyTorch's threads would wait for each other."""
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch").set_num_threads(1)


def bridge(framework: str) -> Backend:
    """A backend named ``bridge`` that carries arrays of ``framework`` to the oracle and back."""
    arrays = arrays_of(framework)

    def carry(function: Any, operands: list[Any]) -> Any:
        """Call ``function`` with NumPy arrays."""
        if framework == "jax":
            (B, T, H, K), V = operands[0].shape, operands[2].shape[3]
            jax = importlib.import_module("jax")
            shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((B, T, H, V), (B, H, K, V))]
            return jax.pure_callback(lambda *a: function(*map(np.asarray, a)), shapes, *operands)
        return [arrays.put(x) for x in function(*map(arrays.get, operands))]

    def carried(form: str) -> Any:
        def method(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
            assert gv is None
            assert output_final_state

            def run(q, k, v, g, state):
                operator = getattr(registry.load("numpy"), f"{form}_gla")
                options = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size}
                return operator(q, k, v, g, None, scale=scale, initial_state=state, output_final_state=True, **options)

            return tuple(carry(run, [q, k, v, g, initial_state]))

        return method

    members = {"name": "bridge", "api": ">=1,<2", "frameworks": (framework,)}
    return type("Bridge", (Backend,), members | {f"{form}_gla": carried(form) for form in ("chunk", "recurrent")})()
