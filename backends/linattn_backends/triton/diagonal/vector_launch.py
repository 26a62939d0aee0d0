"""Launches of :mod:`.vector`: a gate per key channel, applied before the scan."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.chunks import places, state_strides, strides, type_of_products, usual_tokens
from ..host.tiles import Tile, programs
from ..runtime.launch import launch
from .call import ChunkedCall, DiagonalCall, Segments, Update, VectorOperands
from .gate import SUMMED
from .gate_launch import sum_matrices
from .memory_launch import segment_starts

__all__ = ["StateGradients", "inter", "intra", "make_operands", "outputs", "scan", "update"]


def constants(run: ChunkedCall, tile: Tile) -> dict[str, Any]:
    """Compile-time facts of every plain kernel here."""
    return dict(
        C=run.variant.chunk, BK=tile.BK, PACKED=run.call.cu is not None, PREC=run.variant.precision, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def gate_constants(call: DiagonalCall) -> dict[str, Any]:
    """Compile-time facts of kernels that see the gate."""
    return dict(K=call.q.shape[-1], GROUP=call.group, GATE_GROUP=call.v.shape[2] // call.g.shape[2])


def shared_work(run: ChunkedCall, count: int) -> int:
    """Programs that fill the device and share ``count`` pieces of work."""
    return min(count, 2 * run.variant.num_sms)


def update(made: VectorOperands, x: Tensor, y: Tensor) -> Update:
    """What carries a state over a chunk: rows ``x`` that have decayed already."""
    return Update(x, y, SUMMED.value, made.decay)


def make_operands(run: ChunkedCall) -> VectorOperands:
    """Scores, and rows decayed to the start and the end of their chunks: all chunks, then again those that decay by more."""
    call, variant = run.call, run.variant
    made, masks, count = VectorOperands.empty(call), sum_matrices(run), run.chunks.count * call.v.shape[2]
    strided = *strides(call.q), *strides(call.k), *strides(call.g)
    stage = variant["scores"]
    plain = dict(
        constants(run, stage.tile), **gate_constants(call), EXCLUSIVE=call.u is not None, SPLIT=variant.split,
        RANGE=variant.range, DT=type_of_products(call.v),
    )  # fmt: skip
    strong = variant.stages.get("scores_strong")
    for again in (False,) if strong else (False, True):
        launch(
            stage.kernel, shared_work(run, count) if again else count, call,
            call.q, call.k, call.g, call.u, masks, *made, *places(call, run.chunks), count, call.scale, *strided,
            STRONG=again, **plain,
        )  # fmt: skip
    if strong:
        launch(
            strong.kernel, shared_work(run, count), call,
            call.q, call.k, call.g, made.A, made.read, made.write, made.stops, *places(call, run.chunks), count, call.scale,
            *strided, **gate_constants(call), C=variant.chunk, PACKED=call.cu is not None, num_warps=strong.tile.warps,
        )  # fmt: skip
    return made


def scan(
    run: ChunkedCall, made: VectorOperands, y: Tensor, start: Tensor | None, out: Tensor, final: bool,
    kept: Tensor | None = None, reverse: bool = False,
) -> Tensor | None:  # fmt: skip
    """Write ``o``, or ``dv``, with the state in registers, and to ``kept`` the chunks' states; return the state at the end."""
    call, variant, stage = run.call, run.variant, run.variant["scan"]
    (*_, HV, V), K, N = call.v.shape, call.q.shape[-1], call.N
    reads, writes = (made.write, made.read) if reverse else (made.read, made.write)
    length = variant.segment(usual_tokens(call), N * HV * programs(1, V, 1, stage.tile.BV))
    segments = segment_starts(run, update(made, writes, y), start, reverse, length) if length else Segments(start)
    end = torch.empty((N, HV, K, V), dtype=torch.float32, device=y.device) if final and not length else None
    launch(
        stage.kernel, segments.heads(call) * programs(1, V, 1, stage.tile.BV), call,
        made.A, reads, writes, y, made.decay, segments.start, out, end, kept, *segments.places(run, run.chunks), *strides(y),
        *state_strides(segments.start),
        K=K, V=V, BV=stage.tile.BV, REVERSE=reverse, WHOLE=segments.pieces is None, START=segments.start is not None,
        END=end is not None, KEEP=kept is not None, **constants(run, stage.tile),
    )  # fmt: skip
    return segments.end if length else end


