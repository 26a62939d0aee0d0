"""The backward pass of the chunk form, by each algorithm of :mod:`.config`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..host.chunks import over_group
from ..host.tiles import programs
from ..host.variant import Stage
from . import memory_launch, resident_launch, vector_launch
from .call import ChunkedCall, DiagonalCall, Segments, Update, VectorOperands
from .config import DiagonalVariant
from .gate import NONE, SCALAR, VECTOR
from .gate_launch import chunked
from .memory_launch import Roles
from .resident_launch import Operands

__all__ = ["backward", "gradients_of", "states_of"]

Gradients = dict[str, Tensor | None]


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
    if run.variant.algorithm == "memory":
        return through_memory(run, do, dend)
    return in_registers(run, do.to(run.call.v.dtype), dend)  # of wide outputs it is float32


def through_memory(run: ChunkedCall, do: Tensor, dend: Tensor | None) -> Gradients:
    """States, their gradients, then all others chunk by chunk."""
    call, stages = run.call, run.variant.stages
    kept, _ = memory_launch.scan_states(run, Update(call.k, call.v, call.gate, run.g, call.gv), call.start, False, False)
    dkept, dstart, dv = state_gradients(run, do, dend)
    scalar = stages.get("scalar_gradients")
    dq, dk = empty_sums(call, turns_of(run, stages["gradients"]) if scalar is None else together(run, scalar))
    dg = dgv = None
    if scalar is not None:
        dg = sum_of_parts(memory_launch.scalar_gradients(run, do, kept, dkept, dq, dk))
    else:
        stage = stages["gradients"]
        if call.gate == SCALAR.value:
            dg = memory_launch.empty_gate_parts(run, stage.tile)
        elif call.gate == VECTOR.value:
            dg = empty_vector_gradient(call)
        roles = Roles(call.q, call.k, call.v, do, run.g, call.gv)
        memory_launch.gradients(run, stage, roles, kept, dkept, dq, dk, dg)
        if call.gate != NONE.value:
            dg = sum_of_parts(dg) if call.gate == SCALAR.value else sum_over_group(call, dg)
    if call.gv is not None:
        dgv = torch.empty(call.v.shape, dtype=call.gv.dtype, device=call.v.device)
        roles = Roles(do, call.v, call.k, call.q, call.gv, run.g)
        memory_launch.gradients(run, stages["value_gradients"], roles, kept, dkept, None, dv, dgv)
    return dict(q=over_group(call.q, dq), k=over_group(call.q, dk), v=dv, g=dg, gv=dgv, u=None, start=dstart)


def state_gradients(run: ChunkedCall, do: Tensor, dend: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The states' gradients at the chunks' ends, that of the initial state, and ``dv`` unless it has a gate."""
    call = run.call
    if "scan_dv" in run.variant.stages:
        dkept = empty_states(run)
        _, dstart, dv = scan_from_end(run, do, dend, dkept)
        return dkept, dstart, dv
    update = Update(call.q, do, call.gate, run.g, call.gv)
    dkept, dstart = memory_launch.scan_states(run, update, dend, True, call.start is not None)
    dv = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if call.gv is None:
        memory_launch.outputs(run, do, dkept, dv, True)
    return dkept, dstart, dv


def in_registers(run: ChunkedCall, do: Tensor, dend: Tensor | None) -> Gradients:
    """A scan from the end for ``dv``; then one each for ``dk`` and ``dq``, or the gradients of a scalar gate's chunks."""
    call, stages = run.call, run.variant.stages
    heads = together(run, stages["scalar_gradients"]) if "scalar_gradients" in stages else 1
    (dq, dk), dg, update = empty_sums(call, heads), None, Update(call.k, call.v, call.gate, run.g)
    if call.gate == NONE.value:
        segments, dstart, dv = scan_from_end(run, do, dend, None)
        from_start = resident_launch.scan_segments(run, stages["scan_dq"], update, call.start, False)
        to_dk, to_dq = Operands(call.v, do, call.q), Operands(do, call.v, call.k)
        resident_launch.scan(run, stages["scan_dk"], to_dk, dk, segments, reverse=True, transposed=True)
        resident_launch.scan(run, stages["scan_dq"], to_dq, dq, from_start, transposed=True)
    else:
        dkept = empty_states(run)
        _, dstart, dv = scan_from_end(run, do, dend, dkept)
        if "scan_gradients" in stages:
            parts = resident_launch.gradients(run, do, dkept, dq, dk)
        else:
            kept, _ = memory_launch.scan_states(run, update, call.start, False, False)
            parts = memory_launch.scalar_gradients(run, do, kept, dkept, dq, dk)
        dg = sum_of_parts(parts)
    return dict(q=over_group(call.q, dq), k=over_group(call.q, dk), v=dv, g=dg, gv=None, u=None, start=dstart)


