"""Where tokens lie: sequences cut into chunks of ``C`` tokens, ``m`` chunks worked on at once as a segment.

Operands ``[B, T, heads, W]`` are cut into ``[segments, B, m·C, heads, W]``, what ``scan`` walks over. A padding token has zeros
for every operand and gate, and leaves the state alone.

Packed sequences are chunked one by one. The values of ``cu_seqlens`` may be traced, so sizes come from shapes alone: ``N``
sequences of ``T`` tokens in all fill at most ``(T + N(C − 1)) // C`` chunks; those beyond the last hold padding only. Tokens
behind the last sequence have no slot. Every
gather names each token at most once, so its transpose is a scatter without collisions, and bitwise repeatable.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from linattn.plugin import framework_of

from .compat import Array


class Bounds(NamedTuple):
    """Of each chunk of packed sequences: whether one begins there, and from what state. ``None``: nothing begins."""

    begins: Array  # [..., m] bool
    start: Array | None  # [..., m, HV, K, V]


def take(x: Array, index: Array) -> Array:
    """Rows of ``x`` by an index that names none twice; zeros where it is out of bounds."""
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


class Rows:
    """``B`` sequences of equal length."""

    def __init__(self, T: int, C: int, chunks_a_segment: int):
        self.T, self.C = T, C
        chunks = -(-T // C)
        self.segments = -(-chunks // chunks_a_segment)
        self.m = -(-chunks // self.segments)

    def cut(self, x: Array) -> Array:
        """``[B, T, …]`` as ``[segments, B, m·C, …]``."""
        B, T, *rest = x.shape
        length = self.m * self.C
        padding = [(0, 0), (0, self.segments * length - T)] + [(0, 0)] * len(rest)
        return jnp.pad(x, padding).reshape(B, self.segments, length, *rest).swapaxes(0, 1)

    def join(self, y: Array) -> Array:
        """The inverse of :meth:`cut`."""
        segments, B, length, *rest = y.shape
        return y.swapaxes(0, 1).reshape(B, segments * length, *rest)[:, : self.T]

    def bounds(self, initial_state: Array | None) -> None:
        """Every row begins before its first segment."""
        return


class Packed:
    """``N`` sequences packed end to end in one row."""

    def __init__(self, T: int, cu_seqlens: Array, C: int, chunks_a_segment: int):
        self.T, self.C, self.N = T, C, cu_seqlens.shape[0] - 1
        chunks = (T + self.N * (C - 1)) // C
        self.segments = -(-chunks // chunks_a_segment)
        self.m = -(-chunks // self.segments)
        self._place(cu_seqlens.astype(jnp.int32))

    def _place(self, offsets: Array) -> None:
        """Find the sequence of every chunk, the token of every slot and the slot of every token."""
        n, C, T = self.segments * self.m, self.C, self.T
        count_up_to = framework_of(offsets).count_up_to
        lengths = offsets[1:] - offsets[:-1]
        counts = (lengths + C - 1) // C
        last = jnp.cumsum(counts, dtype=jnp.int32)  # one past the last chunk of each sequence
        first = last - counts
        chunk = jnp.arange(n, dtype=jnp.int32)
        sequence = count_up_to(last, n)  # N beyond the last chunk
        self.sequence = sequence
        known = jnp.minimum(sequence, self.N - 1)
        begins = (chunk == first[known]) & (sequence < self.N)
        self.begins = begins
        token = offsets[known][:, None] + (chunk - first[known])[:, None] * C + jnp.arange(C, dtype=jnp.int32)
        real = (token < offsets[known + 1][:, None]) & (sequence < self.N)[:, None]
        slot = jnp.arange(n * C, dtype=jnp.int32)
        self.token = jnp.where(real.reshape(-1), token.reshape(-1), T + slot)
        t = jnp.arange(T, dtype=jnp.int32)
        mine = jnp.minimum(count_up_to(offsets[1:], T), self.N - 1)
        self.slot = jnp.where(t < offsets[-1], first[mine] * C + t - offsets[mine], n * C + t)
        self.start_of = jnp.where(begins, known, self.N + chunk)
        self.end_of = jnp.where(lengths > 0, last - 1, n + jnp.arange(self.N, dtype=jnp.int32))
        self.empty = lengths == 0

    def cut(self, x: Array) -> Array:
        """``[1, T, …]`` as ``[segments, 1, m·C, …]``."""
        return take(x[0], self.token).reshape(self.segments, 1, self.m * self.C, *x.shape[2:])

    def join(self, y: Array) -> Array:
        """The inverse of :meth:`cut`."""
        return take(y.reshape(-1, *y.shape[3:]), self.slot)[None]

    def bounds(self, initial_state: Array | None) -> Bounds:
        """Where sequences begin, ``[segments, m, …]``."""
        start = None
        if initial_state is not None:
            start = take(initial_state, self.start_of).reshape(self.segments, self.m, *initial_state.shape[1:])
        return Bounds(self.begins.reshape(self.segments, self.m), start)

    def final(self, after: Array, initial_state: Array | None) -> Array:
        """States ``[N, HV, K, V]`` from those after each chunk, ``[segments, m, …]``; an empty sequence keeps its own."""
        found = take(after.reshape(-1, *after.shape[2:]), self.end_of)
        if initial_state is None:
            return found
        return jnp.where(self.empty[:, None, None, None], initial_state, found)

    def total(self, sums: Array) -> Array:
        """For each chunk the total over all chunks of its sequence: ``[n, …]``."""
        member = (self.sequence[:, None] == jnp.arange(self.N, dtype=jnp.int32)).astype(sums.dtype)
        flat = sums.reshape(sums.shape[0], -1)
        product: Any = jnp.matmul(member, jnp.matmul(member.T, flat, precision="highest"), precision="highest")
        return product.reshape(sums.shape)
