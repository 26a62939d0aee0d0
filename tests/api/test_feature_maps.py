"""Feature maps: values, gradients, tracing, on every framework."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn import feature_maps

X = np.array([-200.0, -3.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 50.0])

# name: (value, derivative), in float64 NumPy
MAPS = {
    "identity": (X, np.ones_like(X)),
    "elu1": (np.where(X > 0, X + 1, np.exp(np.minimum(X, 0))), np.where(X > 0, 1, np.exp(np.minimum(X, 0)))),
    "relu": (np.maximum(X, 0), np.where(X < 0, 0.0, 1.0)),
    "relu2": (np.maximum(X, 0) ** 2, 2 * np.maximum(X, 0)),
    "exp": (np.exp(X), np.exp(X)),
}


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("name", MAPS)
def test_values(framework, name):
    phi = feature_maps.resolve(name)
    for function in (phi, compiled(framework, phi)):
        np.testing.assert_allclose(np.asarray(function(array(framework, X))), MAPS[name][0], rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", MAPS)
def test_gradients(framework, name):
    np.testing.assert_allclose(gradient(framework, feature_maps.resolve(name), X), MAPS[name][1], rtol=2e-5, atol=1e-37)


def test_elu1_does_not_overflow_behind_the_where():
    x = np.array([1e4, 3e38])
    for framework in DIFFERENTIABLE:
        np.testing.assert_array_equal(gradient(framework, feature_maps.Elu1(), x), [1, 1])


def test_temperature():
    np.testing.assert_allclose(feature_maps.Exp(t=2.0)(np.array([0.5, -1.0])), np.exp([1.0, -2.0]))
    assert feature_maps.Exp(t=2.0) == feature_maps.Exp(t=2.0) != feature_maps.Exp()


def test_every_map_is_listed():
    assert set(MAPS) == set(feature_maps.MAPS)


@pytest.mark.parametrize("operator", ["chunk_gla", "linear_attn", "recurrent_kda"])
def test_an_operator_maps_queries_and_keys_and_nothing_else(make, operator):
    q, k, v = (make(1, 5, 2, 8) for _ in range(3))
    extra = {"chunk_gla": (-abs(v),), "linear_attn": (), "recurrent_kda": (-abs(v), abs(v[..., 0]))}[operator]
    function = getattr(linattn, operator)
    phi = feature_maps.Exp(t=0.5)
    mapped, _ = function(q, k, v, *extra, feature_map=phi)
    plain, _ = function(phi(q), phi(k), v, *extra)
    assert (mapped == plain).all()


def test_mixed_attn_maps_its_linear_heads(make):
    x = make(1, 12, 2, 8)
    mapped, _ = linattn.mixed_attn(x, x, x, x, x, chunk_size=4, feature_map="relu")
    r = feature_maps.Relu()(x)
    plain, _ = linattn.mixed_attn(x, x, r, r, x, chunk_size=4)
    assert (mapped == plain).all()


def test_a_map_of_one_s_own(make):
    class Twice(feature_maps.FeatureMap):
        def __call__(self, x):
            return x + x

    x = make(1, 5, 2, 8)
    mapped, _ = linattn.linear_attn(x, x, x, feature_map=Twice())
    plain, _ = linattn.linear_attn(x + x, x + x, x)
    assert (mapped == plain).all()
