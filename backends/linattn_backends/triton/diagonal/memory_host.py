"""Host side of the diagonal-gate kernels: how the sequences are cut, which tiles run, and the launches.

Nothing here reads a tensor's data, so no launch waits for the device and all of them can be captured in a graph. Packed
sequences are cut on the device: the number of pieces is bounded by sizes (``T`` and ``N``), pieces past the last one exit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.chunks import Cut, cut, over_group, room_for, rows_contiguous, strides, type_of_products
from ..host.tiles import programs
from ..host.variant import Facts
from ..runtime.device import processors, roomy
from ..runtime.launch import launch
from . import gate as gates
from . import memory as kernels
from . import scalar
from .config import Tiles, tiles_for

__all__ = ["Diagonal", "backward", "forward"]


class Applied(NamedTuple):
    """What is made of a vector gate in one pass over the chunks, and read by every pass after it.

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
    def empty(cls, call: Diagonal) -> Applied:
        """Arrays for it."""
        (B, T, HV, _), K, C = call.v.shape, call.q.shape[-1], call.tiles.chunk
        count = room_for(T, call.N, C, call.cu is not None)
        new = functools.partial(torch.empty, dtype=call.q.dtype, device=call.q.device)
        return cls(
            new((count, HV, C, C), dtype=call.state_dtype), new((B, T, HV, K)), new((B, T, HV, K)),
            new((count, HV, K), dtype=torch.float32),
            new((count, HV, programs(K, 1, call.tiles.scores.BK, 1)), dtype=torch.int32),
        )  # fmt: skip


@dataclass(frozen=True)
class Diagonal:
    """One call: its arrays and what the kernels need to know of them.

    ``g`` is ``[B, T, HV]``, ``[B, T, HV, K]``, ``[B, T, H, K]`` or ``None``; a fixed decay arrives expanded over tokens. ``w``
    is the value gate ``gv``, ``[B, T, HV, V]``, or ``None``. ``given`` is the call that :mod:`.vector` made this one of, and
    ``applied`` what the forward pass left for the backward pass, if it did.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    w: Tensor | None
    u: Tensor | None
    start: Tensor | None
    cu: Tensor | None
    scale: float
    tiles: Tiles
    given: Diagonal | None = None
    applied: Applied | None = None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None, start: Tensor | None,
        cu: Tensor | None, scale: float, chunk: int,
    ) -> Diagonal:  # fmt: skip
        """Take the arrays of a call: the last axis contiguous, a fixed decay expanded, tiles chosen."""
        if g is not None and g.dim() == 1:
            g = g.expand(v.shape[:3])
        gate = 0 if g is None else g.dim() - 2
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        if gate == 2:
            g = rows_contiguous(g)
        gv = None if gv is None else rows_contiguous(gv)
        u = None if u is None else u.contiguous()
        start = None if start is None else start.contiguous()
        sizes = int(q.shape[-1]), int(v.shape[-1]), q.dtype, gate, int(chunk)  # symbols have no place in a cache
        tiles = tiles_for(*sizes, processors(q.device), roomy(q.device))
        return cls(q, k, v, g, gv, u, start, cu, scale, tiles)

    @property
    def gate(self) -> int:
        """0 none, 1 a scalar, 2 a vector, 3 a vector that :mod:`.vector` has applied: ``g`` holds its sums over each chunk."""
        return 3 if self.given is not None else 0 if self.g is None else self.g.dim() - 2

    @property
    def family(self) -> str:
        """The family whose recurrence this is."""
        return "rwkv6" if self.u is not None else ("linear_attn", "simple_gla", "gla")[self.gate]

    @functools.cached_property  # every launch asks
    def facts(self) -> Facts:
        """By which its kernels are chosen."""
        return Facts(self.family, self.q.dtype, self.q.shape[-1], self.v.shape[-1], self.tiles.chunk)

    @property
    def range(self) -> float:
        """A chunk that decays by less than ``2^range`` takes plain products.

        With ``u``, neighbours have no gate between them: they cancel in the gate's gradient, and where gates are strong they
        are most of its terms.
        """
        return self.tiles.range if self.u is None else min(self.tiles.range, 100.0)

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1

    @property
    def group(self) -> int:
        """Value heads that share a query/key head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def state_dtype(self) -> torch.dtype:
        """Of states and scores in memory: what a product takes them in. float16 has not the range."""
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else torch.float32

    def common(self) -> dict[str, Any]:
        """Compile-time facts that every chunk kernel takes."""
        tiles = self.tiles
        return dict(
            K=self.q.shape[-1], V=self.v.shape[-1], C=tiles.chunk, GROUP=self.group,
            GATE_GROUP=1 if self.g is None or self.given is not None else self.v.shape[2] // self.g.shape[2], GATE=self.gate,
            PACKED=self.cu is not None, SPLIT=tiles.split, PREC=tiles.precision,
        )  # fmt: skip


