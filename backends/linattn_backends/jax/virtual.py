"""Where the tokens of ``mixed_attn`` lie: chunks of ``C`` tokens counted from the start of each sequence, held tokens included.

:class:`Equal` is rows of equal length without a state: plain reshaping. :class:`Virtual` is everything else: the rows of a
batch or the sequences of a pack, laid one after the other, each with the ``p`` tokens that its state holds in front. ``p`` and
the bounds of a pack may be traced, so all sizes come from shapes, and all places are gathers that name no token twice.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from linattn.plugin import framework_of

from .compat import Array
from .layout import Bounds, Packed, Rows, take


class Equal(Rows):
    """``B`` rows of ``T`` tokens, in chunks of ``c``: ``C``, or ``T`` if all fit."""

    def __init__(self, T: int, C: int, tokens_a_segment: int):
        self.c, self.full = min(C, T), C
        super().__init__(T, self.c, max(tokens_a_segment // self.c, 1))
        ends = (jnp.arange(self.segments * self.m).reshape(self.segments, self.m) + 1) * C
        self.whole = ends <= T
        self.length = T % C

    def cut(self, new: Array, held: None, dtype: Any) -> Array:
        return super().cut(new)

    def total(self, sums: Array) -> Array:
        """Every chunk reads the total of its row: ``[n, …]``."""
        return jnp.broadcast_to(sums.sum(0), sums.shape)

    def tail(self, new: Array, held: None, dtype: Any) -> Array:
        """Tokens of the unfinished chunk, ``[B, C, …]``."""
        tail = new[:, self.T - self.length :].astype(dtype)
        return jnp.pad(tail, [(0, 0), (0, self.full - self.length), (0, 0), (0, 0)])

    def rest(self, B: int) -> Array:
        """How many those are."""
        return jnp.full((B,), self.length, jnp.int32)


class Virtual:
    """``N`` sequences laid one after the other, with what their states hold in front."""

    def __init__(self, B: int, T: int, C: int, tokens_a_segment: int, cu_seqlens: Array | None, length: Array | None):
        offsets = jnp.arange(B + 1, dtype=jnp.int32) * T if cu_seqlens is None else cu_seqlens.astype(jnp.int32)
        self.offsets, self.N, self.tokens = offsets, offsets.shape[0] - 1, B * T
        self.c = self.C = C
        self.held = jnp.zeros((self.N,), jnp.int32) if length is None else length.astype(jnp.int32)
        longest_state = 0 if length is None else C - 1
        self.lengths = self.held + offsets[1:] - offsets[:-1]
        steps = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(self.lengths, dtype=jnp.int32)])
        together = max(tokens_a_segment // C, 1)
        # A pack of virtual tokens: where each chunk begins, and which slots are tokens of it.
        self.pack = Packed(self.tokens + self.N * longest_state, steps, C, together)
        self.segments, self.m = self.pack.segments, self.pack.m
        self._place(steps)

    def _place(self, steps: Array) -> None:
        """Find the source of every slot among held and new tokens, the slot of every new token, and the whole chunks."""
        n, C, N = self.segments * self.m, self.C, self.N
        sequence = jnp.minimum(self.pack.sequence, N - 1)
        slot = jnp.arange(n * C, dtype=jnp.int32)
        mine = jnp.repeat(sequence, C)
        virtual = self.pack.token - steps[mine]
        self.source = self._source(mine, virtual, (self.pack.token < steps[-1]), slot)
        t = jnp.arange(self.tokens, dtype=jnp.int32)
        owner = jnp.minimum(framework_of(self.offsets).count_up_to(self.offsets[1:], self.tokens), N - 1)
        slot_of = self.pack.slot[t - self.offsets[owner] + self.held[owner] + steps[owner]]
        self.slot = jnp.where(t < self.offsets[-1], slot_of, n * C + t)
        chunk = jnp.arange(n, dtype=jnp.int32)
        first = (jnp.cumsum((self.lengths + C - 1) // C, dtype=jnp.int32) - (self.lengths + C - 1) // C)[sequence]
        whole = ((chunk - first + 1) * C <= self.lengths[sequence]) & (self.pack.sequence < N)
        self.whole = whole.reshape(self.segments, self.m)

    def _source(self, sequence: Array, virtual: Array, real: Array, slot: Array) -> Array:
        """Row of a token in ``[N·C held, then new]``; out of bounds, at a place of its own, if it is padding."""
        p = self.held[sequence]
        new = self.N * self.C + self.offsets[sequence] + virtual - p
        row = jnp.where(virtual < p, sequence * self.C + virtual, new)
        return jnp.where(real, row, self.N * self.C + self.tokens + slot)

    def _all(self, new: Array, held: Array | None, dtype: Any) -> Array:
        rest = new.shape[2:]
        new = new.reshape(-1, *rest).astype(dtype)
        if held is None:
            held = jnp.zeros((self.N * self.C, *rest), dtype)
        return jnp.concatenate([held.reshape(-1, *rest).astype(dtype), new])

    def cut(self, new: Array, held: Array | None, dtype: Any) -> Array:
        """``[segments, 1, m·C, …]``."""
        x = take(self._all(new, held, dtype), self.source)
        return x.reshape(self.segments, 1, self.m * self.C, *new.shape[2:])

    def join(self, y: Array) -> Array:
        """New tokens only, ``[B·T, …]``."""
        return take(y.reshape(-1, *y.shape[3:]), self.slot)

    def bounds(self, initial_state: Array | None) -> Bounds:
        return self.pack.bounds(initial_state)

    def final(self, after: Array, initial_state: Array | None) -> Array:
        return self.pack.final(after, initial_state)

    def total(self, sums: Array) -> Array:
        return self.pack.total(sums)

    def tail(self, new: Array, held: Array | None, dtype: Any) -> Array:
        """Tokens of the unfinished chunks, ``[N, C, …]``."""
        row = jnp.arange(self.C, dtype=jnp.int32)
        virtual = (self.lengths // self.C * self.C)[:, None] + row
        sequence = jnp.broadcast_to(jnp.arange(self.N, dtype=jnp.int32)[:, None], virtual.shape)
        slot = jnp.arange(self.N * self.C, dtype=jnp.int32).reshape(virtual.shape)
        source = self._source(sequence, virtual, virtual < self.lengths[:, None], slot)
        return take(self._all(new, held, dtype), source.reshape(-1)).reshape(self.N, self.C, *new.shape[2:])

    def rest(self, B: int) -> Array:
        """How many those are."""
        return self.lengths % self.C
