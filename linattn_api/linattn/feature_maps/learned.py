"""Maps with parameters: plain arrays of the caller's framework, one set a head. A map is differentiable in them.

``init`` returns their initial values as NumPy arrays, by the names of the constructor. A model keeps them as it keeps its other
parameters, and makes the map in each call: ``Hedgehog(**parameters)``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..frameworks import Framework
from .base import Wide, bounded_softmax, check_whole, outer, parameter, power, rectified

__all__ = ["Hedgehog", "Rebased", "T2r"]

Parameters = dict[str, NDArray[np.float32]]


def _affine(xp: Framework, x: Any, owner: str, W: Any, b: Any) -> Any:
    """``x W + b`` for each head: ``[…, T, H, K]`` to ``[…, T, H, D]``."""
    H, K = _heads(owner, x)
    matrices = parameter(xp, x, owner, "W", W, "H K D", (H, K, None))
    y = xp.swapaxes(xp.matmul(xp.swapaxes(x, -2, -3), matrices), -2, -3)
    return y if b is None else y + parameter(xp, x, owner, "b", b, "H D", (H, matrices.shape[-1]))


def _heads(owner: str, x: Any) -> tuple[int, int]:
    if len(x.shape) < 3:
        raise ShapeError(f"{owner}: x must be [..., T, H, K], got {list(x.shape)}")
    return x.shape[-2], x.shape[-1]


@dataclass(frozen=True, eq=False)
class Hedgehog(Wide):
    """``φ(x) = [exp(y), exp(−y)]``, ``y = x W + b``, learned for each head (Zhang et al. 2024, eq. 3 and appendix A).

    Exponents are held within ±35, where weights and their sums stay within float32 and bfloat16. Features in float16 overflow
    from 11 on, but for the softmax-normalised variant.

    Args:
        W: ``[H, K, D]``; the features have width ``2D``.
        b: ``[H, D]``, or ``None`` for none.
        softmax: The softmax-normalised variant, ``[softmax(y), softmax(−y)]``: features stay below 1, and are held to ``e^−35``
            and more, so that no product of a query's with a key's vanishes, but in float16, which does not hold them. Default
            False.
        negation: Whether there is the half of ``−y``. Without it the map is eq. 3 as printed, and features have width ``D``.
            Default True.
    """

    W: Any
    b: Any = None
    softmax: bool = False
    negation: bool = True

    def features_of(self, xp: Framework, x: Any) -> Any:
        y = _affine(xp, x, "hedgehog", self.W, self.b)
        activate = functools.partial(bounded_softmax if self.softmax else power, xp)
        return xp.concat([activate(y), activate(-y)], axis=-1) if self.negation else activate(y)

    @staticmethod
    def init(H: int, K: int) -> Parameters:
        """``W`` the identity, ``b`` zero: ``{"W": [H, K, K], "b": [H, K]}``, float32."""
        check_whole("hedgehog", H=H, K=K)
        return {"W": np.tile(np.eye(K, dtype=np.float32), (H, 1, 1)), "b": np.zeros((H, K), np.float32)}


@dataclass(frozen=True, eq=False)
class T2r(Wide):
    """``φ(x) = relu(x W + b)``, learned for each head (Kasai et al. 2021, eq. 4).

    Args:
        W: ``[H, K, D]``; the features have width ``D``.
        b: ``[H, D]``, or ``None`` for none.
    """

    W: Any
    b: Any = None

    def features_of(self, xp: Framework, x: Any) -> Any:
        return rectified(xp, _affine(xp, x, "t2r", self.W, self.b))

    @staticmethod
    def init(H: int, K: int, features: int | None = None, seed: int = 0) -> Parameters:
        """``W`` normal with variance ``1/K``, ``b`` zero: ``{"W": [H, K, D], "b": [H, D]}``, float32.

        Args:
            H: Heads.
            K: Width of ``x``.
            features: ``D``. Default ``K``.
            seed: Of the random numbers.
        """
        D = K if features is None else features
        check_whole("t2r", H=H, K=K, features=D)
        check_whole("t2r", least=0, seed=seed)
        W = np.random.default_rng(seed).standard_normal((H, K, D)) * K**-0.5
        return {"W": W.astype(np.float32), "b": np.zeros((H, D), np.float32)}


@dataclass(frozen=True, eq=False)
class Rebased(Wide):
    """``φ(x) = vec(y yᵀ)``, ``y = γ ∘ norm(x) + β``, learned for each head; width ``K²`` (Aksenov et al. 2024).

    ``φ(q)·φ(k) = (y_q·y_k)²``: a square whose minimum, unlike that of ``taylor2``, is zero. ``norm`` is layer normalisation.

    Args:
        gamma: ``[H, K]``.
        beta: ``[H, K]``.
        norm: Normalise ``x`` first. Default True.
    """

    gamma: Any
    beta: Any
    norm: bool = True

    def features_of(self, xp: Framework, x: Any) -> Any:
        sizes = _heads("rebased", x)
        if self.norm:
            x = x - x.mean(axis=-1, keepdims=True)
            x = x * ((x * x).mean(axis=-1, keepdims=True) + 1e-5) ** -0.5
        gamma = parameter(xp, x, "rebased", "gamma", self.gamma, "H K", sizes)
        return outer(gamma * x + parameter(xp, x, "rebased", "beta", self.beta, "H K", sizes))

    @staticmethod
    def init(H: int, K: int) -> Parameters:
        """``γ = K^{-1/4}``, ``β`` zero: ``{"gamma": [H, K], "beta": [H, K]}``, float32. Then ``φ(q)·φ(k) = (q̂·k̂)²/K``."""
        check_whole("rebased", H=H, K=K)
        return {"gamma": np.full((H, K), K**-0.25, np.float32), "beta": np.zeros((H, K), np.float32)}
