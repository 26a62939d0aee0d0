"""The attention weights that a map gives, beside those of softmax (Zhang et al. 2024, §3 and eq. 4)."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import DtypeError, ShapeError
from ..frameworks import Framework, framework_of
from .base import FeatureMap, check_float, check_place, rectified
from .names import resolve

__all__ = ["FLOOR", "Fidelity", "attention_weights", "distillation_loss", "fidelity"]

FLOOR = 1e-9
"""A weight below it, negative ones included, counts as this much wherever its logarithm is taken."""


class Fidelity(NamedTuple):
    """How a map's attention weights compare with those of softmax. Arrays ``[H]`` of the caller's framework.

    Attributes:
        entropy: Of the map's weights, in nats, averaged over queries; low is "spiky".
        softmax_entropy: Of the softmax weights.
        monotonicity: Whether a larger ``q·k`` has the larger weight: the share of pairs of keys for which that holds less the
            share for which the opposite does (Kendall's τ_a, over the pairs that are 1, 2, 4, 8 … tokens apart). 1 for softmax.
        kl: ``KL(softmax ‖ map)`` in nats, averaged over queries.
    """

    entropy: Any
    softmax_entropy: Any
    monotonicity: Any
    kl: Any


def attention_weights(feature_map: str | FeatureMap, q: Any, k: Any, *, causal: bool = True) -> Any:
    """``φ(q_i)·φ(k_j) / Σ_j φ(q_i)·φ(k_j)``: what ``normalize=True`` weighs values with, ``[B, H, T, T]``.

    Args:
        feature_map: A name or an object.
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        causal: ``False`` lets every query see every key.

    Returns:
        float32 (float64 for float64). A row whose sum is zero is zero.
    """
    xp, q, k = _wide(q, k)
    return _weights(xp, resolve(feature_map), q, k, causal)


def fidelity(feature_map: str | FeatureMap, q: Any, k: Any, *, causal: bool = True, scale: float | None = None) -> Fidelity:
    """Entropy, monotonicity and KL divergence of a map's attention weights, for each head (Zhang et al. 2024, §3).

    Args:
        feature_map: A name or an object.
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        causal: ``False`` lets every query see every key.
        scale: Of the softmax, ``softmax(scale · q·k)``. Default ``K ** -0.5``.
    """
    xp, q, k = _some(q, k)
    scores = _scores(xp, q, k, scale)
    p = _softmax_weights(xp, scores, causal)
    w = _weights(xp, resolve(feature_map), q, k, causal)
    kl = _cross_entropy(xp, p, p) - _cross_entropy(xp, p, w)
    return Fidelity(
        -_per_head(_cross_entropy(xp, w, w)),
        -_per_head(_cross_entropy(xp, p, p)),
        _monotonicity(xp, scores, w, causal),
        _per_head(kl),
    )


def distillation_loss(feature_map: str | FeatureMap, q: Any, k: Any, *, causal: bool = True, scale: float | None = None) -> Any:
    """Cross entropy between softmax weights and the map's, averaged over batch, heads and queries (Zhang et al. 2024, eq. 4).

    Differentiable in ``q``, ``k`` and the map's parameters; its minimum is the entropy of the softmax weights.

    Args:
        feature_map: A name or an object.
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        causal: ``False`` lets every query see every key.
        scale: Of the softmax, ``softmax(scale · q·k)``. Default ``K ** -0.5``.
    """
    xp, q, k = _some(q, k)
    p = _softmax_weights(xp, _scores(xp, q, k, scale), causal)
    return -_cross_entropy(xp, p, _weights(xp, resolve(feature_map), q, k, causal)).mean()


def _wide(q: Any, k: Any) -> tuple[Framework, Any, Any]:
    xp = framework_of(q, "q")
    check_place(xp, "", "q", q, "k", k)
    check_float(xp, "", "q", q)
    if xp.dtype(k) != xp.dtype(q):
        raise DtypeError(f"k must have the dtype of q, {xp.dtype(q)}, got {xp.dtype(k)}")
    if len(q.shape) != 4 or tuple(q.shape) != tuple(k.shape):
        raise ShapeError(f"q and k must both be [B, T, H, K], got {list(q.shape)} and {list(k.shape)}")
    return xp, xp.astype(q, xp.accumulation(q)), xp.astype(k, xp.accumulation(k))


def _some(q: Any, k: Any) -> tuple[Framework, Any, Any]:
    """The same where a mean is taken, so that there must be something to take it of."""
    xp, q, k = _wide(q, k)
    if 0 in q.shape:
        raise ShapeError(f"q and k must hold at least one token, got [B, T, H, K] = {list(q.shape)}")
    return xp, q, k


def _products(xp: Framework, q: Any, k: Any) -> Any:
    """``q_i·k_j`` as ``[B, H, T, T]``."""
    return xp.matmul(xp.swapaxes(q, 1, 2), xp.swapaxes(xp.swapaxes(k, 1, 2), -1, -2))


def _scores(xp: Framework, q: Any, k: Any, scale: float | None) -> Any:
    return _products(xp, q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _seen(xp: Framework, like: Any) -> Any:
    """Query ``i`` sees key ``j ≤ i``: ``[T, T]``."""
    t = xp.arange(like.shape[-1], like=like)
    return t[None, :] <= t[:, None]


def _softmax_weights(xp: Framework, scores: Any, causal: bool) -> Any:
    if causal:
        scores = xp.where(_seen(xp, scores), scores, xp.full((), float("-inf"), like=scores))
    return xp.softmax(scores)


def _weights(xp: Framework, phi: FeatureMap, q: Any, k: Any, causal: bool) -> Any:
    a = _products(xp, phi(q), phi(k))
    if causal:
        a = xp.where(_seen(xp, a), a, xp.zeros_like(a))
    total = a.sum(axis=-1, keepdims=True)
    zero = total == 0
    return xp.where(zero, xp.zeros_like(a), a / xp.where(zero, xp.full((), 1.0, like=a), total))


def _cross_entropy(xp: Framework, p: Any, w: Any) -> Any:
    """``Σ_j p_ij log w_ij``: ``[B, H, T]``. A ``p`` that is negative counts for nothing."""
    return (rectified(xp, p) * xp.log(xp.maximum(w, xp.full((), FLOOR, like=w)))).sum(axis=-1)


def _per_head(x: Any) -> Any:
    """Mean over batch and queries."""
    return x.mean(axis=2).mean(axis=0)


def _monotonicity(xp: Framework, scores: Any, w: Any, causal: bool) -> Any:
    T = w.shape[-1]
    agree, pairs = _per_head(xp.zeros_like(w[..., 0])), 0
    lag = 1
    while lag < T:
        signs = xp.sign(scores[..., lag:] - scores[..., :-lag]) * xp.sign(w[..., lag:] - w[..., :-lag])
        if causal:
            signs = xp.where(_seen(xp, w)[:, lag:], signs, xp.zeros_like(signs))
            pairs += (T - lag) * (T - lag + 1) // 2
        else:
            pairs += T * (T - lag)
        agree = agree + signs.sum(axis=-1).sum(axis=-1).mean(axis=0)
        lag *= 2
    return agree / max(pairs, 1)
