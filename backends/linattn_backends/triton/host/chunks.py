"""Sequences cut into pieces, and arrays as kernels read them.

Packed sequences are cut on the device: the number of pieces is bounded by sizes (``T``
and ``N``), and pieces past the last one exit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Sequences cut into pieces of ``length`` tokens: ``owner`` says whose a piece is, ``first`` where a sequence's begin."""

    count: int
    per: int
    owner: Tensor | None
    first: Tensor | None


def room_for(T: int, N: int, length: int, packed: bool) -> int:
    """How many pieces of ``length`` tokens there are room for."""
    return T // length + N if packed else N * -(-T // length)


def cut(T: int, N: int, length: int, cu_seqlens: Tensor | None) -> Cut:
    """Cut ``N`` sequences of ``T`` tokens, or those that ``cu_seqlens`` describes among ``T`` tokens."""
    count = room_for(T, N, length, cu_seqlens is not None)
    if cu_seqlens is None:
        return Cut(count, -(-T // length), None, None)
    filled = (cu_seqlens.diff() + (length - 1)) // length
    first = torch.zeros(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum(filled, 0, dtype=torch.int32, out=first[1:])
    at = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)
    owner = torch.searchsorted(first[1:], at, right=True, out_int32=True)
    return Cut(count, 0, owner, first)


def rows_contiguous(x: Tensor) -> Tensor:
    """``x``, copied only if its last axis is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of batch, token and head."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def state_strides(states: Tensor | None) -> tuple[int, int, int, int]:
    """Of sequence or slot, head, key and value channel."""
    return (0, 0, 0, 0) if states is None else states.stride()


class Chunked(Protocol):
    """A call whose sequences are cut into chunks."""

    v: Tensor
    cu: Tensor | None

    @property
    def N(self) -> int:
        """Number of sequences."""
        ...


def usual_tokens(call: Chunked) -> int:
    """Tokens of a sequence; of packed ones the mean, because the host knows none of their lengths."""
    T = call.v.shape[1]
    return T if call.cu is None else -(-T // torch.sym_max(call.N, 1))  # of a trace too


def places(call: Chunked, chunks: Cut) -> tuple[Any, ...]:
    """Arguments that say where a chunk lies."""
    _, T, HV, _ = call.v.shape
    return chunks.owner, chunks.first, call.cu, T, chunks.per, call.N, HV


def type_of_products(x: Tensor) -> Any:
    """What scores of these operands are multiplied in, as Triton names it. float16 has not the range."""
    return triton.language.bfloat16 if x.dtype == torch.bfloat16 else triton.language.float32


def over_group(q: Tensor, x: Tensor) -> Tensor:
    """The gradient of a query/key head: the sum of ``x``'s, of which each has one, or one for each of its value heads."""
    B, T, sums, K = x.shape
    H = q.shape[2]
    return (x if sums == H else x.view(B, T, H, sums // H, K).sum(3)).to(q.dtype)
