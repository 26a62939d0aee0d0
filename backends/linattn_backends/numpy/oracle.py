"""The oracle as two pure functions in float64, ``forward`` and ``vjp``. For the conformance suite they are the truth.

``recurrence.py`` says what a family means for one value head of one sequence; here is all that the families share:
grouped value heads, gates that channels or tokens share, packed sequences, ``scale``, and the normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import numpy as np

from . import companions, maps, mixed, ssd
from .recurrence import FAMILIES, Array, Moves, walk, walk_vjp, whole, whole_vjp

__all__ = ["forward", "vjp"]


def forward(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Any]:
    """Run family ``op`` in float64.

    Args:
        op: Family name, e.g. ``"gla"``.
        arrays: The arrays by parameter name, in the shapes of the public function, ``initial_state``, ``cu_seqlens``
            and ``bias`` among them, a gate's parameters as ``gate.A_log`` and so on; one that is not given is absent or
            ``None``.
        options: The static keywords by name, a gate by its kind; those absent have the default of the public function.

    Returns:
        ``o [B, T, HV, V]``, and the final state if ``options["output_final_state"]``, else ``None``: ``[N, HV, K, V]``,
        ``[N, HV, K, V+1]`` if normalised, a ``MixedState`` for ``mixed_attn``.
    """
    arrays = float64(arrays)
    if op == "gated_rms_norm":
        return companions.norm(arrays, options), None
    if op == "short_conv":
        o, state = companions.conv(arrays, options)
        return o, state if options.get("output_final_state") else None
    if op == "ssd":
        o, state = forward_matrix("simple_gla", *ssd.inner(arrays, options))
        return ssd.after(arrays, o), state if options.get("output_final_state") else None
    if maps.asked(options):
        arrays, options = maps.apply(arrays, options)
    o, state = mixed.forward(arrays, options) if op == "mixed_attn" else forward_matrix(op, arrays, options)
    return o, state if options.get("output_final_state") else None


def vjp(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any = None, d_state: Any = None) -> dict[str, Any]:
    """Pull gradients of the outputs of family ``op`` back to its inputs, in float64.

    Args:
        op: Family name.
        arrays: As for ``forward``.
        options: As for ``forward``.
        d_o: Gradient of ``o``; ``None`` is zero.
        d_state: Gradient of the final state; ``None`` is zero. That of ``length`` in a ``MixedState`` is ignored.

    Returns:
        The gradient of every float array in ``arrays`` by name, ``initial_state`` included, in the array's own shape.
        That of a ``MixedState`` is a ``MixedState`` whose ``length`` is ``None``.
    """
    arrays, d_o, d_state = float64(arrays), as_float64(d_o), as_float64(d_state)
    if op == "gated_rms_norm":
        return companions.norm_vjp(arrays, options, np.zeros_like(arrays["x"]) if d_o is None else d_o)
    if op == "short_conv":
        return companions.conv_vjp(arrays, options, d_o, d_state)
    if op == "mixed_attn":
        return mixed.vjp(arrays, options, d_o, d_state)
    if op == "ssd":
        given, inside = ssd.inner(arrays, options)
        do = np.zeros_like(arrays["x"]) if d_o is None else d_o
        pulled = vjp_matrix("simple_gla", given, inside, ssd.pull_back_output(arrays, do), d_state)
        return ssd.pull_back(arrays, options, forward_matrix("simple_gla", given, inside)[0], do, pulled)
    if not maps.asked(options):
        return vjp_matrix(op, arrays, options, d_o, d_state)
    return maps.pull_back(arrays, options, vjp_matrix(op, *maps.apply(arrays, options), d_o, d_state))


def float64(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that are not ``None``, in float64 (exact for every narrower dtype)."""
    return {name: as_float64(array) for name, array in arrays.items() if array is not None}


def as_float64(array: Any) -> Any:
    """One array, or each of a ``MixedState``; indices, and ``None``, stay what they are.

    In one memory order, because the order of a sum, and so its last bit, follows the strides.
    """
    if array is None:
        return None
    if isinstance(array, tuple):
        return type(array)(*map(as_float64, array))
    array = np.asarray(array)
    return array if array.dtype.kind in "iu" else np.asarray(array, dtype=np.float64, order="C")


# The eight families whose state is a matrix.


def forward_matrix(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Array]:
    if options.get("normalize"):
        return _forward_normalized(op, arrays, options)
    x, S0 = spread(arrays)
    o, S = np.zeros_like(x["v"]), np.zeros_like(S0)
    for (sequences, tokens), heads in product(spans(arrays), blocks(S0)):
        own = {name: array[:, tokens, heads] for name, array in x.items()}
        if options.get("causal", True):
            o[:, tokens, heads], S[sequences, heads] = walk(moves(op, own), own, S0[sequences, heads])
        else:
            o[:, tokens, heads] = whole(own)
    return scale(arrays, options) * o, S


