"""The backward pass of the chunk form, by each algorithm of :mod:`.config`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..host.sums import add_heads
from ..host.tiles import programs
from ..host.variant import Stage
from . import memory_launch, resident_launch, vector_launch
from .call import ChunkedCall, DiagonalCall, Portion, Segments, Update, VectorOperands
from .config import DiagonalVariant
from .gate import NONE, SCALAR, VECTOR
from .gate_launch import chunked
from .memory_launch import NumbersAToken, Roles
from .portions import portions_of
from .resident_launch import Operands

__all__ = ["backward", "gradients_of", "states_of"]

Gradients = dict[str, Tensor | None]


class Room(NamedTuple):
    """Where gradients are written, ``[B, T, …]`` without gaps.

    Attributes:
        q, k, v: Those of the arrays, in their dtypes.
        numbers: Those of which each token and value head has one, where a stage of their own makes them; else ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    numbers: NumbersAToken | None

    @classmethod
    def of(cls, run: ChunkedCall) -> Room:
        """Room for the gradients of a whole call."""
        arrays = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (run.call.q, run.call.k, run.call.v))
        return cls(*arrays, NumbersAToken.of(run) if "scalar_gradients" in run.variant.stages else None)

    def portion(self, portion: Portion) -> Room:
        """The part of the room that is a portion's."""
        return Room(*map(portion.tokens_of, self[:3]), self.numbers and self.numbers.portion(portion))


def backward(
    call: DiagonalCall, variant: DiagonalVariant, do: Tensor, dend: Tensor | None, made: VectorOperands | None
) -> Gradients:
    """Gradients of ``q, k, v, g, gv, u`` and the initial state (``start``), each in the shape that the kernels read.

    ``made`` is what the forward pass left, if it did.
    """
    run = chunked(call, variant)
    if call.applies_gate and made is None:
        made = vector_launch.make_operands(replace(run, variant=call.forward_variant(call.v.dtype)))
    return gradients_of(run, do, dend, made)


def gradients_of(
    run: ChunkedCall, do: Tensor, dend: Tensor | None, made: VectorOperands | None, kept: Tensor | None = None
) -> Gradients:
    """As :func:`backward`, of a call cut into chunks, whose gate per key channel is applied; its states may be known."""
    if made is not None:
        return with_vector_gate(run, do, dend, made, states_of(run, made) if kept is None else kept)
    call, variant = run.call, run.variant
    if variant.algorithm == "resident":
        do = do.to(call.v.dtype)  # of wide outputs it is float32
    room, groups = Room.of(run), portions_of(call, variant)
    if len(groups) == len(groups[0]) == 1:
        found = written(run, do, dend, room)
    else:
        found = joined([in_spans(run, spans, do, dend, room) for spans in groups], 0, ("g", "start")) | dict(gv=None, u=None)
    numbers = {} if room.numbers is None else room.numbers.by_name()
    return dict(q=room.q, k=room.k, v=room.v) | found | numbers


def in_spans(run: ChunkedCall, spans: Sequence[Portion], do: Tensor, dend: Tensor | None, room: Room) -> Gradients:
    """Write the gradients of some sequences, a span of tokens after the other, and return those of the gate and the start."""
    first, *others = spans
    end, found = first.states_of(dend), []
    starts = [first.states_of(run.call.start)]
    if others:
        before = run.portion(first._replace(high=spans[-1].low), starts[0])
        length = (first.high - first.low) // run.variant.chunk
        segments = memory_launch.segment_starts(before, Update.of_values(before), starts[0], False, length)
        starts += [*segments.start.split(1)[1:], segments.end]
    for span in reversed(spans):
        found.append(written(run.portion(span, starts.pop()), span.tokens_of(do), end, room.portion(span)))
        end = found[-1]["start"]
    return joined(found[::-1], 1, ("g",)) | dict(start=end)


def joined(found: Sequence[Gradients], axis: int, names: Sequence[str]) -> Gradients:
    """Gradients of portions, one after the other."""
    given = {name: [x[name] for x in found] for name in names}
    return {name: x[0] if len(x) == 1 or x[0] is None else torch.cat(x, axis) for name, x in given.items()}


def written(run: ChunkedCall, do: Tensor, dend: Tensor | None, room: Room) -> Gradients:
    """Write the gradients of a call, or of a portion of one, and return those that ``room`` has no place for."""
    algorithm = through_memory if run.variant.algorithm == "memory" else in_registers
    return algorithm(run, do, dend, room)


