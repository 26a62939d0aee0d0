"""The chunk form of the delta families: scores of every chunk, the state carried across them, then gradients of every chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.chunks import rows_contiguous
from .call import ChunkedCall, DeltaCall, Scores, States
from .fused_launch import fused_forward
from .gradients_launch import Gradients, operand_gradients
from .scores_launch import state_operands
from .state_launch import Written, carry_backward, carry_forward, segments_of

__all__ = ["backward", "forward"]


def forward(given: DeltaCall, final: bool, keep: bool) -> tuple[Tensor, Tensor | None, Scores | None]:
    """Outputs, if asked for final states, and what the backward pass can use, if it is to ``keep`` that."""
    variant = given.forward_variant(keep)
    if "fused" in variant.stages:
        return *fused_forward(given, variant, final), None
    call = ChunkedCall.cut(given, variant)
    operands = state_operands(call)
    segments = segments_of(call, operands)
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    end = carry_forward(call, operands, segments, final, Written(out=out))
    return out, end, operands.scores if keep else None


def backward(given: DeltaCall, do: Tensor, dfinal: Tensor | None, kept: Scores | None) -> Gradients:
    """Gradients by the array's name; what the forward pass knew, but for the scores that it ``kept``, is made again."""
    do = rows_contiguous(do)
    call = ChunkedCall.cut(given, given.backward_variant(do, kept is not None))
    operands = state_operands(call, kept)
    segments = segments_of(call, operands)
    states = States.empty(call)
    carry_forward(call, operands, segments, False, Written(states.states, states.errors))
    dstart = carry_backward(call, operands, do, segments, dfinal, Written(states.dstates, states.adjoint))
    return operand_gradients(call, do, operands, states) | dict(start=dstart)
