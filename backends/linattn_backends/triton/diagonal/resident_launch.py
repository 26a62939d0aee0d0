"""Launches of :mod:`.resident`: scans with the state in registers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..host.chunks import Cut, state_strides, strides, usual_tokens
from ..host.tiles import programs
from ..host.variant import Stage
from ..host.walks import goes_through_many, together
from ..runtime.launch import launch
from .call import ChunkedCall, Segments, Update
from .memory_launch import empty_gate_parts, segment_starts

__all__ = ["Operands", "gradients", "scan", "scan_segments"]

FIRST, FIRST_GRADIENTS = 10, 9
"""16ths of a sequence that the first of two programs scans, which the second scans too, for the state alone: fewer, and one is
done before the other; more, and more is read twice."""


class Operands(NamedTuple):
    """The arrays of a scan: ``a`` meets the state, ``bᵀ y`` goes into it."""

    a: Tensor
    b: Tensor
    y: Tensor


def scan_segments(
    run: ChunkedCall, stage: Stage, update: Update, start: Tensor | None, reverse: bool, width: int
) -> Segments:  # fmt: skip
    """What to scan at once: sequences are cut if there are too few heads to fill the device, or two programs share each.

    ``width`` are the channels that come out.
    """
    call, variant = run.call, run.variant
    busy = call.N * call.v.shape[2] * programs(1, width, 1, stage.tile.BV)
    if variant.shares(usual_tokens(call), busy):
        return Segments(start, shared=True)
    length = variant.segment(usual_tokens(call), busy)
    return segment_starts(run, update, start, reverse, length) if length else Segments(start)


def ring(segments: Segments, width: int, narrow: int) -> int:
    """Chunks that kernels for Hopper load ahead: more where tiles are narrow, and no other program is on the multiprocessor."""
    if width > 128:
        return 2
    return narrow if segments.shared and width == 64 else 3


def sequences_together(run: ChunkedCall, stage: Stage, segments: Segments, tiles: int) -> int:
    """How many sequences a program of ``stage`` scans one after the other, with ``tiles`` programs a head."""
    if not goes_through_many(stage.kernel) or segments.pieces is not None or segments.shared:
        return 1
    return together(run.call, run.variant.chunk, run.call.v.shape[2] * tiles, run.variant.num_sms)


def scan(
    run: ChunkedCall, stage: Stage, operands: Operands, out: Tensor, segments: Segments, end: Tensor | None = None,
    reverse: bool = False, transposed: bool = False, kept: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch one scan, which writes ``out``; ``kept`` takes the state before it meets each chunk, ``end`` the last one."""
    call, variant, tile, (a, b, y) = run.call, run.variant, stage.tile, operands
    HV, V = out.shape[2:]
    tiles = programs(1, V, 1, tile.BV)
    many = sequences_together(run, stage, segments, tiles)
    step = segments.programs(call, many)
    count = step * HV * tiles
    chunks: Cut | None = None if kept is None else run.chunks
    start = None if segments.start is None else segments.start.mT if transposed else segments.start
    launch(
        stage.kernel, count, call,
        a, b, y, run.g, call.weight, call.skip, start, out, end, kept, *segments.places(run, chunks), step, call.scale,
        *strides(a), *strides(b), *strides(y), *strides(run.g), *strides(call.weight), *state_strides(start),
        W=a.shape[-1], V=V, C=variant.chunk, BK=tile.BK, BV=tile.BV, GROUP=HV // a.shape[2], Y_GROUP=HV // y.shape[2],
        GATE=call.gate, REVERSE=reverse, TRANSPOSED=transposed, WEIGHTED=call.weight is not None,
        SKIP=call.skip is not None, PACKED=call.cu is not None, WHOLE=segments.pieces is None,
        START=start is not None, END=end is not None, KEEP=kept is not None, RANGE=variant.range,
        PREC=variant.precision, SHARE=FIRST * segments.shared, MANY=many > 1,
        STAGES=ring(segments, a.shape[-1], 6), num_warps=tile.warps,
        num_stages=tile.stages if count <= variant.num_sms else 2,  # of more than multiprocessors, two plain ones share one
    )  # fmt: skip


def gradients(run: ChunkedCall, do: Tensor, dkept: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Write ``dq`` and ``dk`` under a scalar gate in a scan from the first chunk, and return the parts of ``dg``."""
    call, stage = run.call, run.variant["scan_gradients"]
    (B, T, HV, V), K, dg = call.v.shape, call.q.shape[-1], empty_gate_parts(run, stage.tile)
    segments = scan_segments(run, run.variant["scan_dv"], Update.of_values(run), call.start, False, max(K, V))
    tiles = programs(K, 1, stage.tile.BK, 1)
    many = sequences_together(run, stage, segments, tiles)
    step = segments.programs(call, many)
    launch(
        stage.kernel, step * HV * tiles, call,
        call.q, call.k, call.v, do, run.g, segments.start, dkept, dq, dk, dg, *segments.places(run, run.chunks),
        step, call.scale, B * T * HV,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(run.g), *state_strides(segments.start),
        K=K, V=V, C=run.variant.chunk, BK=stage.tile.BK, GROUP=call.group, PACKED=call.cu is not None,
        WHOLE=segments.pieces is None, START=segments.start is not None, SHARE=FIRST_GRADIENTS * segments.shared, MANY=many > 1,
        STAGES=ring(segments, V, 4), num_warps=stage.tile.warps,
    )  # fmt: skip
    return dg
