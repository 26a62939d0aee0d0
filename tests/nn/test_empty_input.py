"""Layers on no tokens and on no sequences, which operators take as well: an empty output, and a cache left as it was."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from linattn import nn  # noqa: E402
from nn_cases import CASES, LAYERS, WIDTH  # noqa: E402


def layer(case):
    name, options = CASES[case]
    return getattr(nn, name)(WIDTH, **options, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(1, 0), (2, 0), (0, 5), (0, 1), (0, 0)])
def test_no_tokens_give_none(case, shape):
    made, x = layer(case), torch.zeros(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"mask": torch.ones(shape)}, {"cache": nn.Cache()}):
        y = made(x, **options)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        y.sum().backward()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("offsets", [[0, 0], [0, 0, 0]])
def test_packed_sequences_may_all_be_empty(case, offsets):
    x = torch.zeros(1, 0, WIDTH, dtype=torch.float64)
    assert layer(case)(x, cu_seqlens=torch.tensor(offsets)).shape == x.shape


@pytest.mark.parametrize("case", CASES)
def test_an_empty_piece_leaves_a_cache_as_it_was(case):
    made, x, cache = layer(case), torch.randn(2, 9, WIDTH, dtype=torch.float64), nn.Cache()
    with torch.no_grad():
        first = made(x[:, :5], cache=cache)
        held = {name: y.clone() for name, y in cache.state_dict().items()}
        assert made(x[:, 5:5], cache=cache).shape == (2, 0, WIDTH)
        torch.testing.assert_close(cache.state_dict(), held, rtol=0, atol=0)
        last = made(x[:, 5:], cache=cache)
        torch.testing.assert_close(torch.cat([first, last], 1), made(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("framework", ["flax", "equinox", "mlx"])
@pytest.mark.parametrize("kind", ["GatedDeltaNet", "LinearAttention", "RWKV7"])
def test_so_it_is_in_other_frameworks(framework, kind):
    pytest.importorskip("mlx.core" if framework == "mlx" else framework)
    module = importlib.import_module(f"linattn.nn.{framework}")
    if framework == "mlx":
        options, array = {}, importlib.import_module("mlx.core").array
    else:
        jax = importlib.import_module("jax")
        array = jax.numpy.asarray
        key = {"key": jax.random.key(0)}
        options = key if framework == "equinox" else {"rngs": importlib.import_module("flax.nnx").Rngs(0)}
    made = getattr(module, kind)(WIDTH, **LAYERS[kind], **options)
    for shape in ((1, 0, WIDTH), (0, 5, WIDTH)):
        assert np.asarray(made(array(np.zeros(shape, np.float32)))).shape == shape
