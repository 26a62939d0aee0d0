"""What the papers prove of their maps, held against the maps.

Statistical tests draw fresh numbers. Each says how often it fails a map that is right, and which error it finds.
"""

from __future__ import annotations

import math

import linattn
import numpy as np
import pytest
from linattn import feature_maps
from linattn.feature_maps import Performer, Rfa, Taylor2

K, DRAWS = 8, 800_000
SIGMAS = 5.5
"""A right map strays further than so many standard errors in 4 of 10⁸ tests."""


def pair(cosine, length=0.7):
    """Two vectors ``[K]`` of one length, with this cosine, in a random direction."""
    basis, _ = np.linalg.qr(np.random.standard_normal((K, 2)))
    x = length * basis[:, 0]
    return x, length * (cosine * basis[:, 0] + math.sqrt(1 - cosine**2) * basis[:, 1])


def estimates(cls, x, y, orthogonal=False, m=1):
    """``φ(x)·φ(y)`` of ``DRAWS / m`` maps with ``m`` features, from one map with all of them.

    The features of a map are independent (orthogonal ones: those of different blocks of ``K``), so they split into maps.
    """
    phi = cls(DRAWS, int(np.random.randint(2**31)), orthogonal)
    products = np.prod(phi(np.stack([x, y])), 0) * DRAWS
    return products.reshape(-1, DRAWS).sum(0).reshape(-1, m).mean(1)  # Rfa's sine and cosine belong together


def softmax_kernel(x, y):
    return math.exp(x @ y)


def gaussian_kernel(x, y):
    return math.exp(-np.square(x - y).sum() / 2)


def variance_of_sines(x, y):
    """Of one draw of Rfa (Sutherland & Schneider 2015): ``(1 − κ²)² / 2``."""
    return (1 - gaussian_kernel(x, y) ** 2) ** 2 / 2


def variance_of_positive(x, y):
    """Of one draw of Performer (Choromanski et al. 2021, lemma 2): ``(e^{|x+y|²} − 1) κ²``, ``κ = e^{x·y}``."""
    return (math.exp(np.square(x + y).sum()) - 1) * softmax_kernel(x, y) ** 2


KERNELS = {Performer: (softmax_kernel, variance_of_positive), Rfa: (gaussian_kernel, variance_of_sines)}
COSINES = (-0.9, 0.0, 0.7)


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize("cls", KERNELS)
def test_the_estimate_is_unbiased_and_its_variance_is_the_paper_s(cls, cosine):
    """The mean is the kernel, to ``SIGMAS`` standard errors by the paper's variance. A bias of 4 % of the kernel would be found
    in all but 4 of 10⁸ tests, since it is twice that far away (asserted). The variance is the paper's to 35 %, which tells
    1/√2 from 1."""
    kernel, variance = KERNELS[cls]
    x, y = pair(cosine)
    found, error = estimates(cls, x, y), math.sqrt(variance(x, y) / DRAWS)
    assert abs(found.mean() - kernel(x, y)) < SIGMAS * error
    assert 2 * SIGMAS * error < 0.04 * kernel(x, y)
    assert found.var() == pytest.approx(variance(x, y), rel=0.35)


@pytest.mark.parametrize("cosine", COSINES)
@pytest.mark.parametrize("cls", KERNELS)
def test_orthogonal_directions_are_unbiased_too(cls, cosine):
    x, y = pair(cosine)
    found = estimates(cls, x, y, orthogonal=True, m=K)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - KERNELS[cls][0](x, y)) < SIGMAS * error
    assert 2 * SIGMAS * error < 0.04 * KERNELS[cls][0](x, y)


def spread(found):
    """Variance of an estimate, and the standard error of that."""
    square = np.square(found - found.mean())
    return square.mean(), square.std() / math.sqrt(len(square))


def clearly_less(first, second):
    (a, a_error), (b, b_error) = spread(first), spread(second)
    return a + SIGMAS * math.hypot(a_error, b_error) < b


