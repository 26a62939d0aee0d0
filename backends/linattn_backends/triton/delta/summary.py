"""What tokens do to the state that enters them, ``S' = A S + b``, and the gradient of that state: scans, nothing a token."""

from __future__ import annotations

from torch import Tensor

from ..host.chunks import rows_contiguous
from .call import ChunkedCall, DeltaCall
from .scores_launch import state_operands
from .state_launch import BACKWARD, FORWARD, far_states, segments_of, transitions_of

__all__ = ["adjoint", "summary"]


def summary(given: DeltaCall) -> tuple[Tensor, Tensor]:
    """``A [N, HV, K, K]`` and ``b`` of whole sequences, in float32."""
    call = ChunkedCall.cut(given, given.forward_variant())
    operands = state_operands(call)
    segments = segments_of(call, operands)
    return transitions_of(call, operands, segments), far_states(call, operands, FORWARD, call.v, segments, None)


def adjoint(given: DeltaCall, do: Tensor, dfinal: Tensor | None) -> Tensor:
    """The gradient of the states before the tokens, from those of outputs and of the states after them."""
    do = rows_contiguous(do)
    call = ChunkedCall.cut(given, given.backward_variant(do, kept=False))
    operands = state_operands(call)
    return far_states(call, operands, BACKWARD, do, segments_of(call, operands), dfinal)