def through_memory(run: ChunkedCall, do: Tensor, dend: Tensor | None, room: Room) -> Gradients:
    """States, their gradients, then all others chunk by chunk."""
    call, stages = run.call, run.variant.stages
    kept, _ = memory_launch.scan_states(run, Update.of_values(run), call.start, False, False)
    dkept, dstart = state_gradients(run, do, dend, room.v)
    scalar = stages.get("scalar_gradients")
    dg, dgv = None, None
    if scalar is not None:
        scalar_gradients(run, do, kept, dkept, room)
    else:
        sums = empty_sums(call, turns_of(run, stages["gradients"]), room)
        stage = stages["gradients"]
        if call.gate == SCALAR.value:
            dg = memory_launch.empty_gate_parts(run, stage.tile)
        elif call.gate == VECTOR.value:
            dg = empty_vector_gradient(call)
        roles = Roles(call.q, call.k, call.v, do, run.g, call.gv)
        memory_launch.gradients(run, stage, roles, kept, dkept, *sums, dg)
        if call.gate != NONE.value:
            dg = sum_of_parts(dg) if call.gate == SCALAR.value else sum_over_group(call, dg)
        add_up(call, sums, room)
    if call.gv is not None:
        dgv = torch.empty(call.v.shape, dtype=call.gv.dtype, device=call.v.device)
        roles = Roles(do, call.v, call.k, call.q, call.gv, run.g)
        memory_launch.gradients(run, stages["value_gradients"], roles, kept, dkept, None, room.v, dgv)
    return dict(g=dg, gv=dgv, u=None, start=dstart)


def scalar_gradients(run: ChunkedCall, do: Tensor, kept: Tensor, dkept: Tensor, room: Room) -> None:
    """Write gradients under a scalar gate, of 16-bit operands: a key's in place where a program has all its heads."""
    heads = together(run, run.variant["scalar_gradients"])
    sums = (room.q, room.k) if heads == run.call.group else empty_sums(run.call, heads, room)
    memory_launch.scalar_gradients(run, do, kept, dkept, *sums, room.numbers)
    if heads < run.call.group:
        add_up(run.call, sums, room)


def state_gradients(run: ChunkedCall, do: Tensor, dend: Tensor | None, dv: Tensor) -> tuple[Tensor, Tensor | None]:
    """The states' gradients at the chunks' ends and that of the initial state; ``dv`` is written, unless it has a gate."""
    call = run.call
    if "scan_dv" in run.variant.stages:
        dkept = empty_states(run)
        return dkept, scan_from_end(run, do, dend, dv, dkept)[1]
    update = Update(call.q, do, call.gate, run.g, call.gv)
    dkept, dstart = memory_launch.scan_states(run, update, dend, True, call.start is not None)
    if call.gv is None:
        memory_launch.outputs(run, do, dkept, dv, True)
    return dkept, dstart


def in_registers(run: ChunkedCall, do: Tensor, dend: Tensor | None, room: Room) -> Gradients:
    """A scan from the end for ``dv``; then one each for ``dk`` and ``dq``, or the gradients of a scalar gate's chunks."""
    call, stages = run.call, run.variant.stages
    dg, update = None, Update.of_values(run)
    if call.gate == NONE.value:
        dq, dk = sums = empty_sums(call, 1, room)
        segments, dstart = scan_from_end(run, do, dend, room.v, None)
        from_start = resident_launch.scan_segments(run, stages["scan_dq"], update, call.start, False, widest(call))
        to_dk, to_dq = Operands(call.v, do, call.q), Operands(do, call.v, call.k)
        resident_launch.scan(run, stages["scan_dk"], to_dk, dk, segments, reverse=True, transposed=True)
        resident_launch.scan(run, stages["scan_dq"], to_dq, dq, from_start, transposed=True)
        add_up(call, sums, room)
    else:
        dkept = empty_states(run)
        _, dstart = scan_from_end(run, do, dend, room.v, dkept)
        if "scan_gradients" in stages:
            sums = empty_sums(call, 1, room)
            dg = sum_of_parts(resident_launch.gradients(run, do, dkept, *sums))
            add_up(call, sums, room)
        else:
            kept, _ = memory_launch.scan_states(run, update, call.start, False, False)
            scalar_gradients(run, do, kept, dkept, room)
    return dict(g=dg, gv=None, u=None, start=dstart)


def widest(call: DiagonalCall) -> int:
    """Channels of keys or values, whichever are more."""
    return max(call.q.shape[-1], call.v.shape[-1])


def scan_from_end(
    run: ChunkedCall, do: Tensor, dend: Tensor | None, dv: Tensor, dkept: Tensor | None
) -> tuple[Segments, Tensor | None]:
    """The scan that writes ``dv``: what it scanned at once, and the initial state's gradient, if there is one.

    The states' gradients at the chunks' ends go to ``dkept``.
    """
    call, stage = run.call, run.variant["scan_dv"]
    width = widest(call) if call.gate == NONE.value else call.v.shape[-1]  # without a gate dk comes of the same segments
    segments = resident_launch.scan_segments(run, stage, Update(call.q, do, call.gate, run.g), dend, True, width)
    end = None
    if call.start is not None and segments.pieces is None:
        shape = call.N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]
        end = torch.empty(shape, dtype=torch.float32, device=do.device)
    resident_launch.scan(run, stage, Operands(call.k, call.q, do), dv, segments, end, reverse=True, kept=dkept)
    if call.start is None:
        return segments, None
    return segments, end if segments.pieces is None else segments.end


