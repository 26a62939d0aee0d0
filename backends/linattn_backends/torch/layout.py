"""Where tokens lie: sequences cut into chunks, chunks gathered into segments, heads into blocks.

A segment is a run of chunks that is worked on at once, copied into ``[Z, n, C, W]`` buffers of the accumulation dtype (``Z``
batch entries times value heads, ``n`` chunks, ``C`` tokens). Everything larger than the inputs is as large as one segment, so
time and memory are linear in ``T``. The states at segment starts are kept for the backward pass, ``[B, HV, segments·K, V]``.

Packed sequences are chunked one by one; chunks of several sequences share a segment. A padding token has zeros for every
operand and gate, and leaves the state alone. The parallel form is one chunk a sequence, or, for families that solve a
triangular system, a few as long as their rounding allows. Tokens behind the last sequence lie in no segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..chunks import CHUNKS_A_SEGMENT, SYSTEM, power_of_two, widest, wished

ROWS_A_BLOCK = 4  # batch entries times value heads worked on at once


def assign(out: Tensor, x: Tensor) -> None:
    """Write ``x`` into ``out``, a tangent of it in the dtype of ``out``: ``copy_`` would leave that in the dtype of ``x``."""
    out.copy_(x if forward_ad._current_level < 0 else x.to(out.dtype))


def chunk_length(form: str, chunk_size: int | None, solves: bool) -> int:
    """Tokens a chunk, as the caller wishes; fewer where a triangular system is solved.

    The parallel form has one chunk a sequence, which 0 stands for, or the longest in which it ``solves`` a system.
    """
    if form == "parallel":
        return SYSTEM if solves else 0
    return wished(chunk_size, widest(solves))


def checkpoint_count(form: str, T: int, N: int | None, chunk: int) -> int:
    """States kept for the backward pass: an upper bound that needs sizes only (``N`` is ``None`` for equal lengths)."""
    if not chunk:
        return 1 if N is None else N
    n = chunks_a_segment(form)
    if N is None:
        span = chunk * n
        return (T + span - 1) // span
    return (T // chunk + N + n) // n


def chunks_a_segment(form: str) -> int:
    """How many chunks are worked on at once: one of the parallel form."""
    return 1 if form == "parallel" else CHUNKS_A_SEGMENT


def behind_zeros(x: Tensor, end: int) -> Tensor:
    """``x [B, T, …]`` with zeros from token ``end`` on."""
    if end < x.shape[1]:
        x[:, end:] = 0
    return x


@dataclass
class Segment:
    """A run of chunks: tokens ``t0 … t1``, which of them begin or end which sequence, and where padding sits."""

    index: int
    t0: int
    t1: int
    lengths: list[int] = field(default_factory=list)  # of each chunk, without padding
    begins: dict[int, int] = field(default_factory=dict)  # chunk -> sequence that starts there
    ends: dict[int, int] = field(default_factory=dict)  # chunk -> sequence that ends there
    positions: Tensor | None = None  # of tokens in the padded buffer, if not simply 0, 1, 2 …


@dataclass(frozen=True)
class Block:
    """Batch entries ``b`` and query/key heads ``h`` that are worked on together, and the value heads ``hv`` of those."""

    b: slice
    h: slice
    hv: slice


class Layout:
    """Cuts ``T`` tokens (``B`` rows of them, or ``N`` packed sequences) into segments of chunks."""

    def __init__(self, form: str, B: int, T: int, H: int, HV: int, cu_seqlens: Tensor | None, chunk: int, device: torch.device):
        self.B, self.T, self.H, self.group = B, T, H, HV // max(H, 1)
        self.packed = cu_seqlens is not None
        self.bounds = cu_seqlens.tolist() if cu_seqlens is not None else [0, T]
        self.sequences = list(pairwise(self.bounds))
        longest = max((end - start for start, end in self.sequences), default=0)
        self.C = self._chunk(form, longest, chunk)
        self.n = 1 if form == "parallel" else max(CHUNKS_A_SEGMENT * chunk // self.C, 1)
        self.segments = list(self._segments())
        for segment in self.segments:
            segment.positions = self._positions(segment, device)

    def empty(self, like: Tensor) -> Tensor:
        """An array of tokens to be written segment by segment; zeros behind the last sequence."""
        return behind_zeros(torch.empty_like(like, memory_format=torch.contiguous_format), self.bounds[-1])

    def _chunk(self, form: str, longest: int, chunk: int) -> int:
        """Short sequences do not fill a long chunk."""
        if not chunk or longest < chunk:
            return power_of_two(longest)
        if self.packed and form != "parallel":
            mean = (self.sequences[-1][1] - self.sequences[0][0]) // len(self.sequences)
            return min(chunk, max(power_of_two(mean), 16))
        return chunk

    def _segments(self) -> Iterator[Segment]:
        segment = None
        count = 0
        for sequence, (start, end) in enumerate(self.sequences):
            for t in range(start, end, self.C):
                if segment is None:
                    segment = Segment(count, t, t)
                segment.t1 = min(t + self.C, end)
                if t == start:
                    segment.begins[len(segment.lengths)] = sequence
                if segment.t1 == end:
                    segment.ends[len(segment.lengths)] = sequence
                segment.lengths.append(segment.t1 - t)
                if len(segment.lengths) == self.n:
                    yield segment
                    segment, count = None, count + 1
        if segment is not None:
            yield segment

    def _positions(self, segment: Segment, device: torch.device) -> Tensor | None:
        """Padding inside the segment means tokens must be spread; padding at its end does not."""
        if all(length == self.C for length in segment.lengths[:-1]):
            return None
        rows = [torch.arange(i * self.C, i * self.C + length) for i, length in enumerate(segment.lengths)]
        return torch.cat(rows).to(device)

    def blocks(self) -> Iterator[Block]:
        """Blocks of at most ``ROWS_A_BLOCK`` value heads, or one query/key head with its group."""
        HV = self.H * self.group
        if HV == 0 or self.B == 0:
            return
        heads = min(self.H, max(ROWS_A_BLOCK // self.group, 1))
        rows = max(ROWS_A_BLOCK // HV, 1)
        for b in range(0, self.B, rows):
            for h in range(0, self.H, heads):
                h1 = min(h + heads, self.H)
                yield Block(slice(b, min(b + rows, self.B)), slice(h, h1), slice(h * self.group, h1 * self.group))

    def load(self, x: Tensor, segment: Segment, block: Block, dtype: torch.dtype) -> Tensor:
        """The block's part of ``x [B, T, H or HV, W]`` as ``[Z, n, C, W]``, a query/key head once a value head of its group."""
        shared = x.shape[2] == self.H
        part = x[block.b, segment.t0 : segment.t1, block.h if shared else block.hv].transpose(1, 2)
        B, heads, L, W = part.shape
        group = self.group if shared else 1
        n = len(segment.lengths)
        size = (B, heads, group, n * self.C, W)
        buffer = torch.empty(size, dtype=dtype, device=x.device)
        if segment.positions is not None:
            buffer.zero_()
            source = part.to(dtype).unsqueeze(2).expand(B, heads, group, L, W)
            buffer.index_copy_(3, segment.positions, source)
        else:
            assign(buffer[:, :, :, :L], part.unsqueeze(2))
            buffer[:, :, :, L:].zero_()
        return buffer.view(B * heads * group, n, self.C, W)

    def store(self, out: Tensor, segment: Segment, block: Block, y: Tensor) -> None:
        """Write ``y [Z, n, C, W]`` to the block's part of ``out [B, T, H or HV, W]``; a shared head gets its group's sum."""
        shared = out.shape[2] == self.H
        part = out[block.b, segment.t0 : segment.t1, block.h if shared else block.hv].transpose(1, 2)
        B, heads, L, W = part.shape
        y = y.reshape(B, heads, self.group if shared else 1, -1, W)
        y = y.sum(2) if y.shape[2] > 1 else y.squeeze(2)
        assign(part, y[:, :, :L] if segment.positions is None else y.index_select(2, segment.positions))

    def state(self, states: Tensor, sequence: int, block: Block) -> Tensor:
        """View ``[B, heads, K, V]`` on a sequence's (or, unpacked, every row's) states in ``[N, HV, K, V]``."""
        return states[sequence : sequence + 1, block.hv] if self.packed else states[block.b, block.hv]
