"""Launches of :mod:`.gate`: a call cut into chunks, its gate summed."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..host.chunks import Cut, cut, places, strides
from ..host.tails import zero_behind
from ..host.tiles import programs
from ..runtime.launch import launch
from .call import ChunkedCall, DiagonalCall
from .config import DiagonalVariant
from .gate import LEVELS, NONE, SCALAR

__all__ = ["chunked", "sum_matrices"]

HEADS = 16
"""Heads whose sums one program makes."""


def chunked(call: DiagonalCall, variant: DiagonalVariant, sums: Tensor | None = None, out: Tensor | None = None) -> ChunkedCall:
    """The call as the kernels of ``variant`` read it; a scalar gate's running ``sums`` may be known.

    Behind packed sequences, rows of ``out`` become zeros.
    """
    if call.gate == NONE.value and variant.algorithm == "resident":
        zero_behind(call, call.cu, out)
        return ChunkedCall(call, variant, None, None)
    chunks = cut(call, variant.chunk, out=out)
    g, late = call.g, None
    if call.gate == SCALAR.value:
        g, late = running_sums(call, variant, chunks) if sums is None else (sums, None)
    return ChunkedCall(call, variant, chunks, g, late)


def running_sums(call: DiagonalCall, variant: DiagonalVariant, chunks: Cut) -> tuple[Tensor, Tensor | None]:
    """A scalar gate's sums from the start of each chunk, ``[B, T, HV]``, which lie as ``[HV, B, T]``.

    And, for gradients of values with weights, those less the logarithms of the weights.
    """
    B, T, HV = call.g.shape
    exact = torch.float64 if variant.split == 3 else torch.float32  # differences of sums must be right to a rounding
    weighted = call.weight is not None and "scalar_gradients" in variant.stages
    new = functools.partial(torch.empty, (HV, B, T), dtype=exact, device=call.g.device)
    sums, late = new().permute(1, 2, 0), new().permute(1, 2, 0) if weighted else None
    stage, weight = variant["running_sums"], call.weight if weighted else None
    launch(
        stage.kernel, chunks.count * programs(HV, 1, HEADS, 1), call,
        call.g, weight, sums, late, *places(call, chunks), *strides(call.g), *strides(weight), *strides(sums),
        C=variant.chunk, BH=HEADS, WEIGHTED=weighted, PACKED=call.cu is not None, num_warps=stage.tile.warps,
    )  # fmt: skip
    return sums, late


def sum_matrices(run: ChunkedCall) -> Tensor:
    """The matrices that sum over a chunk's tokens, in the order that :mod:`.gate` names: ``[matrices, C, C]``."""
    call, C = run.call, run.variant.chunk
    stage = run.variant["sum_matrices"]
    count = LEVELS.value + 2 * (C.bit_length() - 1)
    out = torch.empty((count, C, C), dtype=torch.bfloat16, device=call.q.device)
    launch(stage.kernel, count, call, out, C=C, EXCLUSIVE=call.u is not None, num_warps=stage.tile.warps)
    return out
