"""Host side of :mod:`.fused`: forward and backward without a state in memory, for no gate or a scalar one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .fused import fused
from .launch import (
    Cut,
    Diagonal,
    cut,
    launch,
    over_group,
    over_tiles,
    rows_contiguous,
    scalar_gradients,
    scalar_tiles,
    scan,
    segment_starts,
    strides,
    with_running_sums,
)
from .selection import gluon
from .tuning import programs

__all__ = ["backward", "fits", "forward"]


def fits(call: Diagonal, backward: bool) -> bool:
    """Whether the operands have 16 bits and a head's state fits into registers, tile by tile, on this device.

    Backwards a final state's gradient is divided by the scale: one so small, or large, could take it out of float32's range.
    """
    return call.tiles.fused is not None and not (backward and not 2**-60 < abs(call.scale) < 2**60)


@dataclass(frozen=True)
class Starts:
    """Where the walks of one direction begin: with each sequence, or with each of its ``pieces``."""

    segment: int
    pieces: Cut | None
    state: Tensor | None
    far: Tensor | None


def starts(call: Diagonal, x: Tensor, y: Tensor, start: Tensor | None, reverse: bool) -> Starts:
    """Cut the sequences if there are too few heads to fill the device."""
    N, tile = call.N, call.tiles.fused
    width = max(call.q.shape[-1], call.v.shape[-1])
    segment = call.tiles.segment(call.v.shape[1], N, N * call.v.shape[2] * programs(1, width, 1, tile.BV))
    if segment == 0:
        return Starts(0, None, start, None)
    return Starts(segment, *segment_starts(call, x, y, None, start, reverse, segment))


def for_hopper(call: Diagonal, out: Tensor, *arrays: Tensor) -> ModuleType | None:
    """The module with kernels in Gluon that take these arrays and write ``out``, if there is one."""
    if not gluon(call, *arrays, out=out.dtype):
        return None
    from . import fused_hopper

    return fused_hopper


def walk(
    call: Diagonal, a: Tensor, b: Tensor, y: Tensor, out: Tensor, begin: Starts, end: Tensor | None = None,
    reverse: bool = False, transposed: bool = False, kept: Tensor | None = None, chunks: Cut | None = None,
) -> None:  # fmt: skip
    """Launch one walk; ``kept`` takes the state before it meets each of ``chunks``."""
    _, T, HV, V = out.shape
    tile, pieces = call.tiles.fused, begin.pieces
    module = for_hopper(call, out, a, b, y)
    count = (call.N if pieces is None else pieces.count) * HV * programs(1, V, 1, tile.BV)
    launch(
        module.fused if module else fused, count, call,
        a, b, y, call.g, begin.state, out, end, kept, pieces and pieces.owner, pieces and pieces.first,
        chunks and chunks.first, call.cu, T, pieces.per if pieces else 1, begin.segment, call.N, HV, call.scale,
        *strides(a), *strides(b), *strides(y), *strides(call.g),
        W=a.shape[-1], V=V, C=call.tiles.chunk, BK=tile.BK, BV=tile.BV, GROUP=HV // a.shape[2], Y_GROUP=HV // y.shape[2],
        GATE=call.gate, REVERSE=reverse, TRANSPOSED=transposed, PACKED=call.cu is not None, WHOLE=pieces is None,
        START=begin.state is not None, END=end is not None, KEEP=kept is not None, RANGE=call.range, PREC=call.tiles.precision,
        **(dict(STAGES=call.tiles.ring) if module else {}), num_warps=tile.warps,
        num_stages=tile.stages if count <= call.tiles.processors else 2,  # more programs than processors: two share one
    )  # fmt: skip


def forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None, None]:
    """Outputs and, if asked for, final states; nothing for the backward pass."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    call = with_running_sums(call)
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=call.v.device)
    begin = starts(call, call.k, call.v, call.start, False)
    if begin.pieces is not None:
        walk(call, call.q, call.k, call.v, out, begin)
        return out, begin.far, None
    end = torch.empty((call.N, HV, K, V), dtype=torch.float32, device=call.v.device) if final else None
    walk(call, call.q, call.k, call.v, out, begin, end)
    return out, end, None


def gradients(call: Diagonal, chunks: Cut, do: Tensor, dkept: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Write ``dq`` and ``dk`` of a scalar gate, and return the tiles' parts of ``dg``."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    module = for_hopper(call, dq, call.q, call.k, call.v, do)
    if module is None:
        kept, _ = scan(call, call.k, call.v, chunks, call.start, False, False)
        return scalar_gradients(call, chunks, do, kept, dkept, dq, dk)
    dg, begin, width = scalar_tiles(call), starts(call, call.k, call.v, call.start, False), call.tiles.gradients.BK
    pieces = begin.pieces
    launch(
        module.gradients, (call.N if pieces is None else pieces.count) * HV * programs(K, 1, width, 1), call,
        call.q, call.k, call.v, do, call.g, begin.state, dkept, dq, dk, dg, pieces and pieces.owner, pieces and pieces.first,
        chunks.first, call.cu, T, pieces.per if pieces else 1, begin.segment, call.N, HV, call.scale, B * T * HV,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(call.g),
        K=K, V=V, C=call.tiles.chunk, BK=width, GROUP=call.group, PACKED=call.cu is not None, WHOLE=pieces is None,
        START=begin.state is not None, STAGES=call.tiles.ring, num_warps=4,
    )  # fmt: skip
    return dg


def backward(call: Diagonal, do: Tensor, dend: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients of ``q, k, v, g`` and the initial state."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    call = with_running_sums(call)
    q, k, v = call.q, call.k, call.v
    do = rows_contiguous(do.to(v.dtype))  # of wide outputs it is float32
    new = functools.partial(torch.empty, device=v.device)
    late = starts(call, q, do, None if dend is None else dend.contiguous(), True)
    dstart = late.far
    if call.start is not None and late.pieces is None:
        dstart = new((call.N, HV, K, V), dtype=torch.float32)
    narrow = q.dtype if call.group == 1 else torch.float32
    dv, dk, dq = new((B, T, HV, V), dtype=v.dtype), new((B, T, HV, K), dtype=narrow), new((B, T, HV, K), dtype=narrow)
    there = None if late.pieces else dstart
    dg = None
    if call.gate == 0:
        walk(call, k, q, do, dv, late, there, reverse=True)
        walk(call, v, do, q, dk, late, reverse=True, transposed=True)
        walk(call, do, v, k, dq, starts(call, k, v, call.start, False), transposed=True)
    else:
        chunks = cut(T, call.N, call.tiles.chunk, call.cu)
        dkept = new((chunks.count, HV, K, V), dtype=call.state_dtype)
        walk(call, k, q, do, dv, late, there, reverse=True, kept=dkept, chunks=chunks)
        dg = over_tiles(gradients(call, chunks, do, dkept, dq, dk))
    return dict(q=over_group(call, dq), k=over_group(call, dk), v=dv, g=dg, gv=None, u=None, start=dstart)
