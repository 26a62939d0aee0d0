"""The launch that finds which chunks of sequences leave anything in the state at their far end."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..lib.reach import RUNNING, chunks_in_reach
from ..runtime.launch import launch
from .chunks import Chunked, Cut
from .tiles import power_of_two

__all__ = ["ranges_of"]


class Headed(Chunked, Protocol):
    """A call whose sequences are cut into chunks."""

    v: Tensor


def ranges_of(call: Headed, chunks: Cut, C: int, sums: Tensor, kind: int, reverse: bool) -> Tensor:
    """Of each sequence and head the first chunk that counts, and the one past the last: ``[N, HV, 2]``.

    ``sums`` over chunks of ``C`` tokens are of one of the kinds of :mod:`..lib.reach`.
    """
    T, HV = call.v.shape[1:3]
    K = 1 if kind == RUNNING.value else sums.shape[-1]
    ranges = torch.empty((call.N, HV, 2), dtype=torch.int32, device=call.v.device)
    launch(
        chunks_in_reach, call.N * HV, call,
        sums, ranges, chunks.first, call.cu, T, HV, *sums.stride(),
        K=K, C=C, BK=power_of_two(K), P=2048 // power_of_two(max(K, 16)), KIND=kind, REVERSE=reverse,
        PACKED=call.cu is not None, num_warps=4,
    )  # fmt: skip
    return ranges
