"""Spans of tokens as affine maps of the state, ``S_out = A ∘ S_in + b``, in float64, by definition, with their pull-backs.

``b`` is the final state of the walk that starts from zeros. A diagonal ``A`` is ``e^{Σ g}``; a matrix is the final state of the
walk that starts from the identity and is given no values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import maps, oracle, ssd
from .recurrence import Array

__all__ = ["forward", "vjp"]

DECAYED = ("simple_gla", "gla", "rwkv6")


def forward(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Array]:
    """The summary of the tokens of family ``op`` in float64.

    Args:
        op: Family name, e.g. ``"gla"``.
        arrays: The arrays of ``linattn.summary_…`` by parameter name; a gate's parameters as ``gate.A_log`` and so on.
        options: Its static keywords by name, a gate by its kind.

    Returns:
        ``(A, b)``, in the shapes of the public function.
    """
    op, arrays, options = _inside(op, _with_queries(op, oracle.float64(arrays)), options)
    _, b = oracle.forward_matrix(op, arrays, options)
    if op == "linear_attn":
        return np.ones(b.shape[:2]), b
    if op in DECAYED:
        return _decay(op, arrays), b
    columns = [oracle.forward_matrix(op, one, {})[1] for one in _transitions(arrays)]
    return np.stack(columns, 2) if _per_column(arrays) else columns[0], b


def vjp(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], dA: Array, db: Array) -> dict[str, Array]:
    """Pull gradients of ``(A, b)`` back to the inputs, in float64.

    Args:
        op: Family name.
        arrays: As for ``forward``.
        options: As for ``forward``.
        dA: Gradient of ``A``.
        db: Gradient of ``b``.

    Returns:
        The gradient of every float array in ``arrays`` by name, in its own shape.
    """
    given = _with_queries(op, oracle.float64(arrays))
    inner, inside, asked = _inside(op, given, options)
    found = oracle.vjp_matrix(inner, inside, asked, None, db)
    if inner in DECAYED:
        extra = _decay_vjp(inside, dA)
    elif inner == "linear_attn":
        extra = {}
    else:
        per_column = _per_column(inside)
        each_dA = np.moveaxis(dA, 2, 0) if per_column else [dA]
        pulled = [oracle.vjp_matrix(inner, one, {}, None, d) for one, d in zip(_transitions(inside), each_dA, strict=True)]
        extra = {name: sum(each[name] for each in pulled) for name in pulled[0] if name not in ("v", "beta", "initial_state")}
        if "beta" in inside:
            betas = [each["beta"] for each in pulled]
            extra["beta"] = np.stack(betas, -1) if per_column else betas[0]
    found = {name: x + extra.get(name, 0.0) for name, x in found.items()}
    if options.get("normalize"):
        found |= {name: found[name][..., :-1] for name in oracle.VALUES if name in found}
    if op == "ssd":
        found = ssd.pull_back(given, options, np.zeros_like(given["x"]), np.zeros_like(given["x"]), found)
    elif maps.asked(options):
        found = maps.pull_back(given, options, found)
    return {name: x for name, x in found.items() if name in arrays}


def _with_queries(op: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """With what only outputs depend on: queries, of zeros, and a bonus."""
    if op == "ssd":
        return {**arrays, "C": np.zeros_like(arrays["B"])}
    more = {"u": np.zeros((arrays["v"].shape[2], arrays["k"].shape[-1]))} if op == "rwkv6" else {}
    return {**arrays, "q": np.zeros_like(arrays["k"]), **more}


def _inside(op: str, arrays: dict[str, Any], options: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Family, arrays and options of the recurrence, with the maps applied."""
    if op == "ssd":
        return "simple_gla", *ssd.inner(arrays, options)
    arrays, options = maps.apply(arrays, options) if maps.asked(options) else (arrays, dict(options))
    return op, *(oracle.with_ones(arrays, options) if options.get("normalize") else (arrays, options))


def _per_column(arrays: Mapping[str, Any]) -> bool:
    """Whether every value channel has a transition of its own."""
    return "beta" in arrays and arrays["beta"].ndim == 4


def _transitions(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Calls whose final state is ``A``: one, or with a ``beta`` per value channel one a channel."""
    B, T, HV, V = arrays["v"].shape
    K = arrays["k"].shape[-1]
    N = len(arrays["cu_seqlens"]) - 1 if "cu_seqlens" in arrays else B
    bare = {**arrays, "v": np.zeros((B, T, HV, K)), "initial_state": np.broadcast_to(np.eye(K), (N, HV, K, K))}
    if not _per_column(arrays):
        return [bare]
    return [{**bare, "beta": arrays["beta"][..., i]} for i in range(V)]


def _decay(op: str, arrays: Mapping[str, Any]) -> Array:
    """``e^{Σ g}`` over the tokens of each sequence."""
    x, S0 = oracle.spread(arrays)
    names = [name for name in ("g", "gv") if name in x]
    total = {name: np.zeros((*S0.shape[:2], x[name].shape[-1])) for name in names}
    for sequences, tokens in oracle.spans(arrays):
        for name in names:
            total[name][sequences] = x[name][:, tokens].sum(1)
    A = np.exp(np.concatenate(list(total.values()), -1))
    return A[..., 0] if op == "simple_gla" else A


def _decay_vjp(arrays: Mapping[str, Any], dA: Array) -> dict[str, Array]:
    """Every log decay of a sequence has the gradient ``A ∘ dA``."""
    x, _ = oracle.spread(arrays)
    if dA.ndim == 2:  # a number a head, which all channels share here
        dA = dA[..., None] * np.eye(1, x["g"].shape[-1])
        A = _decay("gla", {**arrays, "g": x["g"]})
    else:
        A = _decay("gla", arrays)
    d, K, found = A * dA, x["g"].shape[-1], {}
    for name, channels in (("g", slice(0, K)), ("gv", slice(K, None))):
        if name in x:
            dx = np.zeros_like(x[name])
            for sequences, tokens in oracle.spans(arrays):
                dx[:, tokens] = d[sequences][:, None, :, channels]
            found[name] = oracle.gather(dx, arrays[name].shape)
    return found
