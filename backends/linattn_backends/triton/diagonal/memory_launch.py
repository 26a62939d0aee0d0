"""Launches of :mod:`.memory`: states in memory, outputs and gradients from them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.chunks import cut, places, state_strides, strides, type_of_products, usual_tokens
from ..host.reach import ranges_of
from ..host.tiles import Tile, programs
from ..host.variant import Stage
from ..lib.reach import RUNNING, SUMS
from ..runtime.launch import launch
from .call import ChunkedCall, Portion, Segments, Update
from .gate import SCALAR, SUMMED

__all__ = [
    "NumbersAToken", "Roles", "empty_gate_parts", "far_states", "gradients", "outputs", "scalar_gradients", "scan_states",
    "segment_starts",
]  # fmt: skip


def head_constants(run: ChunkedCall) -> dict[str, Any]:
    """Compile-time facts of the sizes of heads and chunks, and of how products are done."""
    call, variant = run.call, run.variant
    return dict(
        K=call.q.shape[-1], V=call.v.shape[-1], C=variant.chunk, PACKED=call.cu is not None, SPLIT=variant.split,
        PREC=variant.precision,
    )  # fmt: skip


def tile_constants(tile: Tile) -> dict[str, int]:
    """Compile-time facts of a tile."""
    return dict(BK=tile.BK, BV=tile.BV, num_warps=tile.warps, num_stages=tile.stages)


def group_of(run: ChunkedCall, x: Tensor | None) -> int:
    """Value heads that share a head of ``x``."""
    return 1 if x is None else run.call.v.shape[2] // x.shape[2]


def launch_states(
    run: ChunkedCall, stage: Stage, update: Update, reverse: bool, segments: Segments, end: Tensor | None = None,
    decays: tuple[Tensor | None, Tensor | None] = (None, None), kept: Tensor | None = None, ranges: Tensor | None = None,
) -> None:  # fmt: skip
    """Scan ``segments``: last states go to ``end``, sums of both gates to ``decays``, states before the chunks to ``kept``;
    of the chunks of ``ranges`` alone, if given.
    """
    call, tile, (x, y, gate, g, gv, weight) = run.call, stage.tile, update
    chunks = run.chunks if kept is not None or gate == SUMMED.value else None
    launch(
        stage.kernel, segments.heads(call) * programs(call.q.shape[-1], call.v.shape[-1], tile.BK, tile.BV), call,
        x, y, g, gv, weight, segments.start, end, *decays, kept, ranges, *segments.places(run, chunks), call.scale,
        *strides(x), *strides(y), *strides(g), *strides(gv), *strides(weight), *state_strides(segments.start),
        **head_constants(run), **tile_constants(tile), GROUP=group_of(run, x),
        GATE_GROUP=1 if gate == SUMMED.value else group_of(run, g), GATE=gate, VALUE_GATE=gv is not None,
        WEIGHTED=weight is not None, REVERSE=reverse,
        WHOLE=segments.pieces is None, START=segments.start is not None, END=end is not None, KEEP=kept is not None,
        RANGED=ranges is not None,
    )  # fmt: skip


class Carried(NamedTuple):
    """What comes of sequences that are cut into segments.

    Attributes:
        segments: They, with the state that each starts from.
        decay, value_decay: Sums of the gates over each, base 2: ``[segments, HV, K]`` and ``[segments, HV, V]``.
    """

    segments: Segments
    decay: Tensor | None
    value_decay: Tensor | None


def segment_starts(run: ChunkedCall, update: Update, start: Tensor | None, reverse: bool, length: int) -> Segments:
    """Sequences cut into segments of ``length`` chunks, and the state that each starts from."""
    return carried(run, update, start, reverse, length).segments


def far_states(
    run: ChunkedCall, update: Update, start: Tensor | None, reverse: bool, length: int, end: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state at the far end of each sequence, in ``end`` if given, and the sums of both gates over its segments of
    ``length`` chunks.

    Chunks of which gates leave nothing there are not read, and their gates are not among the sums.
    """
    segments, decay, value_decay = carried(run, update, start, reverse, length, in_reach(run, update, reverse), end)
    return segments.end, decay, value_decay


