"""Host side of :mod:`.resident`: forward and backward with the state in registers, for no gate or a scalar one.

States, or their gradients, are in memory where a scalar gate's gradient or one of a wide head needs those of every chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..host.chunks import Cut, cut, over_group, rows_contiguous, strides
from ..host.tiles import programs
from ..host.variant import gluon, on_hopper
from ..runtime.launch import launch
from . import memory_host as in_memory
from .memory_host import Diagonal, over_tiles, scalar_gradients, scalar_tiles, scan, segment_starts, with_running_sums
from .resident import fused

__all__ = ["backward", "fits", "forward"]

FIRST, FIRST_GRADIENTS = 10, 9
"""16ths of a sequence that the first of two programs walks, which the second walks too, for the state alone: fewer, and one is
done before the other; more, and more is read twice."""


def fits(call: Diagonal, backward: bool) -> bool:
    """Whether the operands have 16 bits and a head's state fits into registers, tile by tile, on this device.

    Wide states do in kernels for Hopper. Backwards a final state's gradient is divided by the scale: one so small, or large,
    could take it out of float32's range.
    """
    if call.tiles.fused is None or (backward and not 2**-60 < abs(call.scale) < 2**60):
        return False
    return not wide(call) or on_hopper(call, call.q.device)


def wide(call: Diagonal) -> bool:
    """Whether plain kernels have states in memory."""
    return max(call.q.shape[-1], call.v.shape[-1]) > 128


@dataclass(frozen=True)
class Starts:
    """Where the walks of one direction begin: with each sequence, or with each of its ``pieces``.

    With ``halves``, two programs share a walk that begins with a sequence.
    """

    segment: int
    pieces: Cut | None
    state: Tensor | None
    far: Tensor | None
    halves: bool = False

    def heads(self, call: Diagonal) -> int:
        """How many programs walk a tile of the heads."""
        count = self.pieces.count if self.pieces else call.N * (2 if self.halves else 1)
        return count * call.v.shape[2]


def starts(call: Diagonal, x: Tensor, y: Tensor, start: Tensor | None, reverse: bool, special: bool) -> Starts:
    """Cut the sequences if there are too few heads to fill the device; narrow heads in ``special`` kernels share walks."""
    T, N, tile = call.v.shape[1], call.N, call.tiles.fused
    width = max(call.q.shape[-1], call.v.shape[-1])
    busy = N * call.v.shape[2] * programs(1, width, 1, tile.BV)
    if special and call.cu is None and width <= 64 and call.tiles.halves(T, busy):  # wider: not measured
        return Starts(0, None, start, None, halves=True)
    segment = call.tiles.segment(T, N, busy)
    if segment == 0:
        return Starts(0, None, start, None)
    return Starts(segment, *segment_starts(call, x, y, None, start, reverse, segment))


def for_hopper(call: Diagonal, out: Tensor, *arrays: Tensor) -> ModuleType | None:
    """The module with the walk in Gluon that takes these arrays and writes ``out``, if there is one."""
    if not gluon(call, *arrays, out=out.dtype):
        return None
    from . import resident_sm90 as fused_hopper
    from . import resident_wide_sm90 as wide_hopper

    return wide_hopper if arrays[0].shape[-1] > 128 else fused_hopper


def walk(
    call: Diagonal, a: Tensor, b: Tensor, y: Tensor, out: Tensor, begin: Starts, end: Tensor | None = None,
    reverse: bool = False, transposed: bool = False, kept: Tensor | None = None, chunks: Cut | None = None,
) -> None:  # fmt: skip
    """Launch one walk; ``kept`` takes the state before it meets each of ``chunks``."""
    _, T, HV, V = out.shape
    tile, pieces = call.tiles.fused, begin.pieces
    module = for_hopper(call, out, a, b, y)
    count = begin.heads(call) * programs(1, V, 1, tile.BV)
    launch(
        module.fused if module else fused, count, call,
        a, b, y, call.g, begin.state, out, end, kept, pieces and pieces.owner, pieces and pieces.first,
        chunks and chunks.first, call.cu, T, pieces.per if pieces else 1, begin.segment, call.N, HV, call.scale,
        *strides(a), *strides(b), *strides(y), *strides(call.g),
        W=a.shape[-1], V=V, C=call.tiles.chunk, BK=tile.BK, BV=tile.BV, GROUP=HV // a.shape[2], Y_GROUP=HV // y.shape[2],
        GATE=call.gate, REVERSE=reverse, TRANSPOSED=transposed, PACKED=call.cu is not None, WHOLE=pieces is None,
        START=begin.state is not None, END=end is not None, KEEP=kept is not None, RANGE=call.range, PREC=call.tiles.precision,
        **(dict(HALVES=FIRST * begin.halves, STAGES=ring(begin, a.shape[-1], 6)) if module else {}),
        num_warps=tile.warps,
        num_stages=tile.stages if count <= call.tiles.processors else 2,  # more programs than processors: two share one
    )  # fmt: skip


def ring(begin: Starts, width: int, narrow: int) -> int:
    """Chunks that a walk for Hopper fetches ahead: more where the tiles are narrow, and nobody else is on the processor."""
    if width > 128:
        return 2
    return narrow if begin.halves and width == 64 else 3


def forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None, None]:
    """Outputs and, if asked for, final states; nothing for the backward pass."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    special = gluon(call, call.q, call.k, call.v, out=out_dtype)
    if wide(call) and not special:
        return in_memory.forward(call, out_dtype, final)
    call = with_running_sums(call)
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=call.v.device)
    begin = starts(call, call.k, call.v, call.start, False, special)
    if begin.pieces is not None:
        walk(call, call.q, call.k, call.v, out, begin)
        return out, begin.far, None
    end = torch.empty((call.N, HV, K, V), dtype=torch.float32, device=call.v.device) if final else None
    walk(call, call.q, call.k, call.v, out, begin, end)
    return out, end, None


