"""Rotary positions: values against complex numbers, on every framework; packed, traced, and of features."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn import errors

B, T, H, K = 2, 7, 3, 8


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def turned(x: np.ndarray, positions: np.ndarray, base: float = 10000.0, interleaved: bool = False) -> np.ndarray:
    """Pairs as complex numbers, times ``e^{ipω}``."""
    pairs = x.reshape(*x.shape[:-1], -1, 2) if interleaved else x.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2)
    numbers = pairs[..., 0] + 1j * pairs[..., 1]
    numbers = numbers * np.exp(1j * positions[..., None, None] * base ** (-2 * np.arange(K // 2) / K))
    pairs = np.stack([numbers.real, numbers.imag], -1)
    return (pairs if interleaved else pairs.swapaxes(-1, -2)).reshape(x.shape)


def integers(framework: str, values) -> object:
    if framework == "numpy":
        return np.asarray(values, np.int32)
    if framework == "torch":
        return pytest.importorskip("torch").tensor(values)
    if framework == "jax":
        return pytest.importorskip("jax.numpy").asarray(values, "int32")
    return pytest.importorskip("mlx.core").array(values)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("framework", INSTALLED)
def test_values(framework, interleaved):
    x = drawn(B, T, H, K)
    expected = turned(x, np.arange(T), 50.0, interleaved)

    def call(x):
        return linattn.rotary(x, base=50.0, interleaved=interleaved)

    for function in (call, compiled(framework, call)):
        np.testing.assert_allclose(np.asarray(function(array(framework, x))), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("positions", [[3, 1, 4, 1, 5, 9, 2], [[3, 1, 4, 1, 5, 9, 2], [0, 0, 7, 8, 9, 1000, 3]]])
def test_positions(framework, positions):
    x = drawn(B, T, H, K)
    found = linattn.rotary(array(framework, x), positions=integers(framework, positions))
    np.testing.assert_allclose(np.asarray(found), turned(x, np.array(positions)), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("framework", INSTALLED)
def test_packed_sequences_start_from_nothing(framework):
    x = drawn(1, T, H, K)
    offsets = [0, 0, 3, 3, 6, 6]  # empty ones first, within and last; a token behind them
    places = np.array([0, 1, 2, 0, 1, 2, 0])

    def call(x, offsets):
        return linattn.rotary(x, cu_seqlens=offsets)

    for function in (call, compiled(framework, call)):
        found = np.asarray(function(array(framework, x), integers(framework, offsets)))
        np.testing.assert_allclose(found, turned(x, places), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_gradient_turns_back(framework):
    x = drawn(1, T, 1, K)
    found = gradient(framework, linattn.rotary, x)
    np.testing.assert_allclose(found, turned(np.ones_like(x), -np.arange(T)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", INSTALLED)
def test_scores_depend_on_distances(framework):
    q, k = drawn(1, 1, 1, K), drawn(1, 1, 1, K, seed=1)
    q, k = (np.broadcast_to(x, (1, 64, 1, K)) for x in (q, k))
    q, k = (np.asarray(linattn.rotary(array(framework, x)))[0, :, 0] for x in (q, k))
    scores = q @ k.T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)


def test_dtype_stays_and_no_token_is_legal():
    assert linattn.rotary(np.ones((1, 2, 1, 4), np.float16)).dtype == np.float16
    assert linattn.rotary(np.ones((2, 0, 1, 4))).shape == (2, 0, 1, 4)


@pytest.mark.parametrize("as_the_model", ["paper", "most"])
def test_models_of_transformers_have_these_positions(as_the_model):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, positions = torch.randn(1, T, H, K, generator=torch.Generator().manual_seed(0)), torch.arange(T)[None]
    angle = positions[..., None] * 10000.0 ** (-torch.arange(0, K, 2) / K)
    angle = torch.cat([angle, angle], -1)
    expected = modeling.apply_rotary_pos_emb(x, x, angle.cos(), angle.sin(), unsqueeze_dim=2)[0]
    if as_the_model == "most":
        torch.testing.assert_close(linattn.rotary(x), expected)
    else:
        order = torch.arange(K).view(2, -1).T.flatten()
        torch.testing.assert_close(linattn.rotary(x[..., order], interleaved=True), expected[..., order])


X = np.ones((2, 3, 1, 4), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (X[..., :3], {}, errors.ShapeError, "rotary: x must be [B, T, H, K] with K even, got [2, 3, 1, 3]"),
        (X[0], {}, errors.ShapeError, "rotary: x must be [B, T, H, K] with K even, got [3, 1, 4]"),
        (X.astype(int), {}, errors.DtypeError, "rotary: x must be float16, bfloat16, float32 or float64, got int64"),
        (X, {"base": 0}, errors.OptionError, "rotary: base must be a positive number, got 0"),
        (X, {"base": True}, errors.OptionError, "rotary: base must be a positive number, got True"),
        (
            X,
            {"positions": np.arange(4)},
            errors.ShapeError,
            "rotary: positions must be [T] = [3] or [B, T] = [2, 3], got [4]",
        ),
        (X, {"positions": np.arange(3.0)}, errors.DtypeError, "rotary: positions must be int32 or int64, got float64"),
        (
            X,
            {"cu_seqlens": np.array([0, 3])},
            errors.ShapeError,
            "rotary: cu_seqlens packs sequences along T and needs B = 1, got B = 2",
        ),
        (
            X[:1],
            {"cu_seqlens": np.array([0, 4])},
            errors.ShapeError,
            "rotary: cu_seqlens must not pass T = 3, got 4 at the end",
        ),
        (
            X[:1],
            {"cu_seqlens": np.zeros((1, 2), int)},
            errors.ShapeError,
            "rotary: cu_seqlens must be [N+1] with N the number of packed sequences, got [1, 2]",
        ),
        (
            X[:1],
            {"cu_seqlens": np.array([0, 3]), "positions": np.arange(3)},
            errors.OptionError,
            "rotary: positions and cu_seqlens both say where tokens stand: give one of them",
        ),
    ],
)
def test_bad_input(x, options, error, text):
    with pytest.raises(error) as caught:
        linattn.rotary(x, **options)
    assert str(caught.value) == text
