"""The launches that add up what programs left of gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...chunks import power_of_two
from ..lib.sums import column_sums, head_sums
from ..runtime.launch import Launched, launch
from .tiles import programs

__all__ = ["add_heads", "sums_of_parts"]

ROWS, COLUMNS = 32, 64


def sums_of_parts(call: Launched, parts: Tensor) -> list[Tensor]:
    """The two or three sums over the first axis of a dense float32 array ``[programs, sums, …]``."""
    P, count, *shape = parts.shape
    width = math.prod(shape)
    sums = [torch.empty(shape, dtype=torch.float32, device=parts.device) for _ in range(count)]
    launch(
        column_sums, count * programs(1, width, 1, COLUMNS), call,
        parts, *sums, *(None,) * (3 - count), P, width, ROWS=count, J=1, BP=ROWS, BD=COLUMNS, num_warps=4,
    )  # fmt: skip
    return sums


def add_heads(call: Launched, dq_parts: Tensor, dk_parts: Tensor, dq: Tensor, dk: Tensor) -> None:
    """Write gradients ``[B, T, H, K]`` of queries and keys, without gaps, from sums over some of their value heads each."""
    M, K = math.prod(dq.shape[:3]), dq.shape[3]
    BK = power_of_two(K)
    R = max(2048 // BK, 1)
    launch(
        head_sums, 2 * programs(M, 1, R, 1), call,
        dq_parts, dk_parts, dq, dk, M, dq_parts.shape[2] // dq.shape[2], K=K, BK=BK, R=R, num_warps=4,
    )  # fmt: skip