def with_running_sums(call: Diagonal) -> Diagonal:
    """The call as the chunk kernels read it: a scalar gate as running sums within its chunks, ``[HV, B, T]`` in memory."""
    if call.gate != 1:
        return call
    B, T, HV = call.g.shape
    chunks = cut(T, call.N, call.tiles.chunk, call.cu)
    exact = torch.float64 if call.tiles.split == 3 else torch.float32  # differences of sums must be right to a rounding
    sums = torch.empty((HV, B, T), dtype=exact, device=call.g.device).permute(1, 2, 0)
    heads = 16
    launch(
        gates.running_sums, chunks.count * programs(HV, 1, heads, 1), call,
        call.g, sums, chunks.owner, chunks.first, call.cu, T, chunks.per, call.N, HV, *strides(call.g), *strides(sums),
        C=call.tiles.chunk, BH=heads, PACKED=call.cu is not None, num_warps=2,
    )  # fmt: skip
    return replace(call, g=sums)


def walk_states(
    call: Diagonal, x: Tensor, y: Tensor, reverse: bool, pieces: Cut | None, span: int, begin: Tensor | None,
    finish: Tensor | None, decay: Tensor | None, value_decay: Tensor | None, kept: Tensor | None, chunks: Cut | None,
) -> None:  # fmt: skip
    """Launch ``states`` on whole sequences, or on ``pieces`` of ``span`` chunks."""
    _, T, HV, V = call.v.shape
    K, tile = call.q.shape[-1], call.tiles.states
    count = call.N if pieces is None else pieces.count
    launch(
        kernels.states, count * HV * programs(K, V, tile.BK, tile.BV), call,
        x, y, call.g, call.w, begin, finish, decay, value_decay, kept,
        pieces and pieces.owner, pieces and pieces.first, chunks and chunks.first, call.cu,
        T, pieces.per if pieces else 1, span, call.N, HV, call.scale,
        *strides(x), *strides(y), *strides(call.g), *strides(call.w), **call.common(),
        BK=tile.BK, BV=tile.BV, REVERSE=reverse, WHOLE=pieces is None, START=begin is not None, END=finish is not None,
        KEEP=kept is not None, VALUE_GATE=call.w is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def segment_starts(
    call: Diagonal, x: Tensor, y: Tensor, chunks: Cut | None, start: Tensor | None, reverse: bool, segment: int
) -> tuple[Cut, Tensor, Tensor]:
    """Sequences cut into segments of ``segment`` chunks, the state that each begins with, and the last one's final state."""
    _, T, HV, V = call.v.shape
    K, N, tile = call.q.shape[-1], call.N, call.tiles.carries
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
    pieces = cut(T, N, segment * call.tiles.chunk, call.cu)
    local, far = new((pieces.count, HV, K, V)), new((N, HV, K, V))
    decay = None if call.g is None else new((pieces.count, HV, K))
    value_decay = None if call.w is None else new((pieces.count, HV, V))
    walk_states(call, x, y, reverse, pieces, segment, None, local, decay, value_decay, None, chunks)
    launch(
        kernels.carries, N * HV * programs(K, V, tile.BK, tile.BV), call,
        local, decay, value_decay, start, far, pieces.first, pieces.per, HV,
        K=K, V=V, BK=tile.BK, BV=tile.BV, GATE=call.gate, VALUE_GATE=call.w is not None, REVERSE=reverse,
        PACKED=call.cu is not None, START=start is not None, num_warps=tile.warps,
    )  # fmt: skip
    return pieces, local, far


def scan(
    call: Diagonal, x: Tensor, y: Tensor, chunks: Cut, start: Tensor | None, reverse: bool, end: bool
) -> tuple[Tensor, Tensor | None]:
    """States at chunk starts (gradients at chunk ends, in reverse), and the state at the far end of each sequence."""
    _, T, HV, V = call.v.shape
    K, N, tiles = call.q.shape[-1], call.N, call.tiles
    new = functools.partial(torch.empty, device=call.q.device)
    tile = tiles.states
    kept = new((chunks.count, HV, K, V), dtype=call.state_dtype)
    segment = tiles.segment(T, N, N * HV * programs(K, V, tile.BK, tile.BV))
    if segment == 0:
        far = new((N, HV, K, V), dtype=torch.float32) if end else None
        walk_states(call, x, y, reverse, None, 0, start, far, None, None, kept, chunks)
        return kept, far
    pieces, local, far = segment_starts(call, x, y, chunks, start, reverse, segment)
    walk_states(call, x, y, reverse, pieces, segment, local, None, None, None, kept, chunks)
    return kept, far


def emit(call: Diagonal, y: Tensor, kept: Tensor, out: Tensor, chunks: Cut, reverse: bool) -> None:
    """``o`` from ``v``, or ``dv`` from ``do``."""
    _, T, HV, V = call.v.shape
    tile = call.tiles.outputs if call.w is None else call.tiles.outputs_levels
    launch(
        kernels.outputs, chunks.count * HV * programs(1, V, 1, tile.BV), call,
        call.q, call.k, y, call.g, call.w, kept, out, chunks.owner, chunks.first, call.cu,
        T, chunks.per, call.N, HV, call.scale,
        *strides(call.q), *strides(call.k), *strides(y), *strides(call.g), *strides(call.w), **call.common(),
        BK=tile.BK, BV=tile.BV, REVERSE=reverse, VALUE_GATE=call.w is not None,
        RANGE=call.range, DT=type_of_products(call.v), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None, None]:
    """Outputs and, if asked for, final states; nothing for the backward pass."""
    B, T, HV, V = call.v.shape
    chunks = cut(T, call.N, call.tiles.chunk, call.cu)
    call = with_running_sums(call)
    kept, end = scan(call, call.k, call.v, chunks, call.start, False, final)
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=call.v.device)
    emit(call, call.v, kept, out, chunks, False)
    return out, end, None


