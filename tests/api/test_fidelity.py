"""fidelity, distillation_loss and attention_weights against their definitions, on every framework."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn import errors, feature_maps
from maps_for_tests import EXAMPLES, H, K


def draw(*shape):
    return np.random.standard_normal(shape).astype(np.float32)


def softmax_weights(q, k, causal, scale):
    s = scale * np.einsum("bihk,bjhk->bhij", q, k)
    if causal:
        s = np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return s, e / e.sum(-1, keepdims=True)


def map_weights(example, q, k, causal):
    a = np.einsum("bihk,bjhk->bhij", example.truth(q), example.truth(k))
    a = np.tril(a) if causal else a
    total = a.sum(-1, keepdims=True)
    return np.where(total == 0, 0, a / np.where(total == 0, 1, total))


def floored(w):
    return np.log(np.maximum(w, feature_maps.FLOOR))


def kendall(s, w, causal):
    """Pair by pair, as the definition says, and how far float32 may be off: a pair nearly equal may count the other way."""
    _, H, T, _ = s.shape
    counted, unclear = np.zeros(H), np.zeros(H)
    pairs = 0
    for i in range(T):
        for lag in (2**n for n in range(10)):
            for j in range((i + 1 if causal else T) - lag):
                steps = [x[:, :, i, j + lag] - x[:, :, i, j] for x in (s, w)]
                sizes = [1.0, np.maximum(abs(w[:, :, i, j + lag]), abs(w[:, :, i, j]))]
                counted += np.prod(np.sign(steps), 0).mean(0)
                near = [abs(step) < 1e-4 * size for step, size in zip(steps, sizes, strict=True)]
                unclear += np.logical_or(*near).mean(0)
                pairs += 1
    return counted / max(pairs, 1), 2 * unclear / max(pairs, 1)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["elu1", "relu", "taylor2", "hedgehog", "cosformer", "performer"])
def test_fidelity(framework, name, causal):
    example, q, k = EXAMPLES[name], draw(2, 9, H, K), draw(2, 9, H, K)
    phi = example.map(lambda x: array(framework, x))
    given = (array(framework, q), array(framework, k))
    found = feature_maps.fidelity(phi, *given, causal=causal, scale=0.6)
    s, p = softmax_weights(q.astype(np.float64), k.astype(np.float64), causal, 0.6)
    w = map_weights(example, q, k, causal)
    monotonicity, off = kendall(s, np.where(abs(w) < 1e-15, 0, w), causal)
    assert (off < 0.05).all()
    assert (abs(np.asarray(found.monotonicity) - monotonicity) <= off + 1e-6).all()
    expected = {
        "entropy": -(w * floored(w)).sum(-1).mean((0, 2)),
        "softmax_entropy": -(p * floored(p)).sum(-1).mean((0, 2)),
        "kl": (p * (floored(p) - floored(w))).sum(-1).mean((0, 2)),
    }
    for field, value in expected.items():
        np.testing.assert_allclose(np.asarray(getattr(found, field)), value, rtol=1e-4, atol=1e-4, err_msg=field)
    loss = feature_maps.distillation_loss(phi, *given, causal=causal, scale=0.6)
    np.testing.assert_allclose(np.asarray(loss), -(p * floored(w)).sum(-1).mean(), rtol=1e-4)
    np.testing.assert_allclose(np.asarray(feature_maps.attention_weights(phi, *given, causal=causal)), w, atol=1e-5)


class Softmax(feature_maps.FeatureMap):
    """Weights that grow with q·k: many positive features of the right scale."""

    def __call__(self, x):
        return feature_maps.Performer(8192, scale=K**-0.25)(x)


def test_softmax_itself_is_monotone_and_a_constant_is_not():
    q, k = draw(1, 16, 1, K), draw(1, 16, 1, K)
    assert feature_maps.fidelity(Softmax(), q, k).monotonicity[0] > 0.85
    one = feature_maps.Relu()
    assert abs(feature_maps.fidelity(one, q * 0 + 1, k * 0 + 1).monotonicity[0]) == 0.0


def test_spiky_and_flat():
    """The hotter the map, the lower its entropy (Zhang et al. 2024, §3.2)."""
    q, k = draw(1, 64, 2, K), draw(1, 64, 2, K)
    entropies = [feature_maps.fidelity(feature_maps.Exp(t), q, k).entropy.mean() for t in (0.01, 0.5, 1.0, 2.0)]
    assert entropies == sorted(entropies, reverse=True)
    flat = np.log(np.arange(1, 65)).mean()
    assert entropies[0] == pytest.approx(flat, abs=1e-2)


def test_default_scale_and_names():
    q, k = draw(1, 7, 1, K), draw(1, 7, 1, K)
    assert feature_maps.distillation_loss("elu1", q, k) == feature_maps.distillation_loss(
        feature_maps.Elu1(), q, k, scale=K**-0.5
    )
    with pytest.raises(errors.OptionError, match="unknown feature map 'elu11': did you mean 'elu1'"):
        feature_maps.fidelity("elu11", q, k)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_distillation_loss_is_differentiable_in_parameters(framework):
    example, q, k = EXAMPLES["hedgehog"], draw(1, 6, H, K), draw(1, 6, H, K)
    there = {name: array(framework, p) for name, p in example.parameters.items()}
    q_there, k_there = array(framework, q), array(framework, k)

    def loss(W):
        return feature_maps.distillation_loss(feature_maps.Hedgehog(W, there["b"]), q_there, k_there)

    along, step = draw(*example.parameters["W"].shape).astype(np.float64), 1e-6
    W, b = (example.parameters[name].astype(np.float64) for name in ("W", "b"))

    def wide(W):
        q64, k64 = q.astype(np.float64), k.astype(np.float64)
        return float(feature_maps.distillation_loss(feature_maps.Hedgehog(W, b), q64, k64))

    expected = (wide(W + step * along) - wide(W - step * along)) / (2 * step)
    found = (gradient(framework, loss, example.parameters["W"]) * along).sum()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    np.testing.assert_allclose(np.asarray(compiled(framework, loss)(there["W"])), wide(W), rtol=1e-4)


def test_low_precision_is_measured_in_float32(torch):
    q, k = (torch.from_numpy(draw(1, 9, H, K)).bfloat16() for _ in range(2))
    found = feature_maps.fidelity("exp", q, k)
    assert all(x.dtype == torch.float32 and x.shape == (H,) for x in found)
    torch.testing.assert_close(found.kl, feature_maps.fidelity("exp", q.float(), k.float()).kl)


def test_a_single_token_has_no_pairs():
    found = feature_maps.fidelity("elu1", draw(1, 1, H, K), draw(1, 1, H, K))
    for value in found:
        np.testing.assert_allclose(value, 0, atol=1e-6)


@pytest.mark.parametrize("call", [feature_maps.fidelity, feature_maps.distillation_loss, feature_maps.attention_weights])
def test_wrong_shapes(call):
    for q, k in (((1, 5, 2, 8), (1, 6, 2, 8)), ((5, 8), (5, 8))):
        with pytest.raises(errors.ShapeError) as caught:
            call("elu1", draw(*q), draw(*k))
        assert str(caught.value) == f"q and k must both be [B, T, H, K], got {list(q)} and {list(k)}"


@pytest.mark.parametrize("call", [feature_maps.fidelity, feature_maps.distillation_loss, feature_maps.attention_weights])
def test_wrong_dtypes(call):
    q = draw(1, 5, 2, 8)
    with pytest.raises(errors.DtypeError) as caught:
        call("elu1", q, q.astype(np.float64))
    assert str(caught.value) == "k must have the dtype of q, float32, got float64"
    with pytest.raises(errors.DtypeError) as caught:
        call("elu1", q.astype(np.int64), q)
    assert str(caught.value) == "q must be float16, bfloat16, float32 or float64, got int64"


@pytest.mark.parametrize("call", [feature_maps.fidelity, feature_maps.distillation_loss])
@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (0, 5, 2, 8)])
def test_nothing_has_no_mean(call, shape):
    with pytest.raises(errors.ShapeError) as caught:
        call("elu1", draw(*shape), draw(*shape))
    assert str(caught.value) == f"q and k must hold at least one token, got [B, T, H, K] = {list(shape)}"


def test_arrays_on_two_devices(torch):
    q = torch.randn(1, 5, 2, 8)
    with pytest.raises(errors.DeviceError) as caught:
        feature_maps.fidelity("elu1", q, q.to("meta"))
    assert str(caught.value) == "k is on meta but q is on cpu: move it, nothing is copied for you"


def test_arrays_of_two_frameworks(torch):
    q = draw(1, 5, 2, 8)
    with pytest.raises(errors.FrameworkError) as caught:
        feature_maps.fidelity("elu1", q, torch.from_numpy(q))
    assert str(caught.value) == "k is a torch array but q is a numpy array: convert it, nothing is copied for you"
