"""The forward pass of the chunk form, by each algorithm of :mod:`.config`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import memory_launch, resident_launch, vector_launch
from .call import ChunkedCall, DiagonalCall, Update, VectorOperands
from .config import DiagonalVariant
from .gate_launch import chunked
from .resident_launch import Operands

__all__ = ["forward"]

Result = tuple[Tensor, Tensor | None, VectorOperands | None]


def forward(call: DiagonalCall, variant: DiagonalVariant, out_dtype: torch.dtype, final: bool) -> Result:
    """Outputs, final states if asked for, and what the backward pass may have."""
    run = chunked(call, variant)
    out = torch.empty(call.v.shape, dtype=out_dtype, device=call.v.device)
    algorithm = dict(memory=through_memory, resident=in_registers, vector=with_vector_gate)[variant.algorithm]
    return algorithm(run, out, final)


def through_memory(run: ChunkedCall, out: Tensor, final: bool) -> Result:
    """States first, then outputs from them."""
    call = run.call
    kept, end = memory_launch.scan_states(run, Update(call.k, call.v, call.gate, run.g, call.gv), call.start, False, final)
    memory_launch.outputs(run, call.v, kept, out, False)
    return out, end, None


def in_registers(run: ChunkedCall, out: Tensor, final: bool) -> Result:
    """One scan."""
    call, stage = run.call, run.variant["scan"]
    segments = resident_launch.scan_segments(run, stage, Update(call.k, call.v, call.gate, run.g), call.start, False)
    operands, end = Operands(call.q, call.k, call.v), None
    if final and segments.pieces is None:
        shape = call.N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1]
        end = torch.empty(shape, dtype=torch.float32, device=call.v.device)
    resident_launch.scan(run, stage, operands, out, segments, end)
    return out, end if segments.pieces is None else segments.end, None


def with_vector_gate(run: ChunkedCall, out: Tensor, final: bool) -> Result:
    """The gate applied, then one scan, or states and outputs."""
    call, made = run.call, vector_launch.make_operands(run)
    if "scan" in run.variant.stages:
        return out, vector_launch.scan(run, made, call.v, call.start, out, final), made
    kept, end = memory_launch.scan_states(run, vector_launch.update(made, made.write, call.v), call.start, False, final)
    vector_launch.outputs(run, made, call.v, kept, out, False)
    return out, end, made
