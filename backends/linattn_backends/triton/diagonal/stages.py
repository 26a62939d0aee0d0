"""The chunk form under a diagonal gate in stages, between which ranks that share a sequence tell each other what they found.

What tokens do to the state is ``S' = A ∘ S + b``: ``A`` the exponential of the gates' sums, ``b`` the state that they leave of
zero. In reverse the same scan, of queries and ``do``, gives the gradient of the state before them. What is made of the gate
before any state is known serves these scans, the outputs and every gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.chunks import rows_contiguous
from ..host.parts import Part
from ..host.spans import Message, finish_message
from ..host.stages import Arrays, Core
from ..host.tails import zero_behind
from ..host.tiles import programs
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from . import vector_launch
from .backward import gradients_of, states_of
from .call import ChunkedCall, DiagonalCall, Update, VectorOperands
from .forward import outputs_of
from .gate_launch import chunked
from .memory_launch import far_states

__all__ = ["DIAGONAL", "Options"]

PROGRAMS = 4
"""Scans that a multiprocessor runs at once: each waits for memory most of the time."""


class Options(NamedTuple):
    """What is static of a call, and the offsets of packed sequences."""

    cu: Tensor | None
    scale: float
    chunk: int


class Made(NamedTuple):
    """What is made before any state is known; ``None`` where a call has no such array.

    Attributes:
        A, read, write, decay, stops: Of a gate per key channel, as in :class:`.call.VectorOperands`.
        sums: The running sums of a scalar gate, ``[B, T, HV]``.
    """

    A: Tensor | None
    read: Tensor | None
    write: Tensor | None
    decay: Tensor | None
    stops: Tensor | None
    sums: Tensor | None

    @property
    def operands(self) -> VectorOperands | None:
        """What is made of a gate per key channel, if anything."""
        return None if self.A is None else VectorOperands(*self[:5])

    def cut(self, part: Part) -> Made:
        """Of one sequence's tokens."""
        by_chunk = part.of_chunks(dict(A=self.A, decay=self.decay, stops=self.stops))
        return Made(**by_chunk, **part.of_tokens(dict(read=self.read, write=self.write, sums=self.sums)))


KEPT = len(Made._fields)
"""Of what is :class:`Made`, the arrays that the backward pass is given."""


def given_of(inputs: Arrays, options: Options, start: Tensor | None) -> DiagonalCall:
    """The call."""
    return DiagonalCall.of(*inputs, start, *options)


def taken(args: tuple[Any, ...]) -> tuple[Made, Arrays, Options]:
    """What is made, inputs and options, of the arguments of a stage."""
    return Made(*args[:KEPT]), args[KEPT : KEPT + 6], Options(*args[KEPT + 6 :])


def begin(inputs: Arrays, options: Options, kept: Arrays | None = None) -> Arrays:
    """What is made before any state is known, nothing without a gate; the forward pass keeps all of it."""
    if inputs[3] is None:
        return nothing_made(inputs, options)
    return kept or made_of(*inputs, *options)


def nothing_made(inputs: Arrays, options: Options) -> Arrays:
    """Nothing: for a summary alone the gate is applied on the way."""
    return (None,) * KEPT


@recorded
@precompiled()
def made_of(*args: Any) -> Arrays:
    """Inputs, options."""
    call = given_of(args[:6], Options(*args[6:]), None)
    run = chunked(call, call.forward_variant(call.v.dtype))
    operands = vector_launch.make_operands(run) if call.applies_gate else (None,) * 5
    return *operands, None if run.g is call.g else run.g


@recorded
@precompiled()
def summary(*args: Any) -> tuple[Tensor, Tensor]:
    """What is made, inputs, options."""
    call, (b, decay, value_decay) = walked(args)
    N, HV = b.shape[:2]
    if decay is None:
        return torch.ones((N, HV), dtype=torch.float32, device=b.device), b
    A = decay.view(N, -1, *decay.shape[1:]).sum(1)
    if call.gate == 1:
        A = A[..., 0]
    if value_decay is not None:
        A = torch.cat((A, value_decay.view(N, -1, *value_decay.shape[1:]).sum(1)), -1)
    return A.exp2(), b


def walked(
    args: tuple[Any, ...], end: Tensor | None = None
) -> tuple[DiagonalCall, tuple[Tensor, Tensor | None, Tensor | None]]:
    """What is made, inputs, options: the call, the states that sequences make of zero, in ``end`` if given, and gates' sums."""
    made, inputs, options = taken(args)
    call = given_of(inputs, options, None)
    run = chunked(call, call.forward_variant(call.v.dtype), made.sums)
    update = Update(call.k, call.v, call.gate, run.g, call.gv)
    if made.operands is not None:
        update = vector_launch.update(made.operands, made.write, call.v)
    return call, scanned(run, update, None, reverse=False, end=end)


