"""The chunk form of the delta families in stages, between which ranks that share a sequence tell each other what they found.

What is made of the chunks before any state is known, scores and decayed rows, serves the summary ``S' = A S + b``, the outputs,
the gradient of the state before the tokens, and every other gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..host.chunks import rows_contiguous
from ..host.lengths import NO_LENGTHS, Lengths, kept_lengths
from ..host.maps import GateMap, Maps
from ..host.parts import Part
from ..host.spans import Message, finish_message
from ..host.stages import Arrays, Core
from ..host.tails import zero_behind
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .call import ANYTHING, ChunkedCall, DeltaCall, Scores, StateOperands, States
from .chunk import state_gradients_of, states_of
from .fused_launch import empty_outputs
from .gradients_launch import operand_gradients
from .scores_launch import state_operands
from .state_launch import (
    BACKWARD,
    FORWARD,
    Segments,
    Written,
    carry_forward,
    far_states,
    local_states,
    segments_of,
    transitions_of,
    whole_transitions,
)

__all__ = ["DELTA", "Options"]


class Options(NamedTuple):
    """What is static of a call, and the offsets of packed sequences."""

    cu: Tensor | None
    scale: float
    chunk: int
    kind: int
    number: float
    unit: bool


class Made(NamedTuple):
    """What is made before any state is known; ``None`` where a call has no such array.

    Attributes:
        A, M, A2, L2, rates, uq, uk: As in :class:`.call.Scores`.
        transitions, local: What segments do to the state before them, and make of zero, of sequences that are cut into some.
        read, compare, write, write2, decay, log_decays: Of a vector gate, as in :class:`.call.StateOperands`.
    """

    A: Tensor
    M: Tensor
    A2: Tensor | None
    L2: Tensor | None
    rates: Tensor | None
    uq: Tensor | None
    uk: Tensor | None
    transitions: Tensor | None
    local: Tensor | None
    read: Tensor | None
    compare: Tensor | None
    write: Tensor | None
    write2: Tensor | None
    decay: Tensor | None
    log_decays: Tensor | None

    @classmethod
    def of(cls, call: ChunkedCall, operands: StateOperands, segments: Segments | None) -> Made:
        """Of operands, those that are no inputs."""
        rows = (None,) * 6
        if call.gate == 2:
            rows = operands.read, operands.compare, operands.write, operands.write2, operands.rates, operands.log_decays
        own = (None, None) if segments is None else (segments.transitions, segments.local)
        return cls(*operands.scores, *own, *rows)

    def operands(self, call: ChunkedCall) -> StateOperands:
        """What carries the state of ``call``."""
        scores = Scores(*self[:7])
        if call.gate < 2:
            return StateOperands(call.q, call.k, None, None, scores, scores.rates, None)
        return StateOperands(self.read, self.compare, self.write, self.write2, scores, self.decay, self.log_decays)

    def cut(self, part: Part) -> Made:
        """Of one sequence's tokens."""
        by_chunk = dict(
            A=self.A, M=self.M, A2=self.A2, L2=self.L2, rates=self.rates, decay=self.decay, log_decays=self.log_decays
        )
        by_token = dict(read=self.read, compare=self.compare, write=self.write, write2=self.write2, uq=self.uq, uk=self.uk)
        return Made(**part.of_chunks(by_chunk), **part.of_tokens(by_token), transitions=None, local=None)


KEPT = 9
"""Of what is :class:`Made`, the arrays that the backward pass is given."""


def given_of(inputs: Arrays, options: Options, start: Tensor | None) -> DeltaCall:
    """The call."""
    *operands, A_log, bias = inputs
    maps = Maps(GateMap(A_log, bias, options.kind, options.number), 0.0, options.unit)
    return DeltaCall.of(*operands, start, options.cu, options.scale, options.chunk, maps)


def forward_call(given: DeltaCall, lengths: Lengths | None = NO_LENGTHS, out: Tensor | None = None) -> ChunkedCall:
    """The call with the kernels of the forward pass; behind packed sequences, rows of ``out`` become zeros."""
    return ChunkedCall.cut(given, given.forward_variant(ANYTHING, staged=True), lengths, out)


def backward_call(given: DeltaCall, do: Tensor | None, lengths: Lengths | None = NO_LENGTHS) -> ChunkedCall:
    """The call with the kernels of the backward pass, from the outputs' gradient, if that is there yet."""
    return ChunkedCall.cut(given, given.backward_variant(do, kept="scores", staged=True), lengths)


def taken(args: tuple[Any, ...]) -> tuple[Made, Arrays, Options]:
    """What is made, inputs and options, of the arguments of a stage."""
    n = len(Made._fields)
    return Made(*args[:n]), args[n : n + 9], Options(*args[n + 9 :])


def begin(inputs: Arrays, options: Options, kept: Arrays | None = None) -> Arrays:
    """What is made before any state is known; of what the forward pass kept, the rest."""
    g = inputs[3]
    if kept and (g is None or g.dim() < 4):  # without a vector gate there is nothing else
        return *kept, *(None,) * (len(Made._fields) - KEPT)
    return made_of(*(kept or (None,) * KEPT), *inputs, *options)