@pytest.mark.parametrize("cls", KERNELS)
def test_orthogonal_directions_estimate_better_than_independent_ones(cls):
    """Choromanski et al. 2021, theorem 2: lower variance for ``m ≤ K``. Here by more than can be chance."""
    x, y = pair(0.0)
    assert clearly_less(estimates(cls, x, y, orthogonal=True, m=K), estimates(cls, x, y, m=K))


@pytest.mark.parametrize(("cosine", "length", "better"), [(-1.0, 1.5, Performer), (-0.8, 1.5, Performer), (0.9, 0.5, Rfa)])
def test_positive_features_estimate_small_weights_better_than_sines_and_cosines(cosine, length, better):
    """Choromanski et al. 2021, lemma 2: as ``exp(x·y)`` goes to 0 the error of positive features does too, that of sines does
    not. Near ``x = y`` it is the other way round."""
    x, y = pair(cosine, length)
    found = {Performer: estimates(Performer, x, y), Rfa: math.exp((x @ x + y @ y) / 2) * estimates(Rfa, x, y)}
    for estimate in found.values():
        assert estimate.mean() == pytest.approx(
            softmax_kernel(x, y), abs=SIGMAS * spread(estimate)[0] ** 0.5 / DRAWS**0.5 + 1e-9
        )
    worse = Rfa if better is Performer else Performer
    assert clearly_less(found[better], found[worse])


def test_performer_at_the_scale_of_softmax():
    """``scale = K^{-1/4}`` and many features: the weights are those of softmax."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 12, 2, K)) for _ in range(2))
    phi = Performer(2**18, int(rng.integers(2**31)), scale=K**-0.25)
    assert np.max(feature_maps.fidelity(phi, q, k).kl) < 0.03


def test_taylor_is_the_expansion_and_its_error_is_below_the_remainder():
    """``φ(q)·φ(k) = 1 + s + s²/2`` exactly, and ``|e^s − φ·φ| ≤ e^{max(s, 0)} |s|³/6`` (Lagrange)."""
    rng = np.random.default_rng(0)
    q, k = (2 * rng.standard_normal((500, K)) for _ in range(2))
    s = (q * k).sum(-1) / math.sqrt(K)
    found = (Taylor2()(q) * Taylor2()(k)).sum(-1)
    np.testing.assert_allclose(found, 1 + s + s * s / 2, rtol=1e-12)
    assert (abs(np.exp(s) - found) <= np.exp(np.maximum(s, 0)) * abs(s) ** 3 / 6 * (1 + 1e-9) + 1e-12).all()
    assert found.min() >= 0.5


POSITIVE = ("elu1", "relu", "relu2", "exp", "taylor2", "performer", "dpfp")


@pytest.mark.parametrize("name", POSITIVE)
def test_normalised_outputs_are_averages(name):
    """Weights are positive and sum to one: the output lies between the smallest and the largest value seen so far."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 40, 2, 6)) for _ in range(3))
    o, _ = linattn.linear_attn(q, k, v, feature_map=name, normalize=True)
    seen = (abs(feature_maps.attention_weights(name, q, k)).sum(-1) > 0).swapaxes(1, 2)[..., None]
    assert (np.where(seen, o, v) <= np.maximum.accumulate(v, 1) + 1e-9).all()
    assert (np.where(seen, o, v) >= np.minimum.accumulate(v, 1) - 1e-9).all()


def test_hedgehog_can_be_distilled_to_softmax():
    """Eq. 4 with gradients of the map's parameters: KL falls by a third and more."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k = torch.randn(4, 48, 2, 8), torch.randn(4, 48, 2, 8)
    parameters = {name: torch.from_numpy(p).requires_grad_() for name, p in feature_maps.Hedgehog.init(2, 8).items()}
    phi = feature_maps.Hedgehog(**parameters)
    before = feature_maps.fidelity(phi, q, k).kl.mean().item()
    optimiser = torch.optim.Adam(parameters.values(), lr=0.03)
    for _ in range(60):
        optimiser.zero_grad()
        feature_maps.distillation_loss(phi, q, k).backward()
        optimiser.step()
    assert feature_maps.fidelity(phi, q, k).kl.mean().item() < 0.7 * before