def in_reach(run: ChunkedCall, update: Update, reverse: bool) -> Tensor | None:
    """Which chunks reach the far end of each sequence; ``None`` where sums of gates over chunks are not known."""
    kind = {SCALAR.value: RUNNING.value, SUMMED.value: SUMS.value}.get(update.gate)
    return None if kind is None else ranges_of(run.call, run.chunks, run.variant.chunk, update.g, kind, reverse)


def carried(
    run: ChunkedCall, update: Update, start: Tensor | None, reverse: bool, length: int, ranges: Tensor | None = None,
    end: Tensor | None = None,
) -> Carried:  # fmt: skip
    """Scan every segment of ``length`` chunks from zero, of ``ranges`` of chunks if given, then carry the states over them; the
    last ones to ``end``, if given.
    """
    call, (_, _, gate, g, gv, _) = run.call, update
    HV, V = call.v.shape[2:]
    K, N = call.q.shape[-1], call.N
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
    pieces = cut(call, length * run.variant.chunk)
    local, end = new((pieces.count, HV, K, V)), new((N, HV, K, V)) if end is None else end
    decay = None if g is None else new((pieces.count, HV, K))
    value_decay = None if gv is None else new((pieces.count, HV, V))
    from_zero = Segments(None, pieces, length)
    stage = run.variant["segment_states"]
    launch_states(run, stage, update, reverse, from_zero, local, (decay, value_decay), ranges=ranges)
    stage = run.variant["segment_carries"]
    launch(
        stage.kernel, N * HV * programs(K, V, stage.tile.BK, stage.tile.BV), call,
        local, decay, value_decay, start, end, pieces.first, pieces.per, HV, *state_strides(start),
        K=K, V=V, BK=stage.tile.BK, BV=stage.tile.BV, GATE=gate, VALUE_GATE=gv is not None, REVERSE=reverse,
        PACKED=call.cu is not None, START=start is not None, num_warps=stage.tile.warps,
    )  # fmt: skip
    return Carried(Segments(local, pieces, length, end), decay, value_decay)


def scan_states(
    run: ChunkedCall, update: Update, start: Tensor | None, reverse: bool, end: bool
) -> tuple[Tensor, Tensor | None]:
    """States at chunk starts (gradients at chunk ends, in reverse), and the state at the far end of each sequence."""
    call, stage = run.call, run.variant["states"]
    HV, V = call.v.shape[2:]
    K, N, tile = call.q.shape[-1], call.N, stage.tile
    new = functools.partial(torch.empty, device=call.q.device)
    kept = new((run.chunks.count, HV, K, V), dtype=call.state_dtype)
    length = run.variant.segment(usual_tokens(call), N * HV * programs(K, V, tile.BK, tile.BV))
    if length:
        segments = segment_starts(run, update, start, reverse, length)
        launch_states(run, stage, update, reverse, segments, kept=kept)
        return kept, segments.end
    far = new((N, HV, K, V), dtype=torch.float32) if end else None
    launch_states(run, stage, update, reverse, Segments(start), far, kept=kept)
    return kept, far


def outputs(run: ChunkedCall, y: Tensor, kept: Tensor, out: Tensor, reverse: bool) -> None:
    """Write ``o`` from ``y = v`` and states, or in reverse ``dv`` from ``y = do`` and their gradients."""
    call, stage = run.call, run.variant["outputs"]
    launch(
        stage.kernel, run.chunks.count * call.v.shape[2] * programs(1, call.v.shape[-1], 1, stage.tile.BV), call,
        call.q, call.k, y, run.g, call.gv, kept, out, *places(call, run.chunks), call.scale,
        *strides(call.q), *strides(call.k), *strides(y), *strides(run.g), *strides(call.gv),
        **head_constants(run), **tile_constants(stage.tile), GROUP=call.group, GATE_GROUP=group_of(run, run.g), GATE=call.gate,
        VALUE_GATE=call.gv is not None, REVERSE=reverse, RANGE=run.variant.range, DT=type_of_products(call.v),
    )  # fmt: skip


