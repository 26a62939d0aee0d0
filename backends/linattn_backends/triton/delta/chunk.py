"""The chunk form of the delta families: scores of every chunk, the state carried across them, then gradients of every chunk."""

from __future__ import annotations

from torch import Tensor

from ..host.chunks import rows_contiguous
from .call import ChunkedCall, DeltaCall, Kept, StateOperands, States
from .fused_launch import empty_outputs, fused_forward, fused_state_gradients, fused_states
from .gradients_launch import Gradients, operand_gradients, vector_gradients
from .scores_launch import state_operands
from .state_launch import Segments, Written, carry_backward, carry_forward, segments_of

__all__ = ["backward", "forward", "state_gradients_of", "states_of"]


def forward(given: DeltaCall, final: bool, keep: int) -> tuple[Tensor, Tensor | None, Kept | None]:
    """Outputs, zero behind packed sequences, if asked for final states, and what the backward pass can use, if it is to
    ``keep`` that.
    """
    variant = given.forward_variant(keep)
    if "fused" in variant.stages:
        return fused_forward(given, variant, final, bool(keep))
    out = None if given.cu is None else empty_outputs(given)
    call = ChunkedCall.cut(given, variant, out=out)
    operands = state_operands(call)
    segments = segments_of(call, operands)
    out = empty_outputs(given) if out is None else out  # nothing is written to it before, and scores ask for more memory
    end = carry_forward(call, operands, segments, final, Written(out=out))
    if not keep:
        return out, end, None
    if given.keeps_states(keep):  # but its arrays do not lie as that kernel takes them
        states, errors = states_of(call, operands, segments)
        return out, end, Kept(states=states, errors=errors)
    return out, end, Kept.of(operands.scores)


def backward(given: DeltaCall, do: Tensor, dfinal: Tensor | None, kept: Kept) -> Gradients:
    """Gradients by the array's name; what the forward pass knew, but for what it ``kept``, is made again."""
    do = rows_contiguous(do)
    scores = kept.scores
    variant = given.backward_variant(do, kept.what)
    call = ChunkedCall.cut(given, variant, scores.lengths if scores else None)
    if "fused_bwd" in variant.stages:
        states, errors = kept.states, kept.errors
        if states is None or errors is None:
            states, errors = fused_states(call)
        dstates, adjoint, dstart, log_decays = fused_state_gradients(call, do, dfinal)
        found = vector_gradients(call, do, log_decays, None, States(states, dstates, errors, adjoint))
        return found | dict(start=dstart)
    operands = state_operands(call, scores)
    segments = segments_of(call, operands)
    if kept.states is None or kept.errors is None:
        states, errors = states_of(call, operands, segments)
    else:
        states, errors = kept.states, kept.errors
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
