"""Random features: a kernel as the expectation of a product of features. One seed draws the same numbers everywhere.

No shift that depends on the data is subtracted in the exponent, so features of a token depend on that token alone, and a
sequence may be split or packed anywhere.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..frameworks import Framework
from .base import Wide, check_whole

__all__ = ["Performer", "Rfa"]


def directions(seed: int, K: int, m: int, orthogonal: bool) -> NDArray[np.float64]:
    """``m`` columns ``w ~ N(0, I)``: ``[K, m]``. Orthogonal ones are so in blocks of ``K``, with lengths as if independent."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((K, m))
    if not orthogonal:
        return w
    lengths = np.sqrt(np.square(w).sum(0))  # of the chi distribution
    blocks = -(-m // K)
    Q, R = np.linalg.qr(rng.standard_normal((blocks, K, K)))
    rotations = Q * np.sign(np.diagonal(R, axis1=1, axis2=2))[:, None, :]  # uniform: these signs make the decomposition unique
    return rotations.swapaxes(0, 1).reshape(K, blocks * K)[:, :m] * lengths


def _settle(phi: Performer | Rfa, owner: str) -> None:
    """Check the options; a NumPy integer becomes an int, which ``torch.compile`` takes for the constant that it is."""
    if phi.features is not None:
        check_whole(owner, features=phi.features)
    check_whole(owner, least=0, seed=phi.seed)
    object.__setattr__(phi, "seed", operator.index(phi.seed))


@dataclass(frozen=True)
class Performer(Wide):
    """``φ(x) = exp(w·x − |x|²/2)/√m``: positive random features; ``φ(x)·φ(y)`` is an unbiased estimate of ``exp(x·y)``
    (Choromanski et al. 2021, lemma 1 and §2.4).

    Args:
        features: ``m``, the width. Default ``2K``.
        seed: Of the random numbers.
        orthogonal: Rows ``w`` are orthogonal, which lowers the variance. Default True.
        scale: Multiplies ``x`` first; ``K ** -0.25`` estimates softmax weights, ``exp(q·k/√K)``. Default 1.
    """

    features: int | None = None
    seed: int = 0
    orthogonal: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        _settle(self, "performer")

    def features_of(self, xp: Framework, x: Any) -> Any:
        x = x * self.scale
        K = operator.index(x.shape[-1])
        m = self.features or 2 * K
        w = xp.constant(directions, (self.seed, K, m, self.orthogonal), like=x)
        return xp.exp(xp.matmul(x, w) - 0.5 * (x * x).sum(axis=-1, keepdims=True)) * m**-0.5


@dataclass(frozen=True)
class Rfa(Wide):
    """``φ(x) = [sin(w·x), cos(w·x)]/√D``: ``φ(x)·φ(y)`` is an unbiased estimate of the Gaussian kernel ``exp(−|x − y|²/2)``
    (Rahimi & Recht 2007; Peng et al. 2021, eq. 4).

    On vectors of one length it is that of softmax up to a factor, so Peng et al. normalise queries and keys first.

    Args:
        features: ``D``; the width is ``2D``. Default ``K``.
        seed: Of the random numbers.
        orthogonal: Rows ``w`` are orthogonal. Default False.
        scale: Multiplies ``x`` first. Default 1.
    """

    signed: ClassVar[bool] = True

    features: int | None = None
    seed: int = 0
    orthogonal: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        _settle(self, "rfa")

    def features_of(self, xp: Framework, x: Any) -> Any:
        K = operator.index(x.shape[-1])
        D = self.features or K
        angle = xp.matmul(x * self.scale, xp.constant(directions, (self.seed, K, D, self.orthogonal), like=x))
        return xp.concat([xp.sin(angle), xp.cos(angle)], axis=-1) * D**-0.5
