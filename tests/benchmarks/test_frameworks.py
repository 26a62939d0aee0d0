"""JAX and MLX arrays are timed and checked like the others."""

from __future__ import annotations

import importlib

import linattn
import numpy as np
import pytest
from linattn.plugin import Backend
from linattn_benchmarks import clocks
from linattn_benchmarks.runners import RUNNERS

MODULES = {"jax": "jax.numpy", "mlx": "mlx.core"}


class Masked(Backend):
    """Linear attention as one masked matrix, in either framework."""

    name, api, frameworks = "masked", ">=1,<2", ("jax", "mlx")

    def chunk_linear_attn(
        self, q, k, v, *, scale, causal, normalize, initial_state, output_final_state, cu_seqlens, chunk_size
    ):
        xp = importlib.import_module(MODULES[type(q).__module__.partition(".")[0].removesuffix("lib")])
        A = xp.tril(xp.einsum("bthk,bshk->bhts", q, k))
        return scale * xp.einsum("bhts,bshv->bthv", A, v), None


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_forward_and_backward(case, rows, framework):
    pytest.importorskip(MODULES[framework])
    linattn.register_backend(Masked)
    found = rows([case("chunk_linear_attn", what) for what in ("fwd", "fwdbwd")], ["masked"], framework=framework)
    for row in found:
        assert row["status"] == "ok", row["reason"]
        assert row["ran"] == "masked.chunk_linear_attn"
    assert set(found[1]["error"]["outputs"]) == {"o", "dq", "dk", "dv"}


@pytest.mark.parametrize(
    ("framework", "device", "said"),
    [
        ("numpy", "cuda", "numpy arrays live on cpu here, not on cuda"),
        ("torch", "metal", "torch arrays live on cpu or cuda here, not on metal"),
        ("jax", "tpu", "tpu"),
        ("mlx", "metal", "the default device of mlx is cpu here, not metal"),
    ],
)
def test_devices_that_are_not_here(framework, device, said):
    pytest.importorskip(framework)
    assert said in RUNNERS[framework](device).refusal()


def test_resident_peak_sees_what_a_call_holds():
    np = pytest.importorskip("numpy")
    peak = clocks.resident_peak(lambda: np.ones(1 << 23))
    assert peak is None or (1 << 26) <= peak < 1.5 * (1 << 26)


def test_spread():
    assert clocks.spread([1.0, 2.0, 3.0]) == {"median": 2.0, "q10": 1.2, "q90": 2.8, "min": 1.0, "n": 3}


def test_a_reversed_axis_of_one_is_an_array_of_pytorch():
    """NumPy calls it contiguous, and its stride is negative."""
    pytest.importorskip("torch")
    x = np.arange(3.0)[None][::-1]
    assert RUNNERS["torch"]("cpu").array(x, "float32").tolist() == [[0.0, 1.0, 2.0]]
