"""The feature maps as the suite sees them: each defined once more, in float64, and made for a framework.

No backend implements them: a case shows that a call with a map is the call on mapped arrays, whatever the framework.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from linattn import feature_maps
from linattn.feature_maps.random_features import directions
from numpy.typing import NDArray

__all__ = ["HEADS", "LARGEST", "MAPS", "WIDTH", "Map", "width"]

Array = NDArray[Any]

HEADS, WIDTH = 2, 8
"""Of the cases of maps with parameters; these are drawn for it."""
SEED = 5
LARGEST = 64
"""Tokens that a map of positions is made for."""


@dataclass(frozen=True)
class Map:
    """One map.

    Attributes:
        define: From ``x`` and the parameters, all float64, the features.
        make: From the parameters in a framework, what is passed as ``feature_map``.
        shapes: Of the parameters.
        normalizes: Weights stay away from zero, so that dividing by their sum loses no digits: there is a case that does.
        scale: Of the queries and keys, so that features stay of comparable size.
    """

    define: Callable[..., Array]
    make: Callable[..., str | feature_maps.FeatureMap]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    normalizes: bool = True
    scale: float = 1.0

    @property
    def parameters(self) -> dict[str, Array]:
        """The values of the parameters: the same in every case, exact in float32."""
        return {
            name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32).astype(np.float64)
            / 2
            for name, shape in self.shapes.items()
        }

    def __call__(self, x: Array) -> Array:
        """The features, in float64."""
        return self.define(x, **self.parameters)


def drawn(name: str, shape: tuple[int, ...]) -> Array:
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return x.astype(np.float32).astype(np.float64) / 2


def width(name: str, K: int) -> int:
    """Width of the features of ``K`` numbers."""
    return MAPS[name](np.ones((1, 1, HEADS, K))).shape[-1]


def elu1(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def softmax(x: Array) -> Array:
    powers = np.exp(x)
    return powers / powers.sum(-1, keepdims=True)


def square(x: Array) -> Array:
    return np.einsum("...i,...j->...ij", x, x).reshape(*x.shape[:-1], x.shape[-1] ** 2)  # -1 is unknown of no tokens


def taylor2(x: Array) -> Array:
    y = x / x.shape[-1] ** 0.25
    return np.concatenate([np.ones_like(x[..., :1]), y, square(y) / np.sqrt(2)], -1)


def affine(x: Array, W: Array, b: Array) -> Array:
    return np.einsum("bthk,hkd->bthd", x, W) + b


def mirrored(activate: Callable[[Array], Array]) -> Callable[..., Array]:
    return lambda x, W, b: np.concatenate([activate(affine(x, W, b)), activate(-affine(x, W, b))], -1)


def performer(x: Array) -> Array:
    w = directions(SEED, x.shape[-1], 2 * x.shape[-1], True)
    return np.exp(x @ w - np.square(x).sum(-1, keepdims=True) / 2) / np.sqrt(w.shape[-1])


def rfa(x: Array) -> Array:
    angle = x @ directions(SEED, x.shape[-1], x.shape[-1], False)
    return np.concatenate([np.sin(angle), np.cos(angle)], -1) / np.sqrt(x.shape[-1])


def cosformer(x: Array) -> Array:
    angle = np.pi / 2 * np.arange(x.shape[1])[:, None, None] / LARGEST
    return np.concatenate([relu(x) * np.cos(angle), relu(x) * np.sin(angle)], -1)


def dpfp(x: Array) -> Array:
    r = relu(np.concatenate([x, -x], -1))
    return r * np.roll(r, 1, -1)


def rebased(x: Array, gamma: Array, beta: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return square(gamma * centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) + beta)


LINEAR = {"W": (HEADS, WIDTH, 12), "b": (HEADS, 12)}
SCALES = {"gamma": (HEADS, WIDTH), "beta": (HEADS, WIDTH)}

MAPS = {
    "identity": Map(lambda x: x, lambda: "identity", normalizes=False),
    "elu1": Map(elu1, lambda: "elu1"),
    "relu": Map(relu, lambda: "relu"),
    "relu2": Map(lambda x: relu(x) ** 2, lambda: "relu2"),
    "exp": Map(np.exp, lambda: "exp", scale=0.5),
    "taylor2": Map(taylor2, lambda: "taylor2"),
    "hedgehog": Map(mirrored(np.exp), feature_maps.Hedgehog, LINEAR, scale=0.5),
    "hedgehog_softmax": Map(mirrored(softmax), lambda **p: feature_maps.Hedgehog(**p, softmax=True), LINEAR),
    "t2r": Map(lambda x, W, b: relu(affine(x, W, b)), feature_maps.T2r, LINEAR),
    "performer": Map(performer, lambda: feature_maps.Performer(seed=SEED), scale=0.5),
    "rfa": Map(rfa, lambda: feature_maps.Rfa(seed=SEED), normalizes=False),
    "cosformer": Map(cosformer, lambda: feature_maps.Cosformer(M=LARGEST)),
    "dpfp": Map(dpfp, lambda: "dpfp"),
    "rebased": Map(rebased, feature_maps.Rebased, SCALES, normalizes=False, scale=0.5),
}
