"""The functions of ``causal_conv1d`` (1.7), on ``linattn.short_conv`` and ``decode_short_conv``.

>>> from linattn.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

Its arrays have channels before time, ``[B, D, L]``, in any strides; what linattn gets is a transposed view of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..ops import decode_short_conv, short_conv
from ._slots import Slots, wants_gradient
from .seams import Integration

__all__ = [
    "FUNCTIONS",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "disable",
    "enable",
]


ACTIVATIONS = (None, "silu", "swish")


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Causal depthwise convolution, as ``causal_conv1d.causal_conv1d_fn`` calls it.

    Args:
        x: Inputs ``[B, D, L]``, any strides.
        weight: Filters ``[D, W]``, ``W`` from 1 to 8, any float dtype.
        bias: ``[D]``. Default nothing.
        seq_idx: Which sequence each token is of ``[B, L]``, integers that change where one begins; no tap reaches over such a
            place. A token of a negative one is padding, whose output is zero. Stays on its device. Default: one a row.
        initial_states: The inputs before the first ``[B, D, W-1]``, oldest first. Default zeros.
        return_final_states: Return the last inputs as well. Default False.
        final_states_out: What to write these to ``[B, D, W-1]``. Default: a new tensor of the dtype of ``x``.
        activation: ``"silu"`` or ``"swish"``, which are one, or ``None``.

    Returns:
        ``y [B, D, L]``, of the dtype of ``x``; ``(y, final_states)`` if these are asked for.

    Raises:
        OptionError: An activation that is none of these; ``return_final_states`` beside ``seq_idx``.
        ArgumentError: As :func:`linattn.short_conv` raises.
    """
    activation = _activation("causal_conv1d_fn", activation)
    if seq_idx is not None:
        if return_final_states:
            raise OptionError("causal_conv1d_fn: return_final_states has no meaning beside seq_idx: leave out one of them")
        return _of_sequences(x, weight, bias, seq_idx, initial_states, activation)
    y, final = short_conv(
        x.mT, weight, bias, activation=activation, initial_state=initial_states, output_final_state=return_final_states
    )
    if final is None:
        return y.mT
    return y.mT, final.to(x.dtype) if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The convolution of a few more tokens, as ``causal_conv1d.causal_conv1d_update`` calls it.

    Where a gradient is asked for, it flows through the tokens and, by what is written to ``conv_state``, from call to call.

    Args:
        x: The tokens ``[B, D]`` or ``[B, D, L]``, any strides.
        conv_state: The inputs before them ``[P, D, S]``, ``S ≥ W-1``, oldest first; overwritten.
        weight: Filters ``[D, W]``, ``W`` from 1 to 8, any float dtype.
        bias: ``[D]``. Default nothing.
        activation: ``"silu"`` or ``"swish"``, which are one, or ``None``.
        cache_seqlens: How many inputs each state has seen ``[B]``: states are then circular, and the next input goes to column
            ``cache_seqlens % S``. Default: the newest input is in the last column.
        conv_state_indices: Which state is each sequence's ``[B]``. A negative one is padding: its outputs are zero and nothing
            is written. Default: state ``n`` for sequence ``n``.

    Returns:
        Outputs, of the shape and dtype of ``x``.

    Raises:
        OptionError: An activation that is none of these.
        ArgumentError: As :func:`linattn.decode_short_conv` raises.
    """
    activation = _activation("causal_conv1d_update", activation)
    tokens = x[:, None] if x.dim() == 2 else x.mT
    if cache_seqlens is None and not wants_gradient(x, weight, bias, conv_state):
        y = decode_short_conv(tokens, weight, bias, state=conv_state, state_indices=conv_state_indices, activation=activation)
    else:
        y = _on_copies(tokens, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
    return y[:, 0] if x.dim() == 2 else y.mT


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last inputs of packed sequences, as ``causal_conv1d.causal_conv1d_varlen`` calls them.

    Args:
        x: Inputs of sequences end to end ``[T, D]``.
        cu_seqlens: Where each begins, and the last one ends ``[N+1]``.
        state_len: How many inputs to take of each.

    Returns:
        ``[N, D, state_len]``, oldest first, zero before a sequence's first; a transposed view.
    """
    begin, end = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    index = end + torch.arange(-state_len, 0, device=x.device)
    inside = index >= begin
    rows = x[torch.where(inside, index, 0).long()]
    return torch.where(inside[..., None], rows, 0).mT


