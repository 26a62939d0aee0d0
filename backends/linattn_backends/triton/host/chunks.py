"""Sequences cut into pieces, and arrays as kernels read them.

Packed sequences are cut on the device: the number of pieces is bounded by sizes (``T``
and ``N``), and pieces past the last one exit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from ..lib.pieces import cut_sequences
from ..runtime.launch import Launched, launch
from .tails import BLOCK, zeroing
from .tiles import programs

PIECES, SEQUENCES = 128, 64
"""Pieces whose owners one program finds, and sequences that it looks at together."""


@dataclass(frozen=True)
class Cut:
    """Sequences cut into pieces of ``length`` tokens: ``owner`` says whose a piece is, ``first`` where a sequence's begin."""

    count: int
    per: int
    owner: Tensor | None
    first: Tensor | None


class Chunked(Launched, Protocol):
    """A call whose sequences are cut into chunks."""

    cu: Tensor | None

    @property
    def N(self) -> int:
        """Number of sequences."""
        ...


def room_for(T: int, N: int, length: int, packed: bool) -> int:
    """How many pieces of ``length`` tokens there are room for."""
    return T // length + N if packed else N * -(-T // length)


def cut(call: Chunked, length: int, held: Tensor | None = None, whole: int = 0, out: Tensor | None = None) -> Cut:
    """The sequences of a call cut into pieces of ``length`` tokens; packed ones begin with those ``held`` of each, and are one
    piece each if none has more than ``whole`` tokens. Behind the last of them, rows of ``out``, dense, become zeros.
    """
    T, N = call.v.shape[1], call.N
    count = room_for(T, N, length, call.cu is not None) + (0 if held is None else N)
    if call.cu is None:
        return Cut(count, -(-T // length), None, None)
    owner, first = (torch.empty(size, dtype=torch.int32, device=call.v.device) for size in (count, N + 1))
    cutting, width = max(programs(count, 1, PIECES, 1), 1), 0 if out is None else math.prod(out.shape[2:])
    launch(
        cut_sequences, cutting + zeroing(call, T, width), call,
        call.cu, held, owner, first, out, N, count, length, whole, cutting, T, width,
        S=SEQUENCES, P=PIECES, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
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