def states_of(run: ChunkedCall, made: VectorOperands) -> Tensor:
    """The states before chunks, once a gate per key channel is applied."""
    update = vector_launch.update(made, made.write, run.call.v)
    return memory_launch.scan_states(run, update, run.call.start, False, False)[0]


def with_vector_gate(run: ChunkedCall, do: Tensor, dend: Tensor | None, made: VectorOperands, kept: Tensor) -> Gradients:
    """Gradients of states, then the others: what passes between chunks, then what does inside them."""
    call = run.call
    dv = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    if "scan" in run.variant.stages:
        dkept = torch.empty_like(kept)
        dstart = vector_launch.scan(run, made, do.to(dv.dtype), dend, dv, call.start is not None, dkept, True)
    else:
        update = vector_launch.update(made, made.read, do)
        dkept, dstart = memory_launch.scan_states(run, update, dend, True, call.start is not None)
        vector_launch.outputs(run, made, do, dkept, dv, True)
    decay, stops = made.decay, made.stops
    del made  # whose other arrays are as large as q and k together
    found = vector_launch.inter(run, do, kept, dkept)
    del kept, dkept
    dg, du = vector_launch.intra(run, decay, stops, found)
    dq, dk = found.dq, found.dk
    if call.group > 1:
        dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.q, call.k))
        add_heads(call, found.dq, found.dk, dq, dk)
    du = None if du is None else sum_of_parts(du)
    return dict(q=dq, k=dk, v=dv, g=sum_over_group(call, dg), gv=None, u=du, start=dstart)


def empty_states(run: ChunkedCall) -> Tensor:
    """Room for a state a chunk: ``[chunks, HV, K, V]``."""
    call = run.call
    shape = run.chunks.count, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]
    return torch.empty(shape, dtype=call.state_dtype, device=call.v.device)


def together(run: ChunkedCall, stage: Stage) -> int:
    """How many value heads of a group a program of ``stage`` adds up, one after the other.

    So many that all are done soonest, where a multiprocessor runs two programs at once, and where what a program does but once,
    scores and the sums of its heads, takes as long as two heads.
    """
    call = run.call
    heads = run.chunks.count * call.v.shape[2] * programs(call.q.shape[-1], 1, stage.tile.BK, 1)
    at_once = 2 * run.variant.num_sms
    return min((n for n in range(1, call.group + 1) if call.group % n == 0), key=lambda n: -(-heads // (n * at_once)) * (n + 2))


def turns_of(run: ChunkedCall, stage: Stage) -> int:
    """How many of a group's value heads add their ``dq, dk`` to one sum, a launch of ``stage`` after the other.

    As few as leave the sums no larger than the largest input; one, if too few programs would run at once.
    """
    call = run.call
    HV, K = call.v.shape[2], call.q.shape[-1]
    tiles, largest = programs(K, 1, stage.tile.BK, 1), max(x.numel() * x.element_size() for x in (call.q, call.v))
    for n in range(2, call.group + 1):
        if call.group % n == 0 and 4 * call.v.shape[0] * call.v.shape[1] * (HV // n) * K <= largest:
            return n if run.chunks.count * (HV // n) * tiles >= 4 * run.variant.num_sms else 1
    return call.group


def empty_sums(call: DiagonalCall, heads: int, room: Room) -> tuple[Tensor, Tensor]:
    """Where ``dq, dk`` are summed over ``heads`` value heads: in float32, but in place where no two share a query/key head."""
    if call.group == 1:
        return room.q, room.k
    B, T, HV = call.v.shape[:3]
    shape = B, T, HV // heads, call.q.shape[-1]
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.v.device)
    return new(shape), new(shape)


def add_up(call: DiagonalCall, sums: tuple[Tensor, Tensor], room: Room) -> None:
    """Write ``dq, dk``, unless they are the sums themselves."""
    if call.group > 1:
        add_heads(call, *sums, room.q, room.k)


def sum_of_parts(parts: Tensor) -> Tensor:
    """A gradient from those of the tiles of key channels, or of the entries of a batch."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def sum_over_group(call: DiagonalCall, dg: Tensor) -> Tensor:
    """A vector gate's gradient, summed over the value heads that share it."""
    B, T, H, K = call.q.shape
    return dg if call.g.shape[2] == call.v.shape[2] else dg.view(B, T, H, call.group, K).sum(3)


def empty_vector_gradient(call: DiagonalCall) -> Tensor:
    """Room for a vector gate's gradient of each value head."""
    dtype = call.g.dtype if call.g.shape[2] == call.v.shape[2] else torch.float32
    return torch.empty((*call.v.shape[:3], call.q.shape[-1]), dtype=dtype, device=call.v.device)
