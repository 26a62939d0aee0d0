"""Launches of the lengths of queries and keys, and of the gradients of those that were made unit rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...chunks import power_of_two
from ..lib.lengths import reciprocal_lengths, unit_row_gradients
from ..runtime.launch import Launched, launch
from .chunks import strides
from .maps import Maps
from .sums import add_heads
from .tiles import programs

__all__ = ["NO_LENGTHS", "Lengths", "empty_lengths", "kept_lengths", "key_gradients", "lengths_of"]


class Keyed(Launched, Protocol):
    """A call with queries and keys ``[B, T, H, K]``, and their map."""

    q: Tensor
    k: Tensor
    maps: Maps


class Lengths(NamedTuple):
    """Reciprocal lengths of queries and of keys, ``[B, T, H]`` float32; ``None`` where they are as they are to be."""

    q: Tensor | None
    k: Tensor | None


NO_LENGTHS = Lengths(None, None)


def kept_lengths(q: Tensor | None, k: Tensor | None) -> Lengths | None:
    """Those that the forward pass left; ``None`` if it left none, as where there are no rows."""
    return None if q is None else Lengths(q, k)


def empty_lengths(call: Keyed) -> Lengths:
    """Arrays for the lengths of a call's rows, if they are to be unit rows."""
    if not call.maps.unit:
        return NO_LENGTHS
    return Lengths(*(torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device) for _ in range(2)))


def lengths_of(call: Keyed) -> Lengths:
    """Reciprocal lengths of a call's rows, if they are to be unit rows."""
    made = empty_lengths(call)
    if call.maps.unit:
        run(reciprocal_lengths, call, *made)
    return made


def key_gradients(call: Keyed, lengths: Lengths, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``q`` and ``k`` from those that kernels left of their, perhaps unit, rows: one a head, or one for each of
    several groups of its value heads.
    """
    parts = dq.shape[2] // call.q.shape[2]
    made = dq, dk
    if parts > 1 or dq.dtype != call.q.dtype:
        made = empty_like_queries(call), empty_like_queries(call)
    if lengths.q is not None:
        run(unit_row_gradients, call, *lengths, dq, dk, *made, SUMS=parts)
    elif made[0] is not dq:
        add_heads(call, dq, dk, *made)
    return made


def empty_like_queries(call: Keyed) -> Tensor:
    """Room for a gradient of queries, or of keys, without gaps."""
    return torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)


def run(kernel: object, call: Keyed, *arrays: Tensor, **constants: int) -> None:
    """Launch a kernel over the rows of ``q`` and ``k``, sixteen numbers a thread."""
    B, T, H, K = call.q.shape
    columns = power_of_two(K)
    rows = max(2048 // columns, 1)
    launch(
        kernel, 2 * programs(B * T * H, 1, rows, 1), call,
        call.q, call.k, *arrays, B * T * H, T, H, *strides(call.q), *strides(call.k),
        K=K, BK=columns, R=rows, **constants, num_warps=4,
    )  # fmt: skip