Late = tuple[Tensor, Tensor | None, Tensor]


def in_reverse(call: Diagonal, chunks: Cut, do: Tensor, dend: Tensor | None) -> Late:
    """The states' gradients at the chunks' ends, that of the initial state, and ``dv`` unless it has a gate."""
    dkept, dstart = scan(call, call.q, do, chunks, dend, True, call.start is not None)
    dv = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if call.w is None:
        emit(call, do, dkept, dv, chunks, True)
    return dkept, dstart, dv


def backward(
    call: Diagonal, do: Tensor, dend: Tensor | None, late: Callable[[Diagonal, Cut, Tensor, Tensor | None], Late] = in_reverse
) -> dict[str, Tensor | None]:  # fmt: skip
    """Gradients of ``q, k, v, g, gv`` and the initial state, each in the shape that the kernels read; ``late`` makes some."""
    B, T, HV, V = call.v.shape
    H, K = call.q.shape[2:]
    new = functools.partial(torch.empty, device=call.v.device)
    do = rows_contiguous(do)
    chunks = cut(T, call.N, call.tiles.chunk, call.cu)
    call = with_running_sums(call)
    kept, _ = scan(call, call.k, call.v, chunks, call.start, False, False)
    dend = None if dend is None else dend.contiguous()
    dkept, dstart, dv = late(call, chunks, do, dend)
    narrow = call.q.dtype if call.group == 1 else torch.float32
    dq, dk = new((B, T, HV, K), dtype=narrow), new((B, T, HV, K), dtype=narrow)
    dg = dgv = None
    if call.gate == 1 and call.tiles.split < 3:
        dg = scalar_gradients(call, chunks, do, kept, dkept, dq, dk)
    else:
        if call.gate == 1:
            dg = scalar_tiles(call)
        elif call.gate == 2:
            dg = new((B, T, HV, K), dtype=call.g.dtype if call.g.shape[2] == HV else torch.float32)
        gradients(call, chunks, call.q, call.k, call.v, do, call.g, call.w, kept, dkept, dq, dk, dg)
    if call.w is not None:
        dgv = new((B, T, HV, V), dtype=call.w.dtype)
        gradients(call, chunks, do, call.v, call.k, call.q, call.w, call.g, kept, dkept, None, dv, dgv)
    if call.gate == 1:
        dg = over_tiles(dg)
    elif call.gate == 2 and call.g.shape[2] != HV:
        dg = dg.view(B, T, H, call.group, K).sum(3)
    return dict(q=over_group(call.q, dq), k=over_group(call.q, dk), v=dv, g=dg, gv=dgv, u=None, start=dstart)