def vjp_matrix(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any, d_state: Any) -> dict[str, Array]:
    if options.get("normalize"):
        return _vjp_normalized(op, arrays, options, d_o, d_state)
    x, S0 = spread(arrays)
    do = np.zeros_like(x["v"]) if d_o is None else scale(arrays, options) * d_o
    dS = np.zeros_like(S0) if d_state is None else d_state
    dx, dS0 = {name: np.zeros_like(array) for name, array in x.items()}, np.zeros_like(S0)
    for (sequences, tokens), heads in product(spans(arrays), blocks(S0)):
        own, d_own = {name: array[:, tokens, heads] for name, array in x.items()}, do[:, tokens, heads]
        if options.get("causal", True):
            states = S0[sequences, heads], dS[sequences, heads]
            d_own, dS0[sequences, heads] = walk_vjp(moves(op, own), own, states[0], d_own, states[1])
        else:
            d_own = whole_vjp(own, d_own)
        for name, d_array in d_own.items():
            dx[name][:, tokens, heads] = d_array
    gradients = {name: gather(d_array, arrays[name].shape) for name, d_array in dx.items()}
    return {**gradients, "initial_state": dS0} if "initial_state" in arrays else gradients


def moves(op: str, x: Mapping[str, Array]) -> Moves:
    """The moves of a family, less those whose inputs were not given: ``gla`` without ``gv``."""
    return tuple(move for move in FAMILIES[op] if set(move.inputs) <= x.keys())


def scale(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """What multiplies the output: ``K ** -0.5`` unless given."""
    given_scale = options.get("scale")
    return arrays["k"].shape[-1] ** -0.5 if given_scale is None else given_scale


def spans(arrays: Mapping[str, Any]) -> list[tuple[slice, slice]]:
    """Sequences to run together, and their tokens: all at once, or one packed sequence after the other."""
    if "cu_seqlens" not in arrays:
        return [(slice(None), slice(None))]
    return [(slice(n, n + 1), slice(*span)) for n, span in enumerate(pairwise(arrays["cu_seqlens"].tolist()))]


HELD = 2**16
"""Numbers of the states that are walked together: as many as a core has at hand."""


def blocks(S: Array) -> list[slice]:
    """Value heads to run together, which never meet."""
    N, HV, K, V = S.shape
    count = max(HELD // max(N * K * V, 1), 1)
    return [slice(first, first + count) for first in range(0, HV, count)]


# To the shapes that the recurrences are written for, and back.


def spread(arrays: Mapping[str, Any]) -> tuple[dict[str, Array], Array]:
    """All inputs with a number for every token, value head and channel, ``[B, T, HV, K or V]``; the initial state."""
    B, T, HV, V = arrays["v"].shape
    K = arrays["k"].shape[-1]
    N = len(arrays["cu_seqlens"]) - 1 if "cu_seqlens" in arrays else B
    widths = {"v": V, "gv": V, "beta": V}
    x = {
        name: spread_one(array, (B, T, HV, widths.get(name, K)))
        for name, array in arrays.items()
        if name not in ("initial_state", "cu_seqlens")
    }
    return x, arrays.get("initial_state", np.zeros((N, HV, K, V)))


def spread_one(array: Array, shape: tuple[int, ...]) -> Array:
    """One input in the shape ``[B, T, HV, width]``."""
    if array.ndim < 3:  # [HV] or [HV, width]: the same for every token
        array = array[None, None]
    if array.ndim == 3:  # [B, T, HV]: the same for every channel
        array = array[..., None]
    group = shape[2] // array.shape[2]  # value head j reads query/key head j // group
    return np.broadcast_to(np.repeat(array, group, axis=2) if group > 1 else array, shape)


def gather(d_array: Array, shape: tuple[int, ...]) -> Array:
    """The VJP of ``spread_one``: what was given once and used often gets the sum of its gradients."""
    if len(shape) in (1, 3):
        d_array = d_array.sum(-1)
    if len(shape) < 3:
        return d_array.sum((0, 1))
    B, T, HV, *width = d_array.shape
    H = shape[2]
    return d_array.reshape(B, T, H, HV // H, *width).sum(3)


# ``normalize=True``: the values gain a channel of ones, which the recurrence turns into the denominator q·z. Their own
# decay leaves it alone.

VALUES = {"v": 1.0, "gv": 0.0}
"""What has value channels, and its number in the new one."""


def _forward_normalized(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Array]:
    o, S = forward_matrix(op, *with_ones(arrays, options))
    numerator, denominator = o[..., :-1], o[..., -1:]
    return divide(numerator, denominator), S


def _vjp_normalized(op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any, d_state: Any) -> dict[str, Array]:
    arrays, options = with_ones(arrays, options)
    o, _ = forward_matrix(op, arrays, options)
    numerator, denominator = o[..., :-1], o[..., -1:]
    d_numerator = divide(np.zeros_like(numerator) if d_o is None else d_o, denominator)
    d_denominator = -(d_numerator * divide(numerator, denominator)).sum(-1, keepdims=True)
    gradients = vjp_matrix(op, arrays, options, np.concatenate([d_numerator, d_denominator], -1), d_state)
    return {name: x[..., :-1] if name in VALUES else x for name, x in gradients.items()}


def with_ones(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call without ``normalize`` that returns numerator and denominator side by side."""
    column = {name: np.full((*x.shape[:-1], 1), VALUES[name]) for name, x in arrays.items() if name in VALUES}
    wider = {name: np.concatenate([arrays[name], x], -1) for name, x in column.items()}
    return {**arrays, **wider}, {**options, "normalize": False, "scale": 1.0}


def divide(numerator: Array, denominator: Array) -> Array:
    """The quotient; zero, and with zero gradient, where the denominator is zero."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)
