"""What tokens do to the state that enters them, ``S' = A S + b``, and the gradient of that state: scans, nothing a token."""

from __future__ import annotations

from torch import Tensor

from ..host.chunks import rows_contiguous
from ..host.maps import GateMap, Maps
from ..runtime.replay import recorded
from .call import ChunkedCall, DeltaCall
from .scores_launch import state_operands
from .state_launch import BACKWARD, FORWARD, far_states, segments_of, transitions_of

__all__ = ["adjoint", "summary"]


@recorded
def summary(
    k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    A_log: Tensor | None, bias: Tensor | None, kind: int, number: float, unit: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``A [N, HV, K, K]`` and ``b`` of whole sequences, in float32."""
    maps = Maps(GateMap(A_log, bias, kind, number), 0.0, unit)
    given = DeltaCall.of(k, k, v, g, beta, a, b, None, None, 1.0, 0, maps)
    call = ChunkedCall.cut(given, given.forward_variant(keep=True))
    operands = state_operands(call)
    segments = segments_of(call, operands)
    return transitions_of(call, operands, segments), far_states(call, operands, FORWARD, call.v, segments, None)


@recorded
def adjoint(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    a: Tensor | None, b: Tensor | None, A_log: Tensor | None, bias: Tensor | None, scale: float, chunk: int,
    kind: int, number: float, unit: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the states before the tokens, from those of outputs and of the states after them."""
    maps = Maps(GateMap(A_log, bias, kind, number), 0.0, unit)
    given, do = DeltaCall.of(q, k, v, g, beta, a, b, None, None, scale, chunk, maps), rows_contiguous(do)
    call = ChunkedCall.cut(given, given.backward_variant(do, kept=False))
    operands = state_operands(call)
    return far_states(call, operands, BACKWARD, do, segments_of(call, operands), dfinal)
