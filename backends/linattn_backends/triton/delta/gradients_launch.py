"""Launches of the gradients that follow from the states before, and the state gradients after, each chunk."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from ..host.chunks import strides
from ..host.lengths import key_gradients
from ..host.sums import sums_of_parts
from ..host.tiles import programs
from ..runtime.launch import launch
from .call import ChunkedCall, ScoreGradients, StateOperands, States

__all__ = ["Gradients", "operand_gradients", "vector_gradients"]

Gradients = dict[str, Tensor | None]


def operand_gradients(call: ChunkedCall, do: Tensor, operands: StateOperands, states: States) -> Gradients:
    """Every gradient but the initial state's, by the array's name."""
    if call.gate < 2:
        return scalar_gradients(call, do, operands, states)
    return vector_gradients(call, do, operands.log_decays, operands, states)


def scalar_gradients(call: ChunkedCall, do: Tensor, operands: StateOperands, states: States) -> Gradients:
    """Gradients for at most a scalar gate."""
    (B, T, HV, V), stage = call.v.shape, call.variant["gradients"]
    tile, tiles = stage.tile, programs(call.q.shape[-1], 1, stage.tile.BK, 1)
    turns = turns_of(call, tiles)
    dq, dk, dv, dbeta = summed(call, turns), summed(call, turns), like(call.v), like(call.beta)
    each = (call.chunks.count, HV, 2, call.chunk) if "gate" in call.variant.stages else (B, T, HV)
    partial_dg = torch.empty((tiles, *each), dtype=torch.float32, device=call.v.device) if call.gate else None
    for turn in range(turns):
        launch(
            stage.kernel, call.chunk_heads // turns * tiles, call,
            call.q, call.k, *call.lengths, do, call.g, call.beta, states.errors, states.adjoint, operands.rates,
            states.states, states.dstates, dq, dk, dv, partial_dg, dbeta, *call.places, turn, call.scale,
            0 if partial_dg is None else partial_dg.stride(0),
            *strides(call.q), *strides(call.k), *strides(do), *strides(call.g), *strides(call.beta),
            **call.constants, **call.products, V=V, BK=tile.BK, BV=tile.BV, TURNS=turns, GATE=call.gate, BETA=call.strength,
            SPLIT=call.variant.split, UNIT=call.maps.unit, **stage.config,
        )  # fmt: skip
    dg = None if partial_dg is None else gate_gradient(call, partial_dg)
    dq, dk = key_gradients(call, call.lengths, dq, dk)
    return dict(q=dq, k=dk, v=dv, g=dg, beta=dbeta)


def gate_gradient(call: ChunkedCall, partial_dg: Tensor) -> Tensor:
    """The gradient of a scalar gate, of what each tile of keys left: its part ``[B, T, HV]``, or what a stage makes that of."""
    stage = call.variant.stages.get("gate")
    if stage is None:
        return partial_dg[0] if partial_dg.shape[0] == 1 else partial_dg.sum(0)
    dg = torch.empty(call.g.shape, dtype=torch.float32, device=call.g.device)
    launch(
        stage.kernel, call.chunk_heads, call,
        partial_dg, call.g, dg, *call.places, partial_dg.stride(0), *strides(call.g),
        C=call.chunk, TILES=partial_dg.shape[0], PACKED=call.cu is not None, **stage.config,
    )  # fmt: skip
    return dg


def vector_gradients(
    call: ChunkedCall, do: Tensor, log_decays: Tensor | None, operands: StateOperands | None, states: States
) -> Gradients:
    """Gradients for a vector gate: of chunks that take plain products, then of those that decay too much.

    The ``operands`` of the state are read where values have a stage of their own.
    """
    V, variant = call.v.shape[-1], call.variant
    separate = "values" in variant.stages
    dv, dbeta = None if separate else like(call.v), like(call.beta)
    first = "scores_bwd" in variant.stages
    scores, ranges = ScoreGradients(None, None, None, None), log_decays
    if first:
        scores, ranges = score_gradients(call, do, log_decays, states, dv, dbeta)
    turns = turns_of(call, programs(call.q.shape[-1], 1, variant["gradients"].tile.BK, 1))
    dq, dk, da, db, dg = summed(call, turns), summed(call, turns), like(call.a), like(call.b), like(call.g)
    A_log, bias, kind, number = call.maps.gate
    parts = parts_of(call)
    for turn, name in itertools.product(range(turns), ("gradients", "gradients_strong")):
        stage, strong = variant[name], name == "gradients_strong"
        count = call.chunk_heads // turns * programs(call.q.shape[-1], 1, stage.tile.BK, 1)
        launch(
            stage.kernel, variant.few(count) if strong else count, call,
            call.q, call.a, call.b, call.k, call.v, do, call.g, *call.lengths, A_log, bias, call.beta, states.errors,
            states.adjoint, *scores, states.states, states.dstates, dq, da, db, dk,
            *((None, dg, parts, None) if first else (dv, dg, parts, dbeta)),
            ranges, *call.places, turn, count, call.scale, number,
            *(stride for x in (call.q, call.k, call.g, call.a, call.b, call.v, do, call.beta) for stride in strides(x)),
            *call.maps.gate.strides,
            **call.constants, **call.products, V=V, BK=stage.tile.BK, BV=stage.tile.BV, TURNS=turns, BETA=call.strength,
            DPLR=call.dplr, STRONG=strong, SPLIT=variant.split, RANGE=variant.range, UNIT=call.maps.unit, MAP=kind,
            **stage.config,
        )  # fmt: skip
    dv = value_gradient(call, do, operands, states) if separate else dv
    dq, dk = key_gradients(call, call.lengths, dq, dk)
    return dict(q=dq, k=dk, v=dv, g=dg, beta=dbeta, a=da, b=db, **parameter_gradients(call, parts))


def parts_of(call: ChunkedCall) -> Tensor | None:
    """An array for what chunks add to the gradients of a raw gate's parameters, ``[chunks, 2, HV, K]``, if it has any.

    Of packed sequences there is room for more chunks than there are.
    """
    gate = call.maps.gate
    if gate.A_log is None and gate.bias is None:
        return None
    new = torch.empty if call.cu is None else torch.zeros
    shape = call.chunks.count, 2, call.v.shape[2], call.q.shape[-1]
    return new(shape, dtype=torch.float32, device=call.v.device)


def parameter_gradients(call: ChunkedCall, parts: Tensor | None) -> Gradients:
    """Gradients of a raw gate's parameters by their names, of what chunks left."""
    gate = call.maps.gate
    if parts is None:
        return {}
    by_A, by_bias = sums_of_parts(call, parts)
    return dict(
        A_log=None if gate.A_log is None else by_A.sum(-1) if gate.A_log.dim() else by_A.sum(),
        bias=None if gate.bias is None else by_bias if gate.bias.dim() == 2 else by_bias.sum(-1),
    )