def gradients(
    call: Diagonal, chunks: Cut, q: Tensor, k: Tensor, v: Tensor, do: Tensor, g: Tensor | None, w: Tensor | None,
    kept: Tensor, dkept: Tensor, dq: Tensor | None, dk: Tensor, dg: Tensor | None,
) -> None:  # fmt: skip
    """Write ``dq, dk, dg``. Without ``dq``, keys and values have changed places, and ``dk, dg`` are the values'."""
    B, T, HV = call.v.shape[:3]
    K, V, transposed = q.shape[-1], v.shape[-1], dq is None
    wide = dict(call.common(), K=K, V=V, GROUP=HV // q.shape[2], GATE_GROUP=1 if g is None else HV // g.shape[2])
    tile = call.tiles.gradients if w is None else call.tiles.gradients_levels
    if transposed:
        tile = tile._replace(BK=tile.BV, BV=tile.BK)
    launch(
        kernels.gradients, chunks.count * HV * programs(K, 1, tile.BK, 1), call,
        q, k, v, do, g, w, kept, dkept, dq, dk, dg,
        chunks.owner, chunks.first, call.cu, T, chunks.per, call.N, HV, call.scale, B * T * HV,
        *strides(q), *strides(k), *strides(v), *strides(do), *strides(g), *strides(w), **wide,
        BK=tile.BK, BV=tile.BV, VALUE_GROUP=HV // v.shape[2], VALUE_GATE_GROUP=1 if w is None else HV // w.shape[2],
        VALUE_GATE=w is not None, TRANSPOSED=transposed, RANGE=call.range,
        DT=type_of_products(call.v), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def scalar_gradients(call: Diagonal, chunks: Cut, do: Tensor, kept: Tensor, dkept: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Write ``dq`` and ``dk`` of a scalar gate and 16-bit operands, and return the tiles' parts of ``dg``."""
    B, T, HV, V = call.v.shape
    K, tile = call.q.shape[-1], call.tiles.gradients
    dg = scalar_tiles(call)
    launch(
        scalar.scalar_gradients, chunks.count * HV * programs(K, 1, tile.BK, 1), call,
        call.q, call.k, call.v, do, call.g, kept, dkept, dq, dk, dg, chunks.owner, chunks.first, call.cu, T,
        chunks.per, call.N, HV, call.scale, B * T * HV,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(call.g),
        K=K, V=V, C=call.tiles.chunk, BK=tile.BK, BV=tile.BV, GROUP=call.group, PACKED=call.cu is not None,
        PREC=call.tiles.precision, DT=type_of_products(call.v), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dg


def scalar_tiles(call: Diagonal) -> Tensor:
    """A scalar gate's gradient, a tile of key channels at a time."""
    tiles = programs(call.q.shape[-1], 1, call.tiles.gradients.BK, 1)
    return torch.empty((tiles, *call.v.shape[:3]), dtype=torch.float32, device=call.v.device)


def over_tiles(dg: Tensor) -> Tensor:
    """And the whole of it."""
    return dg[0] if dg.shape[0] == 1 else dg.sum(0)