def scan_from_end(
    run: ChunkedCall, do: Tensor, dend: Tensor | None, dkept: Tensor | None
) -> tuple[Segments, Tensor | None, Tensor]:
    """The scan that gives ``dv``: what it scanned at once, the initial state's gradient, if there is one, and ``dv``.

    The states' gradients at the chunks' ends go to ``dkept``.
    """
    call, stage = run.call, run.variant["scan_dv"]
    new = functools.partial(torch.empty, device=do.device)
    segments = resident_launch.scan_segments(run, stage, Update(call.q, do, call.gate, run.g), dend, True)
    end = None
    if call.start is not None and segments.pieces is None:
        end = new((call.N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]), dtype=torch.float32)
    dv = new(call.v.shape, dtype=call.v.dtype)
    resident_launch.scan(run, stage, Operands(call.k, call.q, do), dv, segments, end, reverse=True, kept=dkept)
    return segments, end if segments.pieces is None else segments.end, dv


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
    dq, dk, du = over_group(call.q, found.dq), over_group(call.q, found.dk), None if du is None else du.sum(0)
    return dict(q=dq, k=dk, v=dv, g=sum_over_group(call, dg), gv=None, u=du, start=dstart)


def empty_states(run: ChunkedCall) -> Tensor:
    """Room for a state a chunk: ``[chunks, HV, K, V]``."""
    call = run.call
    shape = run.chunks.count, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]
    return torch.empty(shape, dtype=call.state_dtype, device=call.v.device)


def together(run: ChunkedCall, stage: Stage) -> int:
    """How many value heads of a group a program of ``stage`` adds up: as many as leave four programs a multiprocessor."""
    call = run.call
    chunks = run.chunks.count * call.v.shape[2] * programs(call.q.shape[-1], 1, stage.tile.BK, 1)
    enough = [n for n in range(1, call.group + 1) if call.group % n == 0 and chunks // n >= 4 * run.variant.num_sms]
    return max(enough, default=1)


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


def empty_sums(call: DiagonalCall, heads: int) -> tuple[Tensor, Tensor]:
    """Room for ``dq, dk``: sums over ``heads`` value heads, in float32 where they share a query/key head."""
    B, T, HV = call.v.shape[:3]
    shape = B, T, HV // heads, call.q.shape[-1]
    new = functools.partial(torch.empty, dtype=call.q.dtype if call.group == 1 else torch.float32, device=call.v.device)
    return new(shape), new(shape)


def sum_of_parts(dg: Tensor) -> Tensor:
    """A scalar gate's gradient from those of the tiles of key channels."""
    return dg[0] if dg.shape[0] == 1 else dg.sum(0)


def sum_over_group(call: DiagonalCall, dg: Tensor) -> Tensor:
    """A vector gate's gradient, summed over the value heads that share it."""
    B, T, H, K = call.q.shape
    return dg if call.g.shape[2] == call.v.shape[2] else dg.view(B, T, H, call.group, K).sum(3)


def empty_vector_gradient(call: DiagonalCall) -> Tensor:
    """Room for a vector gate's gradient of each value head."""
    dtype = call.g.dtype if call.g.shape[2] == call.v.shape[2] else torch.float32
    return torch.empty((*call.v.shape[:3], call.q.shape[-1]), dtype=dtype, device=call.v.device)