def gradients(
    call: Diagonal, chunks: Cut, do: Tensor, dkept: Tensor, dq: Tensor, dk: Tensor, special: bool
) -> Tensor:  # fmt: skip
    """Write ``dq`` and ``dk`` of a scalar gate, and return the tiles' parts of ``dg``."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    if not special:
        kept, _ = scan(call, call.k, call.v, chunks, call.start, False, False)
        return scalar_gradients(call, chunks, do, kept, dkept, dq, dk)
    from . import resident_sm90 as fused_hopper

    dg, begin, width = scalar_tiles(call), starts(call, call.k, call.v, call.start, False, special), call.tiles.gradients.BK
    pieces = begin.pieces
    launch(
        fused_hopper.gradients, begin.heads(call) * programs(K, 1, width, 1), call,
        call.q, call.k, call.v, do, call.g, begin.state, dkept, dq, dk, dg, pieces and pieces.owner, pieces and pieces.first,
        chunks.first, call.cu, T, pieces.per if pieces else 1, begin.segment, call.N, HV, call.scale, B * T * HV,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(call.g),
        K=K, V=V, C=call.tiles.chunk, BK=width, GROUP=call.group, PACKED=call.cu is not None, WHOLE=pieces is None,
        START=begin.state is not None, HALVES=FIRST_GRADIENTS * begin.halves, STAGES=ring(begin, V, 4),
        num_warps=4,
    )  # fmt: skip
    return dg


def reverse(
    call: Diagonal, do: Tensor, dend: Tensor | None, special: bool, kept: Tensor | None = None, chunks: Cut | None = None
) -> tuple[Starts, Tensor | None, Tensor]:  # fmt: skip
    """The walk from the end, which gives ``dv``: where it begins, the initial state's gradient, if there is one, and ``dv``."""
    new = functools.partial(torch.empty, device=do.device)
    late = starts(call, call.q, do, None if dend is None else dend.contiguous(), True, special)
    dstart = late.far
    if call.start is not None and late.pieces is None:
        dstart = new((call.N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]), dtype=torch.float32)
    dv = new(call.v.shape, dtype=call.v.dtype)
    walk(call, call.k, call.q, do, dv, late, None if late.pieces else dstart, reverse=True, kept=kept, chunks=chunks)
    return late, dstart, dv


def states_in_reverse(call: Diagonal, chunks: Cut, do: Tensor, dend: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """As :func:`.memory_host.in_reverse`, of wide heads."""
    if do.dtype != call.v.dtype or not gluon(call, call.q, call.k, do):
        return in_memory.in_reverse(call, chunks, do, dend)
    HV, V = call.v.shape[2:]
    dkept = torch.empty((chunks.count, HV, call.q.shape[-1], V), dtype=call.state_dtype, device=do.device)
    _, dstart, dv = reverse(call, do, dend, True, dkept, chunks)
    return dkept, dstart, dv


def backward(call: Diagonal, do: Tensor, dend: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients of ``q, k, v, g`` and the initial state."""
    if wide(call):
        return in_memory.backward(call, do, dend, states_in_reverse)
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    call = with_running_sums(call)
    q, k, v = call.q, call.k, call.v
    do = rows_contiguous(do.to(v.dtype))  # of wide outputs it is float32
    new = functools.partial(torch.empty, device=v.device)
    narrow = q.dtype if call.group == 1 else torch.float32
    special = gluon(call, q, k, v, do, out=narrow)
    dk, dq, dg = new((B, T, HV, K), dtype=narrow), new((B, T, HV, K), dtype=narrow), None
    if call.gate == 0:
        late, dstart, dv = reverse(call, do, dend, special)
        walk(call, v, do, q, dk, late, reverse=True, transposed=True)
        walk(call, do, v, k, dq, starts(call, k, v, call.start, False, special), transposed=True)
    else:
        chunks = cut(T, call.N, call.tiles.chunk, call.cu)
        dkept = new((chunks.count, HV, K, V), dtype=call.state_dtype)
        _, dstart, dv = reverse(call, do, dend, special, dkept, chunks)
        dg = over_tiles(gradients(call, chunks, do, dkept, dq, dk, special))
    return dict(q=over_group(call.q, dq), k=over_group(call.q, dk), v=dv, g=dg, gv=None, u=None, start=dstart)
