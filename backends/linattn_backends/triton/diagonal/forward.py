"""The forward pass of the chunk form, by each algorithm of :mod:`.config`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import memory_launch, resident_launch, vector_launch
from .call import ChunkedCall, DiagonalCall, Update, VectorOperands
from .config import DiagonalVariant
from .gate_launch import chunked
from .resident_launch import Operands

__all__ = ["forward", "outputs_of"]

Result = tuple[Tensor, Tensor | None]


def forward(
    call: DiagonalCall, variant: DiagonalVariant, out_dtype: torch.dtype, final: bool
) -> tuple[Tensor, Tensor | None, VectorOperands | None]:
    """Outputs, zero behind packed sequences, final states if asked for, and what the backward pass may have."""
    out = torch.empty(call.v.shape, dtype=out_dtype, device=call.v.device)
    run = chunked(call, variant, out=out)
    made = vector_launch.make_operands(run) if call.applies_gate else None
    return *outputs_of(run, made, out, final), made


def outputs_of(run: ChunkedCall, made: VectorOperands | None, out: Tensor, final: bool) -> Result:
    """Outputs, written to ``out``, and final states if asked for; ``made`` is what is made of a gate per key channel."""
    if made is not None:
        return with_vector_gate(run, made, out, final)
    return (through_memory if run.variant.algorithm == "memory" else in_registers)(run, out, final)


def through_memory(run: ChunkedCall, out: Tensor, final: bool) -> Result:
    """States first, then outputs from them."""
    call = run.call
    kept, end = memory_launch.scan_states(run, Update.of_values(run), call.start, False, final)
    memory_launch.outputs(run, call.v, kept, out, False)
    return out, end


def in_registers(run: ChunkedCall, out: Tensor, final: bool) -> Result:
    """One scan."""
    call, stage = run.call, run.variant["scan"]
    segments = resident_launch.scan_segments(run, stage, Update.of_values(run), call.start, False, call.v.shape[-1])
    operands, end = Operands(call.q, call.k, call.v), None
    if final and segments.pieces is None:
        shape = call.N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]
        end = torch.empty(shape, dtype=torch.float32, device=call.v.device)
    resident_launch.scan(run, stage, operands, out, segments, end)
    return out, end if segments.pieces is None else segments.end


def with_vector_gate(run: ChunkedCall, made: VectorOperands, out: Tensor, final: bool) -> Result:
    """One scan, or states and outputs, once the gate is applied."""
    call = run.call
    if "scan" in run.variant.stages:
        return out, vector_launch.scan(run, made, call.v, call.start, out, final)
    kept, end = memory_launch.scan_states(run, vector_launch.update(made, made.write, call.v), call.start, False, final)
    vector_launch.outputs(run, made, call.v, kept, out, False)
    return out, end
