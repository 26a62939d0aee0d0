"""A call of the diagonal core: as it came, cut into chunks, and what stages make of it.

Nothing here or in the launches reads a tensor's data, so no launch waits for the device and all of them can be captured in a
graph. Packed sequences are cut on the device, see :mod:`..host.chunks`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.call import MatrixStateCall, unaligned
from ..host.chunks import Cut, cut, room_for, rows_contiguous
from ..host.tiles import programs
from ..host.variant import Facts
from ..runtime.device import properties
from .config import DiagonalVariant, backward_variant, chunk_tokens, forward_variant, scores_tile
from .gate import VECTOR

__all__ = ["ChunkedCall", "DiagonalCall", "Portion", "Segments", "Update", "VectorOperands"]


@dataclass(frozen=True)
class DiagonalCall(MatrixStateCall):
    """A call as it came.

    Attributes:
        q, k, v: As in the specification, the last axis contiguous.
        g: ``[B, T, HV]``, ``[B, T, HV, K]``, ``[B, T, H, K]`` or ``None``; a fixed decay is expanded over tokens.
        gv: The value gate ``[B, T, HV, V]``, or ``None``.
        u: RWKV-6's bonus ``[HV, K]``, or ``None``.
        start: Initial states ``[N, HV, K, V]``, of any strides; zeros if ``None``.
        cu: Offsets of packed sequences, or ``None``.
        scale: Factor on the outputs.
        chunk: Tokens a chunk.
        weight: Under a scalar gate, factors on values, float32 ``[B, T, HV]``, not negative; ``None`` for values as they come.
        skip: Under a scalar gate, a factor a value head with which ``v``, as it comes, is added to the output; or ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    gv: Tensor | None
    u: Tensor | None
    start: Tensor | None
    cu: Tensor | None
    scale: float
    chunk: int
    weight: Tensor | None = None
    skip: Tensor | None = None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None, start: Tensor | None,
        cu: Tensor | None, scale: float, chunk: int,
    ) -> DiagonalCall:  # fmt: skip
        """Take the arrays of an op; ``chunk`` is the caller's wish, or 0."""
        if g is not None and g.dim() == 1:
            g = g.expand(v.shape[:3])
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        if g is not None and g.dim() == 4:
            g = rows_contiguous(g)
        gv = None if gv is None else rows_contiguous(gv)
        u = None if u is None else u.contiguous()
        return cls(q, k, v, g, gv, u, start, cu, scale, chunk_tokens(q.dtype, int(chunk)))

    @property
    def family(self) -> str:
        """The family whose recurrence this is."""
        return "rwkv6" if self.u is not None else ("linear_attn", "simple_gla", "gla")[self.gate]

    @functools.cached_property
    def facts(self) -> Facts:
        """The facts by which its kernels are chosen."""
        family = self.family if self.gv is None else f"{self.family} with gv"
        K, V = int(self.q.shape[-1]), int(self.v.shape[-1])  # no symbols in a cache
        return Facts(family, self.q.dtype, K, V, self.chunk)

    @property
    def applies_gate(self) -> bool:
        """Whether a gate per key channel is applied to queries and keys before the scan."""
        return self.gate == VECTOR.value and self.gv is None

    def forward_variant(self, out: torch.dtype) -> DiagonalVariant:
        """The variant of its forward pass, whose outputs are ``out``."""
        device = properties(self.q.device)
        return forward_variant(self.facts, out, device, unaligned(device, self.facts, self._copied()))

    def backward_variant(self, do: Tensor) -> DiagonalVariant:
        """The variant of its backward pass from the outputs' gradient."""
        device = properties(self.q.device)
        divides = 2**-60 < abs(self.scale) < 2**60
        complaints = unaligned(device, self.facts, self._copied(do))
        plain = self.group > 1 or self.weight is not None or self.skip is not None
        return backward_variant(self.facts, do.dtype, plain, divides, device, complaints)

    def _copied(self, do: Tensor | None = None) -> dict[str, Tensor | None]:
        """The arrays that kernels copy in whole lines."""
        if self.applies_gate:
            return dict(q=self.q, k=self.k, g=self.g)
        return dict(q=self.q, k=self.k, v=self.v, do=do)


class Portion(NamedTuple):
    """Sequences ``first … last`` of a batch and, of one alone, the tokens ``low … high``."""

    first: int
    last: int
    low: int
    high: int

    def tokens_of(self, x: Tensor) -> Tensor:
        """The portion of an array ``[B, T, …]``."""
        return x[self.first : self.last, self.low : self.high]

    def states_of(self, x: Tensor | None) -> Tensor | None:
        """The portion of an array ``[N, …]``."""
        return None if x is None else x[self.first : self.last]

    def call_of(self, call: DiagonalCall, start: Tensor | None) -> DiagonalCall:
        """The portion of a call, from states of its own."""
        tokens = dict(q=call.q, k=call.k, v=call.v, g=call.g, weight=call.weight)
        return replace(call, **{name: x if x is None else self.tokens_of(x) for name, x in tokens.items()}, start=start)


