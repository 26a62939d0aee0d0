"""The companions of the operators in a framework's own array operations: whoever has no kernel of its own has these.

``short_conv``: ``y_t = act(bias + Σ_i weight[:, i] x_{t−W+1+i})``, a tap at a time; a tap that reaches over the start of its
sequence reads the initial state. ``gated_rms_norm``: ``norm(x) · weight · act(z)``, or ``norm(x · act(z)) · weight``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.plugin import Framework, framework_of

__all__ = ["decode_short_conv", "gated_rms_norm", "short_conv"]


def short_conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, Any]:
    """``(y, final_state)`` as the specification has it."""
    xp = framework_of(x)
    wide, W = xp.accumulation(x), weight.shape[1]
    rows = xp.astype(x, wide)
    state = None if initial_state is None else xp.swapaxes(xp.astype(initial_state, wide), 1, 2)  # [N, W-1, D]
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = _zeros(xp, (N, W - 1, x.shape[2]), rows) if state is None else state
    if x.shape[1] == 0:
        return xp.zeros_like(x), xp.swapaxes(before, 1, 2) if output_final_state else None
    if cu_seqlens is None:
        padded = xp.concat([before, rows], axis=1)
        taps = [padded[:, i : i + x.shape[1]] for i in range(W)]
        final = padded[:, x.shape[1] :]
        live = None
    else:
        places = _places(xp, cu_seqlens, x.shape[1])
        taps = [_tap(xp, rows[0], state, places, W - 1 - i)[None] for i in range(W)]
        final = _last(xp, rows[0], state, cu_seqlens, W)
        live = (places.owner < N)[None, :, None]
    y = _activated(xp, _weighted(xp, taps, weight, bias), activation)
    if live is not None:
        y = xp.where(live, y, xp.zeros_like(y))
    return xp.astype(y, xp.dtype(x)), xp.swapaxes(final, 1, 2) if output_final_state else None


def decode_short_conv(
    x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, state: Any, state_indices: Any = None
) -> Any:
    """Outputs of the next tokens; the windows of past inputs are overwritten."""
    xp = framework_of(x)
    wide, (N, T, _), W, L = xp.accumulation(x), x.shape, weight.shape[1], state.shape[2]
    if N == 0 or T == 0:
        return xp.zeros_like(x)
    slots = xp.arange(N, like=x) if state_indices is None else state_indices
    slots = xp.astype(slots, "int64")
    live = (slots >= 0) & (slots < state.shape[0])
    safe = xp.where(live, slots, xp.zeros_like(slots))
    window = state[safe]
    longer = xp.concat([xp.swapaxes(xp.astype(window, wide), 1, 2), xp.astype(x, wide)], axis=1)  # [N, L+T, D]
    taps = [longer[:, L + 1 - W + i : L + 1 - W + i + T] for i in range(W)]
    y = _activated(xp, _weighted(xp, taps, weight, bias), activation)
    after = xp.concat([window, xp.astype(xp.swapaxes(x, 1, 2), xp.dtype(state))], axis=2)[:, :, T:]
    after = xp.where(live[:, None, None], after, window)
    # Padding writes what the first sequence that is none writes; if all are, slot 0 gets what it had.
    writes = xp.where(live, xp.arange(N, like=slots), xp.astype(live, "int32").argmax())
    state[safe[writes]] = after[writes]
    return xp.astype(xp.where(live[:, None, None], y, xp.zeros_like(y)), xp.dtype(x))


def gated_rms_norm(
    x: Any,
    z: Any,
    weight: Any,
    *,
    activation: str = "silu",
    eps: float = 1e-5,
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Any:
    """The gated norm as the specification has it."""
    xp = framework_of(x)
    wide, D = xp.accumulation(x), x.shape[-1]
    h, gate = xp.astype(x, wide), _gate(xp, xp.astype(z, wide), activation)
    if not norm_before_gate:
        h = h * gate
    groups = h.reshape(*h.shape[:-1], D // (group_size or D), group_size or D)
    normed = groups * ((groups * groups).sum(-1)[..., None] / groups.shape[-1] + eps) ** -0.5
    y = normed.reshape(*h.shape) * xp.astype(weight, wide)
    return xp.astype(y * gate if norm_before_gate else y, xp.dtype(x))


def _sigmoid(xp: Framework, x: Any) -> Any:
    """``1 / (1 + e^{-x})`` without overflow."""
    return xp.exp(xp.log_sigmoid(x))


def _gate(xp: Framework, z: Any, activation: str) -> Any:
    """``act(z)``."""
    return z * _sigmoid(xp, z) if activation == "silu" else _sigmoid(xp, z)


def _activated(xp: Framework, y: Any, activation: str | None) -> Any:
    """``act(y)``."""
    return y if activation is None else _gate(xp, y, activation)


def _weighted(xp: Framework, taps: list[Any], weight: Any, bias: Any) -> Any:
    """The sum over taps, in their dtype."""
    wide = xp.dtype(taps[0])
    weight = xp.astype(weight, wide)
    total = taps[0] * weight[:, 0]
    for i in range(1, len(taps)):
        total = total + taps[i] * weight[:, i]
    return total if bias is None else total + xp.astype(bias, wide)


def _zeros(xp: Framework, shape: tuple[int, ...], like: Any) -> Any:
    """An array of zeros."""
    return xp.full(shape, 0.0, like=like)


class _Places(NamedTuple):
    """Of each token of packed sequences: whose it is (``N`` behind the last one), where it is there, and which token it is."""

    owner: Any
    position: Any
    index: Any


def _places(xp: Framework, offsets: Any, T: int) -> _Places:
    """Where each of ``T`` tokens lies. Sequences are found by counting those that have ended."""
    offsets = xp.astype(offsets, "int32")
    index = xp.arange(T, like=offsets)
    owner = xp.count_up_to(offsets[1:], T)
    return _Places(owner, index - offsets[xp.minimum(owner, offsets.shape[0] - 2)], index)


def _tap(xp: Framework, rows: Any, state: Any, places: _Places, back: int) -> Any:
    """The inputs ``back`` tokens before each token: of its sequence, else of the initial state, else zeros."""
    if back == 0:
        return rows
    inside = places.position >= back
    shifted = rows[xp.where(inside, places.index - back, xp.zeros_like(places.index))]
    return _or_state(xp, inside, shifted, state, places.owner, state is not None and state.shape[1] + places.position - back)


def _last(xp: Framework, rows: Any, state: Any, offsets: Any, W: int) -> Any:
    """The last ``W-1`` inputs of each sequence, ``[N, W-1, D]``."""
    offsets = xp.astype(offsets, "int32")
    N, D = offsets.shape[0] - 1, rows.shape[1]
    if W == 1 or N == 0:
        return _zeros(xp, (N, W - 1, D), rows)
    column = xp.arange((W - 1) * N, like=offsets)
    owner, column = column // (W - 1), column % (W - 1)
    index = offsets[owner + 1] - (W - 1) + column
    inside = index >= offsets[owner]
    found = rows[xp.where(inside, index, xp.zeros_like(index))]
    length = offsets[owner + 1] - offsets[owner]
    return _or_state(xp, inside, found, state, owner, length + column).reshape(N, W - 1, D)


def _or_state(xp: Framework, inside: Any, found: Any, state: Any, owner: Any, column: Any) -> Any:
    """``found`` where ``inside``; else the state's ``column``, or zero."""
    if state is None:
        return xp.where(inside[:, None], found, xp.zeros_like(found))
    N, W1, D = state.shape
    at = xp.minimum(owner, N - 1) * W1 + xp.minimum(column, W1 - 1)
    at = xp.where(inside, xp.zeros_like(at), at)
    return xp.where(inside[:, None], found, state.reshape(N * W1, D)[at])