def outputs(run: ChunkedCall, made: VectorOperands, y: Tensor, kept: Tensor, out: Tensor, reverse: bool) -> None:
    """Write ``o``, or ``dv``, from states in memory."""
    call, stage = run.call, run.variant["outputs"]
    HV, V = call.v.shape[2:]
    launch(
        stage.kernel, run.chunks.count * HV * programs(1, V, 1, stage.tile.BV), call,
        made.A, made.write if reverse else made.read, y, kept, out, *places(call, run.chunks), *strides(y),
        K=call.q.shape[-1], V=V, BV=stage.tile.BV, REVERSE=reverse, DT=type_of_products(call.v), **constants(run, stage.tile),
    )  # fmt: skip


class StateGradients(NamedTuple):
    """What ``inter`` makes: gradients of scores, their diagonal, and what passes through states of ``dq, dk, dg``."""

    dA: Tensor
    own: Tensor
    dq: Tensor
    dk: Tensor
    dg: Tensor


def inter(run: ChunkedCall, do: Tensor, kept: Tensor, dkept: Tensor) -> StateGradients:
    """Gradients that pass through states, and those of scores."""
    call, stage = run.call, run.variant["inter"]
    (B, T, HV, V), K, C, count = call.v.shape, call.q.shape[-1], run.variant.chunk, run.chunks.count
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.v.device)
    narrow = call.q.dtype if call.group == 1 else torch.float32
    found = StateGradients(
        new((count, HV, 2, C, C), dtype=call.state_dtype), new((count, HV, C)), new((B, T, HV, K), dtype=narrow),
        new((B, T, HV, K), dtype=narrow), new((count, HV, K)),
    )  # fmt: skip
    launch(
        stage.kernel, count * HV * programs(K, 1, stage.tile.BK, 1), call,
        do, call.v, kept, dkept, *found, *places(call, run.chunks), call.scale, *strides(do), *strides(call.v),
        K=K, V=V, BV=stage.tile.BV, **constants(run, stage.tile),
    )  # fmt: skip
    return found


def intra(run: ChunkedCall, decay: Tensor, stops: Tensor, found: StateGradients) -> tuple[Tensor, Tensor | None]:
    """Finish ``dq`` and ``dk`` in place inside the chunks; return ``dg`` of each value head, and ``du`` of each chunk."""
    call, variant = run.call, run.variant
    (B, T, HV, _), K, chunks, device = call.v.shape, call.q.shape[-1], run.chunks.count, call.v.device
    dg = torch.empty((B, T, HV, K), dtype=call.g.dtype if call.g.shape[2] == HV else torch.float32, device=device)
    du = None
    if call.u is not None:
        zeros = torch.zeros if call.cu is not None else torch.empty
        du = zeros((chunks, HV, K), dtype=torch.float32, device=device)
    strided = *strides(call.q), *strides(call.k), *strides(call.g)
    stage = variant["intra"]
    count, masks = chunks * HV * programs(K, 1, stage.tile.BK, 1), sum_matrices(run)
    plain = dict(
        constants(run, stage.tile._replace(stages=1)), **gate_constants(call), EXCLUSIVE=call.u is not None,
        SPLIT=variant.split, TERMS=1 if call.q.dtype == torch.bfloat16 else variant.split, DT=type_of_products(call.v),
    )  # fmt: skip
    strong = variant.stages.get("intra_strong")
    for again in (False,) if strong else (False, True):
        launch(
            stage.kernel, shared_work(run, count), call,
            call.q, call.k, call.g, call.u, masks, found.dA, found.own, found.dg, decay, stops, found.dq, found.dk,
            dg, du, *places(call, run.chunks), count, *strided, STRONG=again, STAGES=1 if again else stage.tile.stages, **plain,
        )  # fmt: skip
    if strong:
        launch(
            strong.kernel, shared_work(run, count), call,
            call.q, call.k, call.g, found.dA, found.own, found.dg, stops, found.dq, found.dk, dg,
            *places(call, run.chunks), count, *strided, BK=strong.tile.BK, C=variant.chunk, PACKED=call.cu is not None,
            num_warps=strong.tile.warps, **gate_constants(call),
        )  # fmt: skip
    return dg, du