def _activation(function: str, activation: str | None) -> str | None:
    """The name that linattn has for it."""
    if activation not in ACTIVATIONS:
        raise OptionError(f"{function}: activation must be None, 'silu' or 'swish', got {activation!r}")
    return None if activation is None else "silu"


def _of_sequences(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, initial_states: Tensor | None, activation: str | None
) -> Tensor:
    """Rows end to end, packed: each place where ``seq_idx`` changes begins a sequence. What was before a row is more tokens."""
    if initial_states is not None:
        x = torch.cat([initial_states.to(x.dtype), x], dim=-1)
        seq_idx = torch.cat([seq_idx[:, :1].expand(-1, initial_states.shape[-1]), seq_idx], dim=-1)
    B, _, L = x.shape
    y, _ = short_conv(x.mT.reshape(1, B * L, -1), weight, bias, activation=activation, cu_seqlens=offsets(seq_idx))
    y = y.reshape(B, L, -1).mT.masked_fill((seq_idx < 0)[:, None], 0.0)
    return y if initial_states is None else y[..., initial_states.shape[-1] :]


def offsets(seq_idx: Tensor) -> Tensor:
    """Where the sequences of ``seq_idx [B, L]`` begin when its rows are put end to end, ``[B L + 1]``, int32.

    There are as many as there are tokens, so that nobody needs to count them: those that are left over are empty.
    """
    B, L = seq_idx.shape
    first = torch.ones_like(seq_idx, dtype=torch.bool)
    first[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = first.flatten()
    token = torch.arange(B * L, dtype=torch.int32, device=seq_idx.device)
    place = torch.where(first, first.cumsum(0) - 1, B * L)  # of no sequence: behind the end
    return torch.full((B * L + 1,), B * L, dtype=torch.int32, device=seq_idx.device).scatter(
        0, place, torch.where(first, token, B * L)
    )


def _on_copies(
    tokens: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """Take the states out oldest first, go on from them, and put them back where they were."""
    slots = Slots(conv_state, tokens.shape[0], conv_state_indices)
    S, W = conv_state.shape[-1], weight.shape[1]
    before = slots.read()
    if cache_seqlens is not None:
        before = _turned(before, cache_seqlens)
    y, _ = short_conv(tokens, weight, bias, activation=activation, initial_state=before[..., S - W + 1 :])
    after = torch.cat([before, tokens.mT.to(before.dtype)], dim=2)[..., -S:]
    if cache_seqlens is not None:
        after = _turned(after, -cache_seqlens - tokens.shape[1])
    slots.write(after)
    return slots.masked(y)


def _turned(states: Tensor, columns: Tensor) -> Tensor:
    """Circular ``states [B, D, S]``, each read from its own column on."""
    S = states.shape[-1]
    index = (columns[:, None] + torch.arange(S, device=states.device)) % S
    return states.take_along_dim(index[:, None].long(), 2)


FUNCTIONS = {
    "causal_conv1d.causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d.causal_conv1d_update": causal_conv1d_update,
    "causal_conv1d.causal_conv1d_varlen.causal_conv1d_varlen_states": causal_conv1d_varlen_states,
}
"""Of the package's functions, those that are served, and by which of ours."""

_integration = Integration("causal_conv1d", "causal-conv1d", FUNCTIONS)
enable = _integration.enable
disable = _integration.disable