@dataclass(frozen=True)
class ChunkedCall:
    """A call whose sequences are cut into chunks, with the kernels that run on them.

    Attributes:
        call: The call as it came.
        variant: What runs.
        chunks: Where chunks lie; ``None`` where nothing asks, for no gate and the state in registers.
        g: The gate as kernels read it: a scalar one as running sums within its chunks, a vector as it came.
        late: For gradients of values with weights, running sums less the logarithms of the weights, base 2.
    """

    call: DiagonalCall
    variant: DiagonalVariant
    chunks: Cut | None
    g: Tensor | None
    late: Tensor | None = None

    def portion(self, portion: Portion, start: Tensor | None) -> ChunkedCall:
        """A portion of it, whose sequences are not packed, from states of its own."""
        call = portion.call_of(self.call, start)
        g, late = (None if x is None else portion.tokens_of(x) for x in (self.g, self.late))
        return ChunkedCall(call, self.variant, cut(call, self.variant.chunk), g, late)


class Update(NamedTuple):
    """What carries a state over a chunk, or in reverse its gradient: ``S' = Diag(e^{G_C}) S + (decayed x)ᵀ y``.

    Attributes:
        x: Keys, or in reverse queries.
        y: Values, or in reverse ``do``.
        gate: How kernels read ``g``, as in :mod:`.gate`.
        g: The gate on the keys, or ``None``.
        gv: The gate on the values, or ``None``.
        weight: Factors on ``y``, or ``None``.
    """

    x: Tensor
    y: Tensor
    gate: int
    g: Tensor | None
    gv: Tensor | None = None
    weight: Tensor | None = None

    @classmethod
    def of_values(cls, run: ChunkedCall) -> Update:
        """The one of keys and values."""
        call = run.call
        return cls(call.k, call.v, call.gate, run.g, call.gv, call.weight)


class VectorOperands(NamedTuple):
    """What is made of a gate per key channel in one pass over the chunks, and read by every pass after it.

    Attributes:
        A: Scores inside each chunk, scaled: ``[chunks, HV, C, C]``.
        read, write: Queries and keys, decayed to the start and to the end of their chunks: ``[B, T, HV, K]``.
        decay: The gate's sum over each chunk, base 2: ``[chunks, HV, K]``.
        stops: Half the length of the blocks that one product did: ``[chunks, HV, tiles]``.
    """

    A: Tensor
    read: Tensor
    write: Tensor
    decay: Tensor
    stops: Tensor

    @classmethod
    def empty(cls, call: DiagonalCall) -> VectorOperands:
        """Arrays for those of a call."""
        (B, T, HV, _), K, C = call.v.shape, call.q.shape[-1], call.chunk
        count = room_for(T, call.N, C, call.cu is not None)
        new = functools.partial(torch.empty, dtype=call.q.dtype, device=call.q.device)
        return cls(
            new((count, HV, C, C), dtype=call.state_dtype), new((B, T, HV, K)), new((B, T, HV, K)),
            new((count, HV, K), dtype=torch.float32),
            new((count, HV, programs(K, 1, scores_tile(call.facts).BK, 1)), dtype=torch.int32),
        )  # fmt: skip


@dataclass(frozen=True)
class Segments:
    """What programs scan at once, each from a state of its own: whole sequences, or pieces of them.

    Attributes:
        start: The state that each starts from, ``[segments, HV, K, V]``; zeros if ``None``.
        pieces: Where the pieces lie; ``None`` for whole sequences.
        length: Chunks a piece.
        end: The state after the last piece of each sequence, ``[N, HV, K, V]``, which is known with the others' starts.
        shared: Whether two programs share each scan.
    """

    start: Tensor | None
    pieces: Cut | None = None
    length: int = 0
    end: Tensor | None = None
    shared: bool = False

    def programs(self, call: DiagonalCall, together: int = 1) -> int:
        """How many programs scan a tile of one head, if each scans so many one after the other."""
        count = call.N * (2 if self.shared else 1) if self.pieces is None else self.pieces.count
        return programs(count, 1, together, 1)

    def heads(self, call: DiagonalCall) -> int:
        """How many programs scan a tile of all heads."""
        return self.programs(call) * call.v.shape[2]

    def places(self, run: ChunkedCall, chunks: Cut | None) -> tuple[Any, ...]:
        """Arguments that say where a segment lies, and where its first chunk, if ``chunks`` are asked for."""
        call, pieces = run.call, self.pieces
        _, T, HV, _ = call.v.shape
        owner, first, per = (None, None, 1) if pieces is None else (pieces.owner, pieces.first, pieces.per)
        return owner, first, chunks and chunks.first, call.cu, T, per, self.length, call.N, HV
