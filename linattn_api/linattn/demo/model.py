"""A byte-level language model made of GLA blocks, written once for the arrays of every framework.

::

    x_t  = Σ_i E_i[byte_{t-i}]                        the last CONTEXT bytes, one embedding each
    x    = x + GLA(norm(x)),  x = x + SwiGLU(norm(x)) in every block (GLA, Yang et al. 2024, §4.4; SwiGLU, Shazeer 2020)
    o    = norm(x) W                                  logits of byte t+1

    GLA:  q, k, v = x W;  g = logsigmoid(x A B + b) / 16;  (norm(gla(q, k, v, g)) ∘ swish(x R)) O, norm per head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import gates
from ..frameworks import framework_of
from ..ops import chunk_gla, recurrent_gla

__all__ = ["CONTEXT", "HEADS", "SIZES", "Sizes", "State", "empty_state", "forward", "initial_weights"]

CONTEXT = 4
"""Bytes whose embeddings are summed at each position."""

HEADS = 4
"""Heads of every GLA layer."""

BYTES = 256


class Sizes(NamedTuple):
    """Sizes of a model. ``HEADS`` divides ``width``."""

    layers: int = 3
    width: int = 128
    hidden: int = 256
    gate_rank: int = 16


SIZES = Sizes()
"""The model whose weights ship with linattn."""


class State(NamedTuple):
    """What the model remembers after some bytes; its size does not depend on how many they were.

    Attributes:
        recent: The last ``CONTEXT - 1`` bytes, ``[B, CONTEXT - 1]`` integers; 0 before the first.
        layers: The GLA state of each layer, ``[B, HEADS, K, V]``, as ``chunk_gla`` and ``recurrent_gla`` return it.
    """

    recent: Any
    layers: tuple[Any, ...]


def forward(
    weights: Mapping[str, Any],
    ids: Any,
    state: State | None = None,
    *,
    form: str = "chunk",
    backend: str | Sequence[str] | None = None,
    drop: Callable[[Any], Any] | None = None,
) -> tuple[Any, State]:
    """Logits of the byte after each byte, and the state after the last.

    Args:
        weights: Arrays of one framework by name, as :func:`initial_weights` names them.
        ids: Bytes ``[B, T]``, integers of the same framework.
        state: What an earlier call returned. Default: nothing came before.
        form: ``"chunk"`` runs ``chunk_gla``, ``"recurrent"`` runs ``recurrent_gla``.
        backend: As for the operators.
        drop: Applied to the embedding and to what each layer adds, in training. Default: nothing.

    Returns:
        ``(logits, state)``; logits are ``[B, T, 256]``.
    """
    state, drop = state or empty_state(weights, ids), drop or _keep
    T = ids.shape[1]
    window = framework_of(ids, "ids").concat([state.recent, ids], axis=1)
    x = sum(weights[f"embed.{i}"][window[:, CONTEXT - 1 - i : CONTEXT - 1 - i + T]] for i in range(CONTEXT))
    x = drop(x)
    states: list[Any] = []
    for layer, before in enumerate(state.layers):
        w = _Layer(weights, f"layer.{layer}.")
        mixed, after = _gla(w, _norm(x) * w["norm_mix"], before, form, backend)
        x = x + drop(mixed)
        x = x + drop(_swiglu(w, _norm(x) * w["norm_mlp"]))
        states.append(after)
    return (_norm(x) * weights["norm"]) @ weights["head"], State(window[:, T:], tuple(states))


def empty_state(weights: Mapping[str, Any], ids: Any) -> State:
    """The state before the first byte: zeros, in the dtype and on the device of the weights.

    Args:
        weights: As for :func:`forward`.
        ids: Bytes ``[B, T]``; only ``B``, the dtype and the device are used.
    """
    xp, B = framework_of(ids, "ids"), ids.shape[0]
    layers = sum(name.endswith(".norm_mix") for name in weights)
    width = weights["norm"].shape[0] // HEADS
    states = [xp.full((B, HEADS, width, width), 0, like=weights["norm"]) for _ in range(layers)]
    return State(xp.full((B, CONTEXT - 1), 0, like=ids), tuple(states))


class _Layer:
    """The weights of one layer, without its prefix."""

    def __init__(self, weights: Mapping[str, Any], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Any:
        return self._weights[self._prefix + name]


def _keep(x: Any) -> Any:
    return x


def _gla(w: _Layer, x: Any, state: Any, form: str, backend: str | Sequence[str] | None) -> tuple[Any, Any]:
    """The GLA layer: ``x [B, T, D]`` to ``[B, T, D]``, and its state."""
    B, T, D = x.shape
    q, k, v = ((x @ w[name]).reshape(B, T, HEADS, D // HEADS) for name in ("q", "k", "v"))
    g = gates.gla(((x @ w["gate_in"]) @ w["gate_out"] + w["gate_bias"]).reshape(B, T, HEADS, D // HEADS))
    operator = chunk_gla if form == "chunk" else recurrent_gla
    o, after = operator(q, k, v, g, initial_state=state, output_final_state=True, backend=backend)
    return ((_norm(o) * w["norm_head"]).reshape(B, T, D) * _swish(x @ w["swish"])) @ w["out"], after


def _swiglu(w: _Layer, x: Any) -> Any:
    """``(swish(x U) ∘ x V) W`` (Shazeer 2020)."""
    return (_swish(x @ w["mlp_gate"]) * (x @ w["mlp_in"])) @ w["mlp_out"]


def _norm(x: Any) -> Any:
    """RMS norm along the last axis (Zhang & Sennrich 2019), without its weight."""
    return x * ((x * x).mean(axis=-1, keepdims=True) + 1e-5) ** -0.5


def _swish(x: Any) -> Any:
    """``x σ(x)``; the hyperbolic tangent cannot overflow."""
    return x * (0.5 + 0.5 * framework_of(x).module.tanh(0.5 * x))


def initial_weights(sizes: Sizes = SIZES, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights to start training from: float32 NumPy arrays, the same for one seed wherever they are drawn.

    Args:
        sizes: Sizes of the model.
        seed: Of the random numbers.
    """
    rng = np.random.default_rng(seed)
    D, F, R = sizes.width, sizes.hidden, sizes.gate_rank

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return (rng.standard_normal((rows, columns)) * gain / rows**0.5).astype(np.float32)

    def ones(n: int) -> NDArray[np.float32]:
        return np.ones(n, np.float32)

    weights = {f"embed.{i}": (rng.standard_normal((BYTES, D)) / 2).astype(np.float32) for i in range(CONTEXT)}
    small = (2 * sizes.layers) ** -0.5  # the layers' sum starts as large as one layer
    for layer in range(sizes.layers):
        new = {"norm_mix": ones(D), "norm_mlp": ones(D), "norm_head": ones(D // HEADS)}
        new |= {name: matrix(D, D) for name in ("q", "k", "v", "swish")} | {"out": matrix(D, D, small)}
        new |= {"gate_in": matrix(D, R), "gate_out": matrix(R, D, 0.5)}
        # each head starts with channels that forget within some 20 tokens and channels that keep thousands
        new["gate_bias"] = np.tile(np.linspace(0.0, 6.0, D // HEADS, dtype=np.float32), HEADS)
        new |= {"mlp_gate": matrix(D, F), "mlp_in": matrix(D, F), "mlp_out": matrix(F, D, small)}
        weights |= {f"layer.{layer}.{name}": array for name, array in new.items()}
    return weights | {"norm": ones(D), "head": matrix(D, BYTES, 0.5)}
