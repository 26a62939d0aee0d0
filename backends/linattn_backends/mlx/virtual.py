"""Where the tokens of ``mixed_attn`` lie: chunks of ``C`` tokens counted from the start of each sequence, held tokens included.

:class:`Equal` is rows of equal length without a state: plain slices. :class:`Virtual` is everything else: the rows of a batch
or the sequences of a pack, laid one after the other, each with the ``p`` tokens that its state holds in front. ``p`` and the
bounds of a pack may be traced, so all sizes come from shapes, and all places are gathers.
"""

from __future__ import annotations

import mlx.core as mx

from .layout import Packed, Rows, bounds_passed, integers, take


class Equal(Rows):
    """``B`` rows of ``T`` tokens, in chunks of ``C``, or of ``T`` if all fit in one."""

    def __init__(self, T: int, C: int, tokens_a_segment: int):
        super().__init__(T, min(C, T), max(tokens_a_segment // min(C, T), 1))
        self.full, self.rest = C, T % C
        self.whole = (mx.arange(-(-T // self.C)) + 1) * C <= T

    def pick(self, new: mx.array, held: None, segment: int) -> mx.array:
        """The part of ``[B, T, …]`` in a segment, ``[B, m·C, …]``."""
        return self.cut(new, segment)

    def new(self, parts: list[mx.array], like: mx.array) -> mx.array:
        """``[B, T, …]`` from all segments."""
        return self.join(parts)

    def tail(self, new: mx.array, held: None, dtype: mx.Dtype) -> mx.array:
        """Tokens of the unfinished chunk, ``[B, C, …]``."""
        x = new[:, self.T - self.rest :].astype(dtype)
        return mx.pad(x, [(0, 0), (0, self.full - self.rest)] + [(0, 0)] * (x.ndim - 2))

    def length(self, B: int) -> mx.array:
        """How many those are."""
        return mx.full((B,), self.rest, mx.int32)


class Virtual(Packed):
    """``N`` sequences laid one after the other, with what their states hold in front."""

    def __init__(self, B: int, T: int, C: int, tokens_a_segment: int, cu_seqlens: mx.array | None, length: mx.array | None):
        offsets = mx.arange(B + 1, dtype=mx.int32) * T if cu_seqlens is None else integers(cu_seqlens)
        N = offsets.shape[0] - 1
        self.offsets, self.new_tokens = offsets, B * T
        self.held = mx.zeros((N,), mx.int32) if length is None else integers(length)
        self.lengths = self.held + offsets[1:] - offsets[:-1]
        self.steps = mx.concatenate([mx.zeros((1,), mx.int32), mx.cumsum(self.lengths)])
        most = B * T + (0 if length is None else N * (C - 1))
        super().__init__(most, self.steps, C, max(tokens_a_segment // C, 1))
        ends = (mx.arange(self.chunks, dtype=mx.int32) - self.first + 1) * C
        self.whole = ends <= self.lengths[self.sequence]

    def pick(self, new: mx.array, held: mx.array | None, segment: int) -> mx.array:
        """The tokens of a segment, new or held, ``[1, m·C, …]``."""
        chunks = slice(*self.spans[segment])
        mine = mx.broadcast_to(self.sequence[chunks][:, None], self.token[chunks].shape)
        position = self.token[chunks] - self.steps[mine]
        return self._at(new, held, mine.reshape(-1), position.reshape(-1), self.real[chunks].reshape(-1))[None]

    def _at(self, new: mx.array, held: mx.array | None, sequence: mx.array, position: mx.array, real: mx.array) -> mx.array:
        """Tokens by their place in a virtual sequence; zeros where they are not ``real``."""
        p = self.held[sequence]
        row = mx.clip(self.offsets[sequence] + position - p, 0, self.new_tokens - 1)
        rest = new.shape[2:]
        found = take(new.reshape(-1, *rest), row, real & (position >= p))
        if held is None:
            return found
        row = sequence * self.C + mx.clip(position, 0, self.C - 1)
        return found + take(held.reshape(-1, *rest), row, real & (position < p))  # in the wider of both dtypes

    def new(self, parts: list[mx.array], like: mx.array) -> mx.array:
        """New tokens only, in the shape and dtype of ``like [B, T, …]``."""
        t = mx.arange(self.new_tokens, dtype=mx.int32)
        mine = mx.minimum(bounds_passed(self.offsets[1:], self.new_tokens), self.N - 1)
        virtual = t - self.offsets[mine] + self.held[mine] + self.steps[mine]
        found = take(mx.concatenate(parts, 1)[0], self.slot[virtual], t < self.offsets[-1])
        return found.reshape(like.shape).astype(like.dtype)

    def old(self, parts: list[mx.array]) -> mx.array:
        """Held tokens only, ``[N, C, …]``; zeros where nothing is held."""
        row = mx.arange(self.C, dtype=mx.int32)
        virtual = mx.minimum(self.steps[:-1][:, None] + row, self.T - 1)
        return take(mx.concatenate(parts, 1)[0], self.slot[virtual], row < self.held[:, None])

    def tail(self, new: mx.array, held: mx.array | None, dtype: mx.Dtype) -> mx.array:
        """Tokens of the unfinished chunks, ``[N, C, …]``."""
        row = mx.arange(self.C, dtype=mx.int32)
        position = (self.lengths // self.C * self.C)[:, None] + row
        mine = mx.broadcast_to(mx.arange(self.N, dtype=mx.int32)[:, None], position.shape)
        real = position < self.lengths[:, None]
        held = None if held is None else held.astype(dtype)
        return self._at(new.astype(dtype), held, mine, position, real)

    def length(self, B: int) -> mx.array:
        """How many those are."""
        return self.lengths % self.C
