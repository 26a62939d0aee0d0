"""Host side of :mod:`.fused`: forward and backward without a state in memory, for no gate or a scalar one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import gates
from .fused import fused
from .launch import Cut, Diagonal, cut, launch, over_group, rows_contiguous, segment_starts, strides, with_running_sums
from .tuning import programs

__all__ = ["backward", "fits", "forward"]


def fits(call: Diagonal) -> bool:
    """Whether the state of a head fits into registers, tile by tile."""
    return call.tiles.fused is not None


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
    return Starts(segment, *segment_starts(call, x, y, start, reverse, segment))


@dataclass(frozen=True)
class GateSums:
    """What the walks of ``dq`` and ``dk`` leave for the gradient of a scalar gate."""

    spans: Cut
    q_dots: Tensor
    k_dots: Tensor
    met: Tensor
    kept: Tensor

    @classmethod
    def of(cls, call: Diagonal) -> GateSums:
        """Room for them."""
        (B, T, HV, V), K, tile = call.v.shape, call.q.shape[-1], call.tiles.fused
        tiles = programs(K, 1, tile.BV, 1)
        spans = cut(T, call.N, call.tiles.gate_span * call.tiles.chunk, call.cu)
        new = functools.partial(torch.empty, dtype=torch.float32, device=call.v.device)
        dots = new((2, tiles, HV, B, T))
        kept = new((spans.count, HV, tiles, tile.BK * tile.BV), dtype=call.state_dtype)
        return cls(spans, dots[0], dots[1], new((tiles, spans.count, HV)), kept)


def walk(
    call: Diagonal, a: Tensor, b: Tensor, y: Tensor, out: Tensor, begin: Starts, end: Tensor | None = None,
    reverse: bool = False, transposed: bool = False, x: Tensor | None = None, sums: GateSums | None = None,
) -> Tensor:  # fmt: skip
    """Launch one walk; ``x`` and ``sums`` where the gate's gradient wants the walk's products with ``x``."""
    _, T, HV, V = out.shape
    tile, pieces = call.tiles.fused, begin.pieces
    count = call.N if pieces is None else pieces.count
    dots = None if sums is None else sums.k_dots if reverse else sums.q_dots
    launch(
        fused, count * HV * programs(1, V, 1, tile.BV), call,
        a, b, y, x, call.g, begin.state, out, end, dots, sums and sums.met, sums and sums.kept,
        pieces and pieces.owner, pieces and pieces.first, sums and sums.spans.first, call.cu,
        T, pieces.per if pieces else 1, begin.segment, call.N, HV, sums.spans.count if sums else 0, call.scale,
        *strides(a), *strides(b), *strides(y), *strides(x), *strides(call.g),
        W=a.shape[-1], V=V, C=call.tiles.chunk, BK=tile.BK, BV=tile.BV, SPAN=call.tiles.gate_span,
        GROUP=HV // a.shape[2], Y_GROUP=HV // y.shape[2], GATE=call.gate, REVERSE=reverse, TRANSPOSED=transposed,
        PACKED=call.cu is not None, WHOLE=pieces is None, START=begin.state is not None, END=end is not None,
        DOTS=sums is not None, PREC=call.tiles.precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None]:
    """Outputs and, if asked for, final states."""
    (B, T, HV, V), K = call.v.shape, call.q.shape[-1]
    call = with_running_sums(call, cut_for_gate(call))
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=call.v.device)
    begin = starts(call, call.k, call.v, call.start, False)
    end = begin.far
    if final and begin.pieces is None:
        end = torch.empty((call.N, HV, K, V), dtype=torch.float32, device=call.v.device)
    walk(call, call.q, call.k, call.v, out, begin, None if begin.pieces else end)
    return out, end


def cut_for_gate(call: Diagonal) -> Cut:
    """Chunks, where a gate has to be summed within them."""
    return cut(call.v.shape[1], call.N, call.tiles.chunk, call.cu) if call.gate == 1 else Cut(0, 0, None, None)


def backward(call: Diagonal, do: Tensor, dend: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients of ``q, k, v, g`` and the initial state, each in the shape that the kernels read."""
    (B, T, HV, V), K, raw = call.v.shape, call.q.shape[-1], call.g
    q, k, v, do = call.q, call.k, call.v, rows_contiguous(do)
    narrow = q.dtype if call.group == 1 else torch.float32
    new = functools.partial(torch.empty, device=v.device)
    call = with_running_sums(call, cut_for_gate(call))
    sums = GateSums.of(call) if call.gate else None
    late = starts(call, q, do, None if dend is None else dend.contiguous(), True)
    early = starts(call, k, v, call.start, False)
    dstart = late.far
    if call.start is not None and late.pieces is None:
        dstart = new((call.N, HV, K, V), dtype=torch.float32)
    dv = new((B, T, HV, V), dtype=v.dtype)
    dk, dq = new((B, T, HV, K), dtype=narrow), new((B, T, HV, K), dtype=narrow)
    walk(call, k, q, do, dv, late, None if late.pieces else dstart, reverse=True)
    walk(call, v, do, q, dk, late, reverse=True, transposed=True, x=k, sums=sums)
    walk(call, do, v, k, dq, early, transposed=True, x=q, sums=sums)
    dg = None if sums is None else gate_gradient(call, raw, sums)
    return dict(q=over_group(call, dq), k=over_group(call, dk), v=dv, g=dg, u=None, start=dstart)


def gate_gradient(call: Diagonal, raw: Tensor, sums: GateSums) -> Tensor:
    """``dg [B, T, HV]`` from what the walks left; ``raw`` is the gate itself."""
    B, T, HV = raw.shape
    dg = torch.empty((B, T, HV), dtype=torch.float32, device=raw.device)
    spans = sums.spans
    launch(
        gates.gate_gradient, spans.count * HV, call,
        raw, sums.q_dots, sums.k_dots, sums.met, dg, spans.owner, spans.first, call.cu,
        T, spans.per, call.N, HV, spans.count, B * T, *strides(raw),
        LENGTH=call.tiles.gate_span * call.tiles.chunk, TILES=sums.met.shape[0], PACKED=call.cu is not None, num_warps=2,
    )  # fmt: skip
    return dg