@recorded
@precompiled()
def opened(digest: Tensor, *args: Any) -> Arrays:
    """Inputs, options."""
    made = begin(args[:6], Options(*args[6:]))
    return *made, message(digest, *made, *args)


@recorded
@precompiled()
def message(digest: Tensor, *args: Any) -> Tensor:
    """What is made, inputs, options."""
    layout = layout_of(taken(args)[1])
    found = layout.empty(digest.device)
    call, (_, *sums) = walked(args, layout.b(found))
    return finish_message(call, layout, found, digest, tuple(sums))


def layout_of(inputs: Arrays) -> Message:
    """How a message is laid out."""
    q, _, v, g, gv, _ = inputs
    return Message.of(v, q.shape[-1], False, 0 if g is None else g.dim() - 2, gv is not None)


@recorded
@precompiled()
def finish(start: Tensor, *args: Any) -> tuple[Tensor, Tensor | None]:
    """The states before the tokens; what is made, inputs, options, and whether final states are asked for."""
    made, inputs, options = taken(args[:-1])
    call = given_of(inputs, options, start)
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    run = chunked(call, call.forward_variant(call.v.dtype), made.sums, out)
    return outputs_of(run, made.operands, out, args[-1])


@recorded
@precompiled()
def adjoint(do: Tensor, dfinal: Tensor | None, *args: Any) -> Tensor:
    """Gradients of outputs and final states; what is made, inputs, options."""
    made, inputs, options = taken(args)
    call, do = given_of(inputs, options, None), rows_contiguous(do.to(inputs[2].dtype))
    run = chunked(call, call.forward_variant(call.v.dtype), made.sums)
    update = Update(call.q, do, call.gate, run.g, call.gv)
    if made.operands is not None:  # a token with a bonus reads the state before its own gate
        update = vector_launch.update(made.operands, made.read, do)
    return scanned(run, update, dfinal, reverse=True)[0]


def recall(start: Tensor, *args: Any) -> Arrays:
    """Under a gate per key channel the states before chunks, of those before the tokens; what is made, inputs, options."""
    return (None if taken(args)[0].operands is None else states_before(start, *args),)


@recorded
@precompiled()
def states_before(start: Tensor, *args: Any) -> Tensor:
    """The states before the tokens; what is made, inputs, options."""
    made, inputs, options = taken(args)
    call = given_of(inputs, options, start)
    return states_of(chunked(call, call.backward_variant(call.v), made.sums), made.operands)


def gradients(
    start: Tensor, do: Tensor, dfinal: Tensor | None, made: list[Tensor | None], inputs: Arrays, options: Options
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs, and of the states before the tokens."""
    *made, states = made
    return all_gradients(start, do, dfinal, states, *made, *inputs, *options)


@recorded
@precompiled()
def all_gradients(
    start: Tensor, do: Tensor, dfinal: Tensor | None, states: Tensor | None, *args: Any
) -> list[Tensor]:  # fmt: skip
    """The states before the tokens, gradients of outputs and final states, what is recalled; what is made, inputs, options."""
    made, inputs, options = taken(args)
    call, do = given_of(inputs, options, start), rows_contiguous(do)
    run = chunked(call, call.backward_variant(do), made.sums)
    found = gradients_of(run, do, dfinal, made.operands, states)
    zero_behind(call, options.cu, *map(found.get, ("q", "k", "v", "g", "gv")))
    names = ("q", "k", "v", "g", "gv", "u", "start")
    return [found[name].to(x.dtype) for name, x in zip(names, (*inputs, start), strict=True) if x is not None]


def scanned(
    run: ChunkedCall, update: Update, start: Tensor | None, reverse: bool, end: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state at the far end of each sequence, in ``end`` if given, and the sums of both gates over every segment.

    Sequences are cut into segments, enough to fill the device.
    """
    call, tile = run.call, run.variant["segment_states"].tile
    T, HV, V = call.v.shape[1:]
    busy = call.N * HV * programs(call.q.shape[-1], V, tile.BK, tile.BV)
    pieces = max(PROGRAMS * run.variant.num_sms // max(busy, 1), 1)
    length = max(-(-T // (run.variant.chunk * pieces)), 4)
    return far_states(run, update, start, reverse, length, end)


DIAGONAL = Core(
    begin=begin,
    bare=nothing_made,
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
    parameters=1,
)
"""The families with a diagonal gate, whose parameter is the bonus."""