@recorded
@precompiled()
def made_of(*args: Any) -> Arrays:
    """``KEPT`` arrays, inputs, options."""
    kept, inputs, options = args[:KEPT], args[KEPT : KEPT + 9], Options(*args[KEPT + 9 :])
    given, scores = given_of(inputs, options, None), None if kept[0] is None else Scores(*kept[:7])
    call = backward_call(given, None, scores.lengths) if scores else forward_call(given, None)
    operands = state_operands(call, scores)
    segments = segments_of(call, operands, *kept[7:])
    if segments and segments.local is None:
        segments = segments._replace(local=local_states(call, operands, FORWARD, call.v, segments))
    return tuple(Made.of(call, operands, segments))


@recorded
@precompiled()
def summary(*args: Any) -> tuple[Tensor, Tensor]:
    """What is made, inputs, options."""
    made, inputs, options = taken(args)
    call = forward_call(given_of(inputs, options, None))
    operands = made.operands(call)
    segments = segments_of(call, operands, made.transitions, made.local)
    A, ranges = transitions_of(call, operands, segments)
    return A, far_states(call, operands, FORWARD, call.v, segments, None, ranges)


@recorded
@precompiled()
def opened(digest: Tensor, *args: Any) -> Arrays:
    """Inputs, options."""
    made = made_of(*(None,) * KEPT, *args)
    return *made, message(digest, *made, *args)


@recorded
@precompiled()
def message(digest: Tensor, *args: Any) -> Tensor:
    """What is made, inputs, options."""
    made, inputs, options = taken(args)
    call = forward_call(given_of(inputs, options, None))
    operands, layout = made.operands(call), layout_of(inputs)
    segments = segments_of(call, operands, made.transitions, made.local)
    found = layout.empty(call.v.device)
    ranges = transitions_of(call, operands, segments, layout.A(found)).ranges
    far_states(call, operands, FORWARD, call.v, segments, None, ranges, layout.b(found))
    return finish_message(call, layout, found, digest)


def layout_of(inputs: Arrays) -> Message:
    """How a message is laid out."""
    q, _, v, *_ = inputs
    return Message.of(v, q.shape[-1], True, 0, False)


@recorded
@precompiled()
def finish(start: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
    """The states before the tokens; what is made, inputs, options, and whether final states are asked for."""
    made, inputs, options = taken(args[:-1])
    given = given_of(inputs, options, start)
    out = empty_outputs(given)
    call = forward_call(given, out=out)
    operands = made.operands(call)
    segments = segments_of(call, operands, made.transitions, made.local)
    return out, carry_forward(call, operands, segments, args[-1], Written(out=out))


@recorded
@precompiled()
def adjoint(do: Tensor, dfinal: Tensor | None, *args: Any) -> Tensor:
    """Gradients of outputs and final states; what is made, inputs, options."""
    made, inputs, options = taken(args)
    do = rows_contiguous(do)
    call = backward_call(given_of(inputs, options, None), do)
    operands = made.operands(call)
    segments = segments_of(call, operands, made.transitions)
    ranges = None if segments else whole_transitions(call, operands, reverse=True).ranges
    return far_states(call, operands, BACKWARD, do, segments, dfinal, ranges)


@recorded
@precompiled()
def recall(start: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """The states before the tokens; what is made, inputs, options."""
    made, inputs, options = taken(args)
    call = backward_call(given_of(inputs, options, start), None)
    operands = made.operands(call)
    return states_of(call, operands, segments_of(call, operands, made.transitions, made.local))


def gradients(
    start: Tensor, do: Tensor, dfinal: Tensor | None, made: list[Tensor | None], inputs: Arrays, options: Options
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs, and of the states before the tokens; ``made`` is emptied."""
    *held, states, errors = made
    made.clear()
    given = Made(*held)
    del held
    dstates, adjoint, dstart = state_gradients(start, do, dfinal, *given, *inputs, *options)
    given = given._replace(read=None, compare=None, write=None)  # as large as q, k and v together
    return [*input_gradients(do, *States(states, dstates, errors, adjoint), *given, *inputs, *options), dstart]


@recorded
@precompiled()
def state_gradients(
    start: Tensor, do: Tensor, dfinal: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The states before the tokens, gradients of outputs and final states; what is made, inputs, options."""
    made, inputs, options = taken(args)
    do = rows_contiguous(do)
    call = backward_call(given_of(inputs, options, start), do)
    operands = made.operands(call)
    segments = segments_of(call, operands, made.transitions, made.local)
    dstates, adjoint, dstart = state_gradients_of(call, operands, segments, do, dfinal)
    return dstates, adjoint, dstart.to(start.dtype)


@recorded
@precompiled()
def input_gradients(do: Tensor, *args: Any) -> list[Tensor]:
    """The outputs' gradient, states and their gradients; what is made, inputs, options."""
    count = len(States._fields)
    states, (made, inputs, options) = States(*args[:count]), taken(args[count:])
    do = rows_contiguous(do)
    call = backward_call(given_of(inputs, options, None), do, kept_lengths(made.uq, made.uk))
    found = operand_gradients(call, do, made.operands(call), states)
    zero_behind(call, options.cu, *map(found.get, ("q", "k", "v", "g", "beta", "a", "b")))
    names = ("q", "k", "v", "g", "beta", "a", "b", "A_log", "bias")
    return [found[name].to(x.dtype) for name, x in zip(names, inputs, strict=True) if x is not None]


DELTA = Core(
    begin=begin,
    bare=begin,
    opened=opened,
    message=message,
    layout_of=layout_of,
    summary=summary,
    finish=finish,
    adjoint=adjoint,
    recall=recall,
    gradients=gradients,
    made=Made,
    given_of=given_of,
    kept=KEPT,
    parameters=2,
)
"""The delta families and ``dplr``, whose parameters are those of a raw gate."""