class Roles(NamedTuple):
    """Arrays in the roles of :func:`.memory.diagonal_gradients_bwd`, where keys and values may have changed places."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    g: Tensor | None
    gv: Tensor | None


def gradients(
    run: ChunkedCall, stage: Stage, roles: Roles, kept: Tensor, dkept: Tensor, dq: Tensor | None, dk: Tensor, dg: Tensor | None
) -> None:
    """Write ``dq, dk, dg``. Without ``dq``, keys and values have changed places, and ``dk, dg`` are the values'.

    Value heads that share a sum in ``dq`` and ``dk`` take turns, a launch after the other.
    """
    call, tile, (q, _, v, _, g, gv) = run.call, stage.tile, roles
    B, T, HV, _ = call.v.shape
    K, V, turns = q.shape[-1], v.shape[-1], HV // dk.shape[2]
    for turn in range(turns):
        launch(
            stage.kernel, run.chunks.count * dk.shape[2] * programs(K, 1, tile.BK, 1), call,
            *roles, kept, dkept, dq, dk, dg, *places(call, run.chunks), turn, call.scale, B * T * HV,
            *(stride for x in roles for stride in strides(x)), **dict(head_constants(run), K=K, V=V), **tile_constants(tile),
            GROUP=group_of(run, q), GATE_GROUP=group_of(run, g), VALUE_GROUP=group_of(run, v),
            VALUE_GATE_GROUP=group_of(run, gv), TURNS=turns, GATE=call.gate, VALUE_GATE=gv is not None, TRANSPOSED=dq is None,
            RANGE=run.variant.range, DT=type_of_products(call.v),
        )  # fmt: skip


class NumbersAToken(NamedTuple):
    """Gradients of which each token and value head has one, float32 ``[B, T, HV]``, under a scalar gate.

    Attributes:
        pair: That of the gate; of values with weights, that of the weights' logarithms after it: ``[1 or 2, B, T, HV]``.
        skip: A token's part of that of the skip's factors, times its weight; or ``None``.
    """

    pair: Tensor
    skip: Tensor | None

    @classmethod
    def of(cls, run: ChunkedCall) -> NumbersAToken:
        """Room for the gradients of a whole call."""
        new, shape = functools.partial(torch.empty, dtype=torch.float32, device=run.call.v.device), run.call.v.shape[:3]
        return cls(new((1 if run.late is None else 2, *shape)), None if run.call.skip is None else new(shape))

    def portion(self, portion: Portion) -> NumbersAToken:
        """The gradients of a portion."""
        pair = self.pair[:, portion.first : portion.last, portion.low : portion.high]
        return NumbersAToken(pair, None if self.skip is None else portion.tokens_of(self.skip))

    def by_name(self) -> dict[str, Tensor | None]:
        """The gradients, by the name of what each is the gradient of."""
        return dict(g=self.pair[0], weight=self.pair[1] if len(self.pair) > 1 else None, skip=self.skip)


def scalar_gradients(
    run: ChunkedCall, do: Tensor, kept: Tensor, dkept: Tensor, dq: Tensor, dk: Tensor, numbers: NumbersAToken
) -> None:
    """Write ``dq``, ``dk`` and ``numbers`` under a scalar gate, of 16-bit operands.

    A program goes through the value heads that share a sum in ``dq`` and ``dk``.
    """
    call, stage = run.call, run.variant["scalar_gradients"]
    HV, V = call.v.shape[2:]
    K, weighted = call.q.shape[-1], run.late is not None
    tiles, (pair, dskip) = programs(K, 1, stage.tile.BK, 1), numbers
    parts = pair[None]
    if tiles > 1:  # of a tile of key channels each
        parts = torch.empty((tiles, *pair.shape), dtype=torch.float32, device=call.v.device)
    launch(
        stage.kernel, run.chunks.count * dk.shape[2] * tiles, call,
        call.q, call.k, call.v, do, run.g, run.late, kept, dkept, dq, dk, parts[:, 0], parts[:, 1] if weighted else None, dskip,
        *places(call, run.chunks), call.scale, parts.stride(0),
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(run.g),
        K=K, V=V, C=run.variant.chunk, GROUP=call.group, HEADS=HV // dk.shape[2], WEIGHTED=weighted,
        SKIP=dskip is not None, PACKED=call.cu is not None, PREC=run.variant.precision, DT=type_of_products(call.v),
        **tile_constants(stage.tile),
    )  # fmt: skip
    if tiles > 1:
        torch.sum(parts, 0, out=pair)


def empty_gate_parts(run: ChunkedCall, tile: Tile) -> Tensor:
    """Room for a scalar gate's gradient, one part a tile of key channels: ``[tiles, B, T, HV]``."""
    count = programs(run.call.q.shape[-1], 1, tile.BK, 1)
    return torch.empty((count, *run.call.v.shape[:3]), dtype=torch.float32, device=run.call.v.device)