def score_gradients(
    call: ChunkedCall, do: Tensor, log_decays: Tensor, states: States, dv: Tensor | None, dbeta: Tensor | None
) -> tuple[ScoreGradients, Tensor]:
    """Gradients of scores, what chunks count as decaying by beside them, and on the way ``dv`` and ``dbeta``."""
    stage, C = call.variant["scores_bwd"], call.chunk
    size = call.chunks.count, call.v.shape[2], C, C
    square = functools.partial(torch.empty, size, dtype=call.state_dtype, device=call.v.device)
    made = ScoreGradients(square(), square(), square() if call.dplr else None, square() if call.dplr else None)
    ranges = torch.empty_like(log_decays)
    launch(
        stage.kernel, call.chunk_heads, call,
        do, call.beta, call.v, states.errors, states.adjoint, log_decays, *made, ranges, dv, dbeta, *call.places, call.scale,
        *strides(do), *strides(call.beta), *strides(call.v),
        V=call.v.shape[-1], C=C, BV=stage.tile.BV, BETA=call.strength, DPLR=call.dplr, PACKED=call.cu is not None,
        RANGE=call.variant.range, PREC=call.variant.precision, **call.products, **stage.config,
    )  # fmt: skip
    return made, ranges


def value_gradient(call: ChunkedCall, do: Tensor, operands: StateOperands | None, states: States) -> Tensor:
    """The values' gradient of ``dplr``."""
    V, stage, dv = call.v.shape[-1], call.variant["values"], like(call.v)
    launch(
        stage.kernel, call.chunk_heads * programs(1, V, 1, stage.tile.BV), call,
        do, states.adjoint, operands.scores.A2, operands.scores.L2, operands.write2, states.dstates, dv, *call.places,
        *strides(do), K=call.q.shape[-1], V=V, C=call.chunk, BK=stage.tile.BK, BV=stage.tile.BV, PACKED=call.cu is not None,
        PREC=call.variant.precision, **call.products, **stage.config,
    )  # fmt: skip
    return dv


def turns_of(call: ChunkedCall, tiles: int) -> int:
    """How many of a group's value heads add their ``dq, dk`` to one sum, a launch after the other.

    All of them, unless that leaves too few programs: then a group has several sums.
    """
    enough = 4 * call.variant.num_sms
    divisors = (n for n in range(call.group, 1, -1) if call.group % n == 0)
    return next((n for n in divisors if call.chunk_heads // n * tiles >= enough), 1)


def summed(call: ChunkedCall, turns: int) -> Tensor:
    """An array for ``dq`` or ``dk``: sums over ``turns`` value heads."""
    B, T, HV = call.v.shape[:3]
    kind = call.q.dtype if call.group == 1 else torch.float32
    return torch.empty((B, T, HV // turns, call.q.shape[-1]), dtype=kind, device=call.q.device)


def like(x: Tensor | None) -> Tensor | None:
    """A dense array of the shape and dtype of ``x``, for its gradient."""
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
