"""The language model: one code for every framework, one meaning for both forms."""

from __future__ import annotations

import importlib.util
import json
from importlib import resources

import numpy as np
import pytest
from linattn import register_backend
from linattn.demo import model
from linattn.demo.run import Arrays, arrays_of, record, score, shipped_weights

from conftest import bridge

SMALL = model.Sizes(layers=2, width=16, hidden=24, gate_rank=4)
TEXT = "A heap is a binary tree. ∀k: a[k] ≤ a[2k+1].\n".encode() * 3


@pytest.fixture
def weights():
    rng = np.random.default_rng(1)
    arrays = model.initial_weights(SMALL, seed=1)
    return {name: a + 0.1 * rng.standard_normal(a.shape).astype(a.dtype) for name, a in arrays.items()}


def log_probs(weights, arrays: Arrays, backend: str, dtype: str = "float32", **kwargs) -> np.ndarray:
    placed = {name: arrays.put(a.astype(dtype)) for name, a in weights.items()}
    return score(TEXT, placed, arrays, backend, **kwargs).log_probs


@pytest.fixture
def truth(weights):
    return log_probs(weights, arrays_of("numpy"), "numpy", "float64")


def test_log_probabilities_are_of_bytes(weights, truth):
    assert truth.shape == (len(TEXT),)
    assert (truth < 0).all()


@pytest.mark.parametrize("decoded", [0, 1, 40])
@pytest.mark.parametrize("block", [1, 7, 64, 4096])
def test_blocks_and_forms_agree(weights, truth, block, decoded):
    found = log_probs(weights, arrays_of("numpy"), "numpy", "float64", block=block, decoded=decoded)
    np.testing.assert_allclose(found, truth, atol=1e-10)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_one_code_for_every_framework(weights, truth, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    arrays = arrays_of(framework)
    register_backend(bridge(framework))
    np.testing.assert_allclose(log_probs(weights, arrays, "bridge"), truth, atol=1e-5)


def test_a_byte_changes_nothing_before_it(weights, truth):
    arrays = arrays_of("numpy")
    placed = {name: a.astype("float64") for name, a in weights.items()}
    at = 50
    changed = TEXT[:at] + b"#" + TEXT[at + 1 :]
    found = score(changed, placed, arrays, "numpy").log_probs
    np.testing.assert_array_equal(found[:at], truth[:at])
    assert np.abs(found[at + 1 :] - truth[at + 1 :]).max() > 1e-3


def test_sequences_of_a_batch_do_not_mix(weights):
    ids = np.frombuffer(TEXT[:60], np.uint8).astype(np.int32).reshape(2, 30)
    both, _ = model.forward(weights, ids)
    for row in range(2):
        alone, _ = model.forward(weights, ids[row : row + 1])
        np.testing.assert_allclose(both[row], alone[0], atol=1e-5)


def test_state_does_not_grow(weights):
    ids = np.zeros((1, 300), np.int32)
    _, state = model.forward(weights, ids)
    assert state.recent.shape == (1, model.CONTEXT - 1)
    assert [s.shape for s in state.layers] == [(1, model.HEADS, 4, 4)] * SMALL.layers


def test_initial_weights_have_one_value_per_seed():
    one, same, other = (model.initial_weights(SMALL, seed) for seed in (3, 3, 4))
    assert all((one[name] == same[name]).all() for name in one)
    assert not (one["head"] == other["head"]).all()


# -- what ships ------------------------------------------------------------------------------------------------------


def test_shipped_weights_are_small_and_fit_the_model():
    weights = shipped_weights()
    initial = model.initial_weights()
    assert {n: a.shape for n, a in weights.items()} == {n: a.shape for n, a in initial.items()}
    assert {a.dtype for a in weights.values()} == {np.dtype("float16")}
    assert all(np.isfinite(a).all() for a in weights.values())
    path = resources.files("linattn.demo").joinpath("byte_lm.npz")
    assert len(path.read_bytes()) == record()["file_bytes"] < 2_000_000
    assert sum(a.size for a in weights.values()) == record()["parameters"]


def test_record_says_how_it_was_made():
    made = record()
    assert {"corpus", "command", "options", "bytes", "bits_per_byte", "versions"} <= set(made)
    assert made["options"]["seed"] == 0
    assert "python" in made["versions"]
    assert made["bits_per_byte"]["test"] < 0.8 * made["bits_per_byte"]["order_2_test"]
    json.dumps(made)
