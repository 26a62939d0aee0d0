"""Launches that carry the state over the chunks, and its gradient back, in segments where there are few heads."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..host.chunks import Cut, cut, state_strides, strides, usual_tokens
from ..host.reach import proved, ranges_of, replace
from ..host.tiles import programs
from ..host.variant import Stage
from ..host.walks import goes_through_many, together
from ..lib.reach import DECAYS, SUMS
from ..runtime.launch import launch
from .call import ChunkedCall, StateOperands

__all__ = [
    "BACKWARD", "FORWARD", "Segments", "Written", "carry_backward", "carry_forward", "far_states", "local_states",
    "segments_of", "transitions_of", "whole_transitions",
]  # fmt: skip

WHOLE = 1 << 30
"""Chunks of a segment that is a whole sequence: more than there are."""


class Direction(NamedTuple):
    """A way through the chunks.

    Attributes:
        state: The stage that writes what is wanted on the way.
        segment: The stage that goes through a segment, and writes what it ends as.
        reverse: Whether it begins with the last chunk.
    """

    state: str
    segment: str
    reverse: bool


FORWARD = Direction("state_fwd", "segment_fwd", reverse=False)
BACKWARD = Direction("state_bwd", "segment_bwd", reverse=True)


class Segments(NamedTuple):
    """Sequences cut into segments.

    Attributes:
        cut: Where they lie.
        length: Chunks a segment.
        transitions: What each does to the state before it, ``[segments, HV, K, K]``.
        local: The states that they make of zero, ``[segments, HV, K, V]``, where more than one stage asks for them.
    """

    cut: Cut
    length: int
    transitions: Tensor
    local: Tensor | None = None


class Written(NamedTuple):
    """What is written on the way from chunk to chunk, if wanted.

    Attributes:
        states: The state before each chunk; backwards, the gradient of the state after it.
        errors: Errors; backwards, their adjoint.
        out: Outputs, forwards.
    """

    states: Tensor | None = None
    errors: Tensor | None = None
    out: Tensor | None = None


def carry_forward(
    call: ChunkedCall, operands: StateOperands, segments: Segments | None, final: bool, written: Written
) -> Tensor | None:  # fmt: skip
    """Carry the state from the first chunk of every sequence to the last; the final states if asked for."""
    return carry(call, operands, FORWARD, call.v, segments, call.start, final, written)


def carry_backward(
    call: ChunkedCall, operands: StateOperands, do: Tensor, segments: Segments | None, dfinal: Tensor | None, written: Written
) -> Tensor | None:  # fmt: skip
    """Carry the state's gradient from the last chunk of every sequence to the first; the initial states' if there are any."""
    return carry(call, operands, BACKWARD, do, segments, dfinal, call.start is not None, written)


def segments_of(
    call: ChunkedCall, operands: StateOperands, transitions: Tensor | None = None, local: Tensor | None = None
) -> Segments | None:
    """Segments, if there are too few heads to fill the device; what they do to a state, and make of zero, may be known."""
    HV, V = call.v.shape[2:]
    K, variant = call.q.shape[-1], call.variant
    busy = call.N * HV * programs(1, V, 1, variant["state_fwd"].tile.BV)
    length = variant.segment(usual_tokens(call), busy, call.v.shape[1])
    if length == 0:
        return None
    pieces = cut(call, length * call.chunk, whole=variant.whole(length))
    if transitions is not None:
        return Segments(pieces, length, transitions, local)
    segments = Segments(pieces, length, torch.empty((pieces.count, HV, K, K), dtype=torch.float32, device=call.q.device))
    launch_state(call, variant["segment_fwd"], operands, None, segments, None, segments.transitions, Written())
    return segments


def carry(
    call: ChunkedCall, operands: StateOperands, direction: Direction, y: Tensor, segments: Segments | None,
    start: Tensor | None, end: bool, written: Written,
) -> Tensor | None:  # fmt: skip
    """Carry a state, or its gradient, over every sequence; what it ends as if asked for."""
    HV, V = call.v.shape[2:]
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
    stage = call.variant[direction.state]
    if segments is None:
        far = new((call.N, HV, call.q.shape[-1], V)) if end else None
        launch_state(call, stage, operands, y, None, start, far, written)
        return far
    local, far = starts_of(call, operands, direction, y, segments, start)
    launch_state(call, stage, operands, y, segments, local, None if call.cu is None else far, written)
    return far


def starts_of(
    call: ChunkedCall, operands: StateOperands, direction: Direction, y: Tensor, segments: Segments, start: Tensor | None,
    far: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The states before the segments, and those after the last of each sequence, in ``far`` if given; after packed ones in one
    segment, none yet.
    """
    known = segments.local is not None and not direction.reverse
    local = segments.local.clone() if known else local_states(call, operands, direction, y, segments)
    return local, chain(call, segments, local, start, direction.reverse, room(call, call.v.shape[-1]) if far is None else far)


