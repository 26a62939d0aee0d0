"""The companions in float64 and their gradients, from their equations: a convolution row by row, a norm group by group.

``y_t = act(a_t)``, ``a_t = bias + Σ_{i<W} weight[:, i] · x_{t−W+1+i}``, whose ``W−1`` inputs before the first are the state's;
``norm(x)·weight·act(z)``, or ``norm(x·act(z))·weight``, with ``norm(x) = x (mean x² + eps)^{-1/2}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from .maps import sigmoid
from .recurrence import Array

__all__ = ["conv", "conv_vjp", "decoded", "norm", "norm_vjp"]


def activated(a: Array, activation: str | None) -> tuple[Array, Array]:
    """``act(a)`` and its derivative."""
    if activation is None:
        return a, np.ones_like(a)
    s = sigmoid(a)
    slope = s * (1 - s)
    return (a * s, s + a * slope) if activation == "silu" else (s, slope)


def sequences(arrays: Mapping[str, Any]) -> list[tuple[int, slice]]:
    """Batch row and tokens of every sequence."""
    B, T, _ = arrays["x"].shape
    if "cu_seqlens" not in arrays:
        return [(b, slice(0, T)) for b in range(B)]
    offsets = [int(x) for x in arrays["cu_seqlens"]]
    return [(0, slice(low, high)) for low, high in pairwise(offsets)]


def window(arrays: Mapping[str, Any], n: int, row: int, tokens: slice) -> Array:
    """The inputs of one sequence after those of its state: ``[W-1+L, D]``."""
    x, W = arrays["x"], arrays["weight"].shape[1]
    state = arrays.get("initial_state")
    before = np.zeros((W - 1, x.shape[2])) if state is None else state[n].T
    return np.concatenate([before, x[row, tokens]])


def conv(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Array]:
    """Outputs ``[B, T, D]``, zero behind the last packed sequence, and the last ``W-1`` inputs ``[N, D, W-1]``."""
    x, weight, W = arrays["x"], arrays["weight"], arrays["weight"].shape[1]
    y, ends = np.zeros_like(x), []
    for n, (row, tokens) in enumerate(sequences(arrays)):
        inputs = window(arrays, n, row, tokens)
        L = len(inputs) - W + 1
        a = sum(inputs[i : i + L] * weight[:, i] for i in range(W)) + arrays.get("bias", 0.0)
        y[row, tokens] = activated(a, options.get("activation"))[0]
        ends.append(inputs[L:].T)
    return y, np.array(ends).reshape(len(ends), x.shape[2], W - 1)


def conv_vjp(arrays: Mapping[str, Any], options: Mapping[str, Any], dy: Array | None, dend: Array | None) -> dict[str, Array]:
    """Gradients of ``x``, ``weight``, and of ``bias`` and ``initial_state`` where they are given."""
    weight, W = arrays["weight"], arrays["weight"].shape[1]
    found = {name: np.zeros_like(arrays[name]) for name in ("x", "weight", "bias", "initial_state") if name in arrays}
    for n, (row, tokens) in enumerate(sequences(arrays)):
        inputs = window(arrays, n, row, tokens)
        L, d_inputs = len(inputs) - W + 1, np.zeros_like(inputs)
        if dend is not None:
            d_inputs[L:] += dend[n].T
        if dy is not None:
            a = sum(inputs[i : i + L] * weight[:, i] for i in range(W)) + arrays.get("bias", 0.0)
            da = dy[row, tokens] * activated(a, options.get("activation"))[1]
            for i in range(W):
                d_inputs[i : i + L] += da * weight[:, i]
                found["weight"][:, i] += (da * inputs[i : i + L]).sum(0)
            if "bias" in found:
                found["bias"] += da.sum(0)
        found["x"][row, tokens] += d_inputs[W - 1 :]
        if "initial_state" in found:
            found["initial_state"][n] += d_inputs[: W - 1].T
    return found


def decoded(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Array]:
    """Outputs of the next tokens, and the pool ``[P, D, L]`` after them; rows of padding are zero."""
    x, W, pool = arrays["x"], arrays["weight"].shape[1], arrays["state"].copy()
    slots = arrays.get("state_indices", np.arange(len(x)))
    y = np.zeros_like(x)
    for n, slot in enumerate(slots):
        if slot < 0:
            continue
        past = pool[slot]
        given = {**arrays, "x": x[n : n + 1], "initial_state": past[None, :, past.shape[1] - W + 1 :]}
        y[n] = conv(given, options)[0][0]
        pool[slot] = np.concatenate([past, x[n].T], 1)[:, x.shape[1] :]
    return y, pool


def grouped(x: Array, options: Mapping[str, Any]) -> Array:
    """``[..., D]`` as ``[..., groups, size]``."""
    size = options.get("group_size") or x.shape[-1]
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def norm(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Array:
    """The gated norm ``[..., D]``."""
    x, weight = arrays["x"], arrays["weight"]
    gate, _ = activated(arrays["z"], options.get("activation", "silu"))
    first = options.get("norm_before_gate", True)
    h = grouped(x if first else x * gate, options)
    normed = h * (np.square(h).mean(-1, keepdims=True) + options.get("eps", 1e-5)) ** -0.5
    return normed.reshape(x.shape) * weight * (gate if first else 1.0)


def norm_unprojected(arrays: Mapping[str, Any], options: Mapping[str, Any], dy: Array) -> dict[str, Array]:
    """The gradients of what is normed, were its length a constant: the terms that the true ones are differences of."""
    x, weight = arrays["x"], arrays["weight"]
    gate, slope = activated(arrays["z"], options.get("activation", "silu"))
    first = options.get("norm_before_gate", True)
    h = grouped(x if first else x * gate, options)
    r = (np.square(h).mean(-1, keepdims=True) + options.get("eps", 1e-5)) ** -0.5
    dh = (r * grouped(dy * weight * (gate if first else 1.0), options)).reshape(x.shape)
    return {"x": dh} if first else {"x": dh * gate, "z": dh * x * slope}


def norm_vjp(arrays: Mapping[str, Any], options: Mapping[str, Any], dy: Array) -> dict[str, Array]:
    """Gradients of ``x``, ``z`` and ``weight``."""
    x, weight = arrays["x"], arrays["weight"]
    gate, slope = activated(arrays["z"], options.get("activation", "silu"))
    first = options.get("norm_before_gate", True)
    h = grouped(x if first else x * gate, options)
    r = (np.square(h).mean(-1, keepdims=True) + options.get("eps", 1e-5)) ** -0.5
    normed = (h * r).reshape(x.shape)
    dn = grouped(dy * weight * (gate if first else 1.0), options)
    dh = (r * dn - r**3 * h * (dn * h).mean(-1, keepdims=True)).reshape(x.shape)
    found = {"weight": (dy * normed * (gate if first else 1.0)).sum(tuple(range(x.ndim - 1)))}
    if first:
        return found | {"x": dh, "z": dy * normed * weight * slope}
    return found | {"x": dh * gate, "z": dh * x * slope}
