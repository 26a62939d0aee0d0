"""The launches that find which chunks of sequences leave anything in the state at their far end."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...chunks import power_of_two
from ..lib.reach import RUNNING, chunks_in_reach, made_anew, ranges_proved
from ..runtime.launch import launch
from .chunks import Chunked, Cut

__all__ = ["proved", "ranges_of", "replace"]

BLOCK = 4096
"""Numbers of a transition that a program reads at once."""


class Headed(Chunked, Protocol):
    """A call whose sequences are cut into chunks."""

    v: Tensor


def ranges_of(
    call: Headed, chunks: Cut, C: int, sums: Tensor, kind: int, reverse: bool, shorter: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Of each sequence and head the first chunk that counts, and the one past the last: ``[N, HV, 2]``.

    ``sums`` over chunks of ``C`` tokens are of one of the kinds of :mod:`..lib.reach`; ``shorter`` gets the same, but no chunk
    where all of them count.
    """
    T, HV = call.v.shape[1:3]
    K = 1 if kind == RUNNING.value else sums.shape[-1]
    ranges = torch.empty((call.N, HV, 2), dtype=torch.int32, device=call.v.device)
    launch(
        chunks_in_reach, call.N * HV, call,
        sums, ranges, shorter, chunks.first, call.cu, T, HV, *sums.stride(),
        K=K, C=C, BK=power_of_two(K), P=2048 // power_of_two(max(K, 16)), KIND=kind, REVERSE=reverse,
        PACKED=call.cu is not None, num_warps=4,
    )  # fmt: skip
    return ranges


def proved(call: Headed, chunks: int, ranges: Tensor, transitions: Tensor, again: Tensor | None) -> Tensor:
    """The ranges whose transition is zero, and all ``chunks`` in the place of others; ``again`` gets those of which the
    transition is to be made anew, if any.
    """
    found, size = torch.empty_like(ranges), transitions.shape[-2] * transitions.shape[-1]
    count = ranges.shape[0] * ranges.shape[1]
    launch(ranges_proved, count, call, ranges, transitions, found, again, chunks, SIZE=size, BLOCK=BLOCK, num_warps=8)
    return found


def replace(call: Headed, transitions: Tensor, others: Tensor, again: Tensor) -> None:
    """Put the ``others`` in the place of transitions that were made again."""
    size = transitions.shape[-2] * transitions.shape[-1]
    count = again.shape[0] * again.shape[1] * -(-size // BLOCK)
    launch(made_anew, count, call, transitions, others, again, SIZE=size, BLOCK=BLOCK, num_warps=8)