def local_states(
    call: ChunkedCall, operands: StateOperands, direction: Direction, y: Tensor, segments: Segments
) -> Tensor:  # fmt: skip
    """The states that segments make of zero."""
    shape = segments.cut.count, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]
    local = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    launch_state(call, call.variant[direction.segment], operands, y, segments, None, local, Written())
    return local


def far_states(
    call: ChunkedCall, operands: StateOperands, direction: Direction, y: Tensor, segments: Segments | None,
    start: Tensor | None, ranges: Tensor | None, far: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What a state, or its gradient, ends as at the far end of every sequence of a batch; nothing is written on the way. It is
    written to ``far``, if given.

    Of whole sequences only ``ranges`` of chunks are gone through, where those before leave nothing at the far end.
    """
    if segments is not None:
        return starts_of(call, operands, direction, y, segments, start, far)[1]
    far = room(call, call.v.shape[-1]) if far is None else far
    launch_state(call, call.variant[direction.segment], operands, y, None, start, far, Written(), ranges)
    return far


def room(call: ChunkedCall, columns: int) -> Tensor:
    """Room for a matrix of every sequence and head, with a row for each key channel: ``[N, HV, K, columns]``."""
    shape = call.N, call.v.shape[2], call.q.shape[-1], columns
    return torch.empty(shape, dtype=torch.float32, device=call.q.device)


class Transitions(NamedTuple):
    """What every sequence of a batch does to the state before it.

    Attributes:
        whole: ``[N, HV, K, K]``, from the left.
        ranges: The chunks that leave anything at a sequence's end, the first and the one past the last ``[N, HV, 2]``; of
            sequences that are cut into segments, ``None``.
    """

    whole: Tensor
    ranges: Tensor | None


def transitions_of(
    call: ChunkedCall, operands: StateOperands, segments: Segments | None, into: Tensor | None = None
) -> Transitions:  # fmt: skip
    """What every sequence of a batch does to the state before it; written to ``into``, if given."""
    HV, K = call.v.shape[2], call.q.shape[-1]
    if segments is None:
        return whole_transitions(call, operands, reverse=False, into=into)
    first, *others = segments.transitions.view(call.N, -1, HV, K, K).unbind(1)
    whole = functools.reduce(lambda before, after: after @ before, others, first)
    return Transitions(whole if into is None else into.copy_(whole), None)


def whole_transitions(call: ChunkedCall, operands: StateOperands, reverse: bool, into: Tensor | None = None) -> Transitions:
    """Transitions of sequences in one piece. Gates say how many chunks, from the far end, should leave nothing of what was
    before them. Where their own transition is zero, all of it, that is taken to be so, and the transition of the sequence to be
    zero as well; elsewhere the walk goes through all chunks. In reverse, which asks for ranges only, it need not.

    This assumes that no token lengthens a state, as where ``beta |k|² <= 2``: then what is left out is what underflows in
    float32 of a state of one. Longer keys could make that grow again.
    """
    if call.gate == 0 or call.cu is not None:
        return Transitions(identity_walk(call, operands, None, into), None)
    other = torch.empty((call.N, call.v.shape[2], 2), dtype=torch.int32, device=call.v.device)
    ranges = ranges_by_gates(call, operands, reverse, other if reverse else None)
    whole = identity_walk(call, operands, other if reverse else ranges, into)
    found = proved(call, call.chunks.per, ranges, whole, None if reverse else other)
    if not reverse:
        replace(call, whole, identity_walk(call, operands, other), other)
    return Transitions(whole, found)


def ranges_by_gates(call: ChunkedCall, operands: StateOperands, reverse: bool, shorter: Tensor | None) -> Tensor:
    """The chunks beyond which gates leave nothing, ``[N, HV, 2]``; ``shorter`` as in :func:`..host.reach.ranges_of`."""
    scalar = call.gate == 1
    sums, kind = (operands.rates[:, :, 2, -1:], SUMS) if scalar else (operands.rates, DECAYS)
    return ranges_of(call, call.chunks, call.chunk, sums, kind.value, reverse, shorter)


def identity_walk(
    call: ChunkedCall, operands: StateOperands, ranges: Tensor | None, far: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Transitions of ``ranges`` of chunks of every sequence, or of all of them ``[N, HV, K, K]``, in ``far`` if given."""
    far = room(call, call.q.shape[-1]) if far is None else far
    launch_state(call, call.variant["segment_fwd"], operands, None, None, None, far, Written(), ranges)
    return far


def launch_state(
    call: ChunkedCall, stage: Stage, operands: StateOperands, y: Tensor | None, segments: Segments | None,
    start: Tensor | None, end: Tensor | None, written: Written, ranges: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch a stage over whole sequences, or over ``segments``; without values, ``y``, from the identity. ``end`` is what they
    end as; where something is written on the way through segments, what packed sequences of one segment end as.

    ``ranges`` of chunks are those of whole sequences that are gone through, if not all.
    """
    (_, T, HV, V), K, tile = call.v.shape, call.q.shape[-1], stage.tile
    width = K if y is None else V
    count, pieces, length = (call.N, Cut(0, 0, None, None), WHOLE) if segments is None else (segments.cut.count, *segments[:2])
    scores = operands.scores
    writes = any(x is not None for x in written)
    alone = segments is not None and writes
    tiles, whole = programs(1, width, 1, tile.BV), writes and segments is None and ranges is None
    many = sequences_together(call, stage, tiles, operands.read, operands.compare, y) if whole else 1
    step = programs(count, 1, many, 1)
    launch(
        stage.kernel, step * HV * tiles, call,
        operands.read, operands.compare, y, call.beta, operands.write, operands.write2,
        scores.A, scores.M, scores.A2, scores.L2, operands.rates, start, end, *written, ranges,
        pieces.owner, pieces.first, call.chunks.first, call.cu, T, pieces.per, length, call.N, HV, step, call.scale,
        *strides(operands.read), *strides(operands.compare), *strides(y), *strides(call.beta), *state_strides(start),
        **call.constants | dict(GROUP=1 if call.gate == 2 else call.group), **call.products,
        V=width, BK=tile.BK, BV=tile.BV, GATE=call.gate, BETA=call.strength, DPLR=call.dplr,
        UNIT=call.maps.unit and call.gate < 2, WHOLE=segments is None, START=start is not None,
        END=0 if end is None else 2 if alone else 1,
        KEEP=written.states is not None, OUT=written.out is not None, IDENTITY=y is None, RANGED=ranges is not None,
        MANY=many > 1,
        **stage.config,
    )  # fmt: skip


def sequences_together(call: ChunkedCall, stage: Stage, tiles: int, *operands: Tensor | None) -> int:
    """How many whole sequences a program of ``stage`` walks one after the other, with ``tiles`` programs a head."""
    if not goes_through_many(stage.kernel):
        return 1
    return together(call, call.chunk, call.v.shape[2] * tiles, call.variant.num_sms, *operands, call.beta)


def chain(
    call: ChunkedCall, segments: Segments, local: Tensor, start: Tensor | None, reverse: bool, far: Tensor
) -> Tensor:  # fmt: skip
    """Turn what segments make of zero into the states before them; return those after the last, ``far``."""
    HV, V = call.v.shape[2:]
    K, stage = call.q.shape[-1], call.variant["segment_carry"]
    transitions = segments.transitions.mT.contiguous() if reverse else segments.transitions
    launch(
        stage.kernel, call.N * HV * programs(1, V, 1, stage.tile.BV), call,
        local, transitions, start, far, segments.cut.first, segments.cut.per, HV,
        *state_strides(start),
        K=K, V=V, BK=stage.tile.BK, BV=stage.tile.BV, COLUMNS=min(stage.tile.BK, 64 if K > 128 else 128), REVERSE=reverse,
        PACKED=call.cu is not None, START=start is not None, PREC=call.variant.precision, **stage.config,
    )  # fmt: skip
    return far
