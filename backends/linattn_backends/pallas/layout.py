"""Between the caller's arrays and what the kernels walk over: rows of whole chunks, heads before tokens.

An operand ``[B, T, heads, W]`` becomes ``[G, heads, n·C, W]``: ``G`` rows of ``n`` chunks, the batch for sequences of equal
length, one row for packed ones, each of which begins a chunk of its own. What is one number a token, ``[B, T, HV]``, becomes
``[G, HV, n, 1, C]``. A padding token has zeros for every operand and gate, and leaves the state alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..jax.layout import Packed, Rows

Array = Any


class Index(NamedTuple):
    """Which chunk is whose.

    Attributes:
        sequence: Of every chunk ``[G · n]`` int32; ``N``, one past the last, for chunks beyond the last sequence.
        begins: Whether it is the first of its sequence, likewise.
        ends: Whether it is the last, likewise.
        visited: Of every sequence ``[N + 1, 1, 1, 1]`` bool: whether it has a chunk. One that has none keeps its state.
    """

    sequence: Array
    begins: Array
    ends: Array
    visited: Array


class Layout:
    """Where the tokens of one call lie."""

    def __init__(self, B: int, T: int, C: int, cu_seqlens: Array | None):
        self.places = Rows(T, C, 1) if cu_seqlens is None else Packed(T, cu_seqlens, C, 1)
        self.G, self.C, self.n = B, C, self.places.segments
        self.N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1

    @property
    def index(self) -> Index:
        """Of every chunk."""
        if isinstance(self.places, Packed):
            sequence, begins = self.places.sequence, self.places.begins
            ends = jnp.concatenate([sequence[1:] != sequence[:-1], jnp.ones((1,), bool)])
        else:
            chunk = jnp.tile(jnp.arange(self.n, dtype=jnp.int32), self.G)
            sequence = jnp.repeat(jnp.arange(self.G, dtype=jnp.int32), self.n)
            begins, ends = chunk == 0, chunk == self.n - 1
        visited = jnp.zeros((self.N + 1,), bool).at[sequence].set(True)[:, None, None, None]
        return Index(sequence, begins.astype(jnp.int32), ends.astype(jnp.int32), visited)

    def cut(self, x: Array) -> Array:
        """``[B, T, heads, W]`` as ``[G, heads, n·C, W]``; ``[B, T, HV]`` as ``[G, HV, n, 1, C]``."""
        x = jnp.moveaxis(self.places.cut(x), 0, 1)  # [G, n, C, heads, …]
        if x.ndim == 4:
            return x.transpose(0, 3, 1, 2)[:, :, :, None]
        G, n, C, heads, W = x.shape
        return x.transpose(0, 3, 1, 2, 4).reshape(G, heads, n * C, W)

    def join(self, o: Array) -> Array:
        """``[G, HV, n·C, V]`` as ``[B, T, HV, V]``."""
        G, HV, _, V = o.shape
        return self.places.join(o.reshape(G, HV, self.n, self.C, V).transpose(2, 0, 3, 1, 4))
