"""Where tokens lie: sequences cut into chunks of ``C`` tokens, ``m`` chunks worked on at once as a segment.

A segment of an operand ``[B, T, heads, W]`` is ``[B, m·C, heads, W]``. A padding token has zeros for every operand and gate,
and leaves the state alone.

Packed sequences are chunked one by one. The values of ``cu_seqlens`` may be traced, so sizes come from shapes alone: ``N``
sequences of ``T`` tokens in all fill at most ``(T + N(C − 1)) // C`` chunks; those beyond the last hold padding only. MLX does
not check an index, so every gather stays within its array and what it must not have found is set to zero.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx


def take(x: mx.array, index: mx.array, real: mx.array) -> mx.array:
    """Rows of ``x`` by an index; zeros where they are not ``real``."""
    found = mx.take(x, index, axis=0)
    return mx.where(real.reshape(*real.shape, *(1,) * (found.ndim - real.ndim)), found, 0)


class Bounds(NamedTuple):
    """Of each chunk of packed sequences: whether one begins there, and from what state."""

    begins: mx.array  # [m] bool
    start: list[mx.array] | None  # m of [1, HV, K, V]

    def enter(self, chunk: int, S: mx.array) -> mx.array:
        """The state that a chunk starts from, ``[1, HV, K, V]``."""
        return mx.where(self.begins[chunk], 0 if self.start is None else self.start[chunk], S)


class Rows:
    """``B`` sequences of equal length."""

    packed = False

    def __init__(self, T: int, C: int, chunks_a_segment: int):
        self.T, self.C = T, C
        span = C * chunks_a_segment
        self.spans = [(start, min(start + span, T)) for start in range(0, T, span)]

    def cut(self, x: mx.array, segment: int) -> mx.array:
        """``[B, T, …]``'s part in a segment, ``[B, m·C, …]``."""
        start, stop = self.spans[segment]
        padding = -(stop - start) % self.C
        x = x[:, start:stop]
        return x if padding == 0 else mx.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))

    def join(self, parts: list[mx.array]) -> mx.array:
        """The inverse of :meth:`cut`, from all segments."""
        return mx.concatenate(parts, 1)[:, : self.T]


class Packed:
    """``N`` sequences packed end to end in one row."""

    packed = True

    def __init__(self, T: int, cu_seqlens: mx.array, C: int, chunks_a_segment: int):
        self.T, self.C, self.N = T, C, cu_seqlens.shape[0] - 1
        self.chunks = (T + self.N * (C - 1)) // C
        self.spans = [(start, min(start + chunks_a_segment, self.chunks)) for start in range(0, self.chunks, chunks_a_segment)]
        self._place(integers(cu_seqlens))

    def _place(self, offsets: mx.array) -> None:
        """Find the sequence of every chunk, the token of every slot and the slot of every token."""
        C, T, N = self.C, self.T, self.N
        lengths = offsets[1:] - offsets[:-1]
        counts = (lengths + C - 1) // C
        last = mx.cumsum(counts)  # one past the last chunk of each sequence
        first = last - counts
        chunk = mx.arange(self.chunks, dtype=mx.int32)
        sequence = bounds_passed(last, self.chunks)  # N beyond the last chunk
        known = mx.minimum(sequence, N - 1)
        inside = sequence < N
        self.sequence, self.first = known, first[known]
        self.begins = inside & (chunk == self.first)
        self.ends = inside & (chunk == last[known] - 1)
        self.first_chunk, self.last_chunk = (mx.where(lengths > 0, x, -1) for x in (first, last - 1))
        token = offsets[known][:, None] + (chunk - self.first)[:, None] * C + mx.arange(C, dtype=mx.int32)
        self.real = (token < offsets[known + 1][:, None]) & inside[:, None]
        self.token = mx.where(self.real, token, 0)
        mine = mx.minimum(bounds_passed(offsets[1:], T), N - 1)
        t = mx.arange(T, dtype=mx.int32)
        self.live = t < offsets[-1]  # those behind the last sequence are in no slot
        self.slot = mx.where(self.live, first[mine] * C + t - offsets[mine], 0)
        self.empty = (lengths == 0)[:, None, None, None]

    def cut(self, x: mx.array, segment: int) -> mx.array:
        """``[1, T, …]``'s part in a segment, ``[1, m·C, …]``."""
        chunks = slice(*self.spans[segment])
        return take(x[0], self.token[chunks].reshape(-1), self.real[chunks].reshape(-1))[None]

    def join(self, parts: list[mx.array]) -> mx.array:
        """The inverse of :meth:`cut`, from all segments."""
        return take(mx.concatenate(parts, 1)[0], self.slot, self.live)[None]

    def start(self, states: mx.array, segment: int) -> mx.array:
        """Of ``[N, …]``, what belongs to the chunks of a segment that a sequence begins in, ``[m, …]``."""
        chunks = slice(*self.spans[segment])
        return take(states, self.sequence[chunks], self.begins[chunks])

    def end(self, states: mx.array, segment: int) -> mx.array:
        """Likewise for the chunks that a sequence ends in."""
        chunks = slice(*self.spans[segment])
        return take(states, self.sequence[chunks], self.ends[chunks])

    def keep(self, states: mx.array, found: mx.array, segment: int, chunk: mx.array) -> mx.array:
        """``states [N, …]`` with what a segment's chunks found, ``[m, …]``, for the sequences whose ``chunk [N]`` is in it."""
        start, stop = self.spans[segment]
        here = (chunk >= start) & (chunk < stop)
        mine = mx.take(found, mx.clip(chunk - start, 0, stop - start - 1), axis=0)
        return mx.where(here.reshape(-1, *(1,) * (found.ndim - 1)), mine, states)


def bounds_passed(ends: mx.array, n: int) -> mx.array:
    """For each of ``0 … n−1`` how many of the ascending ``ends`` it has reached, int32."""
    marks = mx.zeros((n + 1,), mx.int32).at[mx.minimum(ends, n)].add(1)
    return mx.cumsum(marks)[:n]


def integers(x: mx.array) -> mx.array:
    """Offsets and lengths, out of sight of forward mode: MLX has no JVP for what places are made with."""
    return mx.stop_gradient(x.astype(mx.int32))
