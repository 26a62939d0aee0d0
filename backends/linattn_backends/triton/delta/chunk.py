"""The chunk form of the delta families: scores of every chunk, the state carried across them, then gradients of every chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.chunks import rows_contiguous
from .call import ChunkedCall, DeltaCall, Scores, StateOperands, States
from .fused_launch import fused_forward
from .gradients_launch import Gradients, operand_gradients
from .scores_launch import state_operands
from .state_launch import Segments, Written, carry_backward, carry_forward, segments_of

__all__ = ["backward", "forward", "outputs_of", "state_gradients_of", "states_of"]


def forward(given: DeltaCall, final: bool, keep: bool) -> tuple[Tensor, Tensor | None, Scores | None]:
    """Outputs, if asked for final states, and what the backward pass can use, if it is to ``keep`` that."""
    variant = given.forward_variant(keep)
    if "fused" in variant.stages:
        return *fused_forward(given, variant, final), None
    call = ChunkedCall.cut(given, variant)
    operands = state_operands(call)
    return *outputs_of(call, operands, segments_of(call, operands), final), operands.scores if keep else None


def outputs_of(
    call: ChunkedCall, operands: StateOperands, segments: Segments | None, final: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs, and if asked for final states, of what is made of the chunks."""
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    return out, carry_forward(call, operands, segments, final, Written(out=out))


def backward(given: DeltaCall, do: Tensor, dfinal: Tensor | None, kept: Scores | None) -> Gradients:
    """Gradients by the array's name; what the forward pass knew, but for the scores that it ``kept``, is made again."""
    do = rows_contiguous(do)
    variant = given.backward_variant(do, kept is not None)
    call = ChunkedCall.cut(given, variant, kept.lengths if kept else None)
    operands = state_operands(call, kept)
    segments = segments_of(call, operands)
    states, errors = states_of(call, operands, segments)
    dstates, adjoint, dstart = state_gradients_of(call, operands, segments, do, dfinal)
    return operand_gradients(call, do, operands, States(states, dstates, errors, adjoint)) | dict(start=dstart)


def states_of(call: ChunkedCall, operands: StateOperands, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """The states before chunks, and errors."""
    states, errors = States.empty(call)
    carry_forward(call, operands, segments, False, Written(states, errors))
    return states, errors


def state_gradients_of(
    call: ChunkedCall, operands: StateOperands, segments: Segments | None, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of the states after chunks, the errors' adjoint, and the initial states' gradient if there are any."""
    dstates, adjoint = States.empty(call)
    dstart = carry_backward(call, operands, do, segments, dfinal, Written(dstates, adjoint))
    return dstates, adjoint, dstart
