"""Gates: values against float64 formulas, gradients, extremes, on every framework."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn import errors, gates

X = np.array([-300.0, -30.0, -1.0, 0.0, 1.0, 30.0, 300.0])


def logsigmoid(x):
    return -np.logaddexp(0, -x)


def sigmoid(x):
    return np.exp(logsigmoid(x))


@pytest.mark.parametrize("framework", INSTALLED)
def test_gla(framework):
    for function in (gates.gla, compiled(framework, gates.gla)):
        np.testing.assert_allclose(np.asarray(function(array(framework, X))), logsigmoid(X) / 16, rtol=2e-5, atol=1e-37)
    np.testing.assert_allclose(np.asarray(gates.gla(array(framework, X), tau=1.0)), logsigmoid(X), rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_gla_gradient(framework):
    np.testing.assert_allclose(gradient(framework, gates.gla, X), sigmoid(-X) / 16, rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("framework", INSTALLED)
def test_mamba2(framework):
    rng = np.random.default_rng(0)
    dt, A_log, bias = rng.standard_normal((2, 3, 4)), rng.standard_normal(4), rng.standard_normal(4)
    found = gates.mamba2(*(array(framework, x) for x in (dt, A_log, bias)))
    np.testing.assert_allclose(np.asarray(found), -np.exp(A_log) * np.logaddexp(0, dt + bias), rtol=1e-5)


@pytest.mark.parametrize("framework", INSTALLED)
def test_kda(framework):
    rng = np.random.default_rng(0)
    x, A_log, bias = rng.standard_normal((2, 3, 4, 5)), rng.standard_normal(4), rng.standard_normal((4, 5))
    found = gates.kda(*(array(framework, a) for a in (x, A_log, bias)))
    np.testing.assert_allclose(np.asarray(found), -np.exp(A_log)[:, None] * np.logaddexp(0, x + bias), rtol=1e-5)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("bound", [0.0, 0.25, 0.999])
def test_hgrn2(framework, bound):
    g, k = gates.hgrn2(array(framework, X), lower_bound=bound)
    with np.errstate(divide="ignore"):
        f = bound + (1 - bound) * sigmoid(X)
        expected = np.where(f > 0, np.log(f), logsigmoid(X)) if bound else logsigmoid(X)
    np.testing.assert_allclose(np.asarray(g), expected, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(np.asarray(k), (1 - bound) * sigmoid(-X), rtol=2e-5, atol=1e-37)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_hgrn2_gradient(framework):
    s = sigmoid(X)
    np.testing.assert_allclose(gradient(framework, lambda x: gates.hgrn2(x)[0], X), 1 - s, rtol=2e-5, atol=1e-7)
    expected = 0.75 * s * sigmoid(-X) / (0.25 + 0.75 * s)
    np.testing.assert_allclose(
        gradient(framework, lambda x: gates.hgrn2(x, lower_bound=0.25)[0], X), expected, rtol=2e-5, atol=1e-7
    )


def test_fixed_decays():
    np.testing.assert_allclose(gates.retnet(3), np.log([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128]), rtol=1e-6)
    np.testing.assert_allclose(gates.lightning(4, layer=1, layers=4), [0, -1.5, -3.0, -4.5], rtol=1e-6)
    assert gates.retnet(2).dtype == gates.lightning(2, 0, 1).dtype == np.float32


@pytest.mark.parametrize("framework", INSTALLED)
def test_fixed_decays_of_the_call_s_framework(framework):
    q = array(framework, X)
    for found, expected in (
        (gates.retnet(3, like=q), gates.retnet(3)),
        (gates.lightning(4, 1, 4, like=q), gates.lightning(4, 1, 4)),
    ):
        assert type(found) is type(q)
        assert str(found.dtype).endswith("float32")
        np.testing.assert_array_equal(np.asarray(found), expected)
    x = array(framework, np.ones((1, 5, 3, 4)))
    o, _ = linattn.simple_gla(x, x, x, gates.retnet(3, like=x))
    assert o.shape == x.shape


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_fixed_decays_are_made_in_compiled_code(framework):
    call = compiled(framework, lambda x: gates.retnet(3, like=x) + gates.lightning(3, 1, 4, like=x))
    expected = gates.retnet(3) + gates.lightning(3, 1, 4)
    np.testing.assert_allclose(np.asarray(call(array(framework, X))), expected, rtol=1e-6)


def test_fixed_decays_are_on_the_device_of_the_call(torch):
    assert gates.retnet(3, like=torch.empty(2, device="meta", dtype=torch.bfloat16)).device.type == "meta"


def test_nobody_shares_fixed_decays(torch):
    """What one makes a parameter of, and learns, is not another's."""
    x = torch.ones(2)
    gates.retnet(3, like=x).zero_()
    assert gates.retnet(3, like=x).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gates.retnet(0), "H must be at least 1, got 0"),
        (lambda: gates.lightning(0, 0, 1), "H must be at least 1, got 0"),
        (lambda: gates.lightning(4, 4, 4), "lightning: layer must be in 0 … layers-1 = 3, got 4"),
        (lambda: gates.hgrn2(X, lower_bound=1.0), "hgrn2: lower_bound must be in [0, 1), got 1.0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(errors.OptionError) as caught:
        call()
    assert str(caught.value) == message


def test_not_an_array():
    with pytest.raises(errors.FrameworkError, match=r"^x: expected an array of numpy, torch, jax or mlx, got float$"):
        gates.gla(0.5)
    with pytest.raises(errors.FrameworkError, match=r"^like: expected an array of numpy, torch, jax or mlx, got str$"):
        gates.retnet(4, like="torch")
