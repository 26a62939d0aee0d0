"""Every feature map with parameters in any framework, beside its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from linattn import feature_maps
from linattn.feature_maps.random_features import directions

H, K = 3, 8
SEED = 20240817
_rng = np.random.default_rng(SEED)


def _parameters(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: (0.5 * _rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


class Example(NamedTuple):
    """``make(array, **parameters)`` is the map, ``define(x, **parameters)`` what it must compute, in float64."""

    make: Callable[..., feature_maps.FeatureMap]
    define: Callable[..., np.ndarray]
    parameters: dict[str, np.ndarray] = {}

    def map(self, array: Callable[[np.ndarray], Any]) -> feature_maps.FeatureMap:
        return self.make(**{name: array(value) for name, value in self.parameters.items()})

    def truth(self, x: np.ndarray) -> np.ndarray:
        wide = {name: value.astype(np.float64) for name, value in self.parameters.items()}
        return self.define(x.astype(np.float64), **wide)


def elu1(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def relu(x):
    return np.maximum(x, 0)


def softmax(x):
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)


def linear(x, W, b):
    return np.einsum("bthk,hkd->bthd", x, W) + b


def both(f):
    return lambda x, W, b: np.concatenate([f(linear(x, W, b)), f(-linear(x, W, b))], -1)


def square(x):
    return np.einsum("...i,...j->...ij", x, x).reshape(*x.shape[:-1], -1)


def taylor2(x):
    y = x / x.shape[-1] ** 0.25
    return np.concatenate([np.ones_like(x[..., :1]), y, square(y) / np.sqrt(2)], -1)


def dpfp(x, nu=1):
    r = relu(np.concatenate([x, -x], -1))
    return np.concatenate([r * np.roll(r, j, -1) for j in range(1, nu + 1)], -1)


def performer(m, orthogonal, scale=1.0):
    def phi(x):
        w = directions(SEED, K, m, orthogonal)
        return np.exp(scale * x @ w - scale**2 * np.square(x).sum(-1, keepdims=True) / 2) / np.sqrt(m)

    return phi


def rfa(D, orthogonal):
    def phi(x):
        angle = x @ directions(SEED, K, D, orthogonal)
        return np.concatenate([np.sin(angle), np.cos(angle)], -1) / np.sqrt(D)

    return phi


def cosformer(M, start=0):
    def phi(x):
        angle = np.pi * (start + np.arange(x.shape[-3]))[:, None, None] / (2 * M)
        return np.concatenate([relu(x) * np.cos(angle), relu(x) * np.sin(angle)], -1)

    return phi


def rebased(x, gamma, beta):
    centred = x - x.mean(-1, keepdims=True)
    return square(gamma * centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) + beta)


def plain(name):
    return lambda: feature_maps.MAPS[name]()


AFFINE = _parameters(W=(H, K, 5), b=(H, 5))
SCALES = _parameters(gamma=(H, K), beta=(H, K))

EXAMPLES = {
    "identity": Example(plain("identity"), lambda x: x),
    "elu1": Example(plain("elu1"), elu1),
    "relu": Example(plain("relu"), relu),
    "relu2": Example(plain("relu2"), lambda x: relu(x) ** 2),
    "exp": Example(plain("exp"), np.exp),
    "exp t=2": Example(lambda: feature_maps.Exp(t=2.0), lambda x: np.exp(2 * x)),
    "taylor2": Example(plain("taylor2"), taylor2),
    "dpfp": Example(plain("dpfp"), dpfp),
    "dpfp nu=3": Example(lambda: feature_maps.Dpfp(nu=3), lambda x: dpfp(x, 3)),
    "hedgehog": Example(feature_maps.Hedgehog, both(np.exp), AFFINE),
    "hedgehog softmax": Example(lambda **p: feature_maps.Hedgehog(**p, softmax=True), both(softmax), AFFINE),
    "hedgehog without negation": Example(
        lambda **p: feature_maps.Hedgehog(**p, negation=False), lambda x, W, b: np.exp(linear(x, W, b)), AFFINE
    ),
    "hedgehog without b": Example(feature_maps.Hedgehog, lambda x, W: both(np.exp)(x, W, 0.0), {"W": AFFINE["W"]}),
    "t2r": Example(feature_maps.T2r, lambda x, W, b: relu(linear(x, W, b)), AFFINE),
    "rebased": Example(feature_maps.Rebased, rebased, SCALES),
    "rebased without norm": Example(
        lambda **p: feature_maps.Rebased(**p, norm=False), lambda x, gamma, beta: square(gamma * x + beta), SCALES
    ),
    "performer": Example(lambda: feature_maps.Performer(seed=SEED), performer(2 * K, True)),
    "performer independent": Example(
        lambda: feature_maps.Performer(features=7, seed=SEED, orthogonal=False, scale=0.5), performer(7, False, 0.5)
    ),
    "rfa": Example(lambda: feature_maps.Rfa(seed=SEED), rfa(K, False)),
    "rfa orthogonal": Example(lambda: feature_maps.Rfa(features=21, seed=SEED, orthogonal=True), rfa(21, True)),
    "cosformer": Example(lambda: feature_maps.Cosformer(M=64), cosformer(64)),
    "cosformer from 5": Example(lambda: feature_maps.Cosformer(M=64, start=5), cosformer(64, 5)),
}
