"""Launches of the scores: what is made of every chunk before its state is known."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..host.chunks import strides
from ..runtime.launch import launch
from .call import ChunkedCall, Scores, StateOperands

__all__ = ["state_operands"]


def state_operands(call: ChunkedCall, kept: Scores | None = None) -> StateOperands:
    """What carries the state; scores are made unless they were ``kept``."""
    if call.gate < 2:
        scores = kept or scalar_scores(call)
        return StateOperands(call.q, call.k, None, None, scores, scores.rates, None)
    return vector_operands(call, kept)


def scalar_scores(call: ChunkedCall) -> Scores:
    """Scores and solved systems for at most a scalar gate."""
    made, stage, count = Scores.empty(call, call.lengths), call.variant["scores"], call.chunk_heads
    L = unsolved(call, made.M)
    launch(
        stage.kernel, -(-count // call.variant.scores_chunks), call,
        call.q, call.k, *call.lengths, call.g, call.beta, made.A, L, made.rates, *call.places, count, call.scale,
        *strides(call.q), *strides(call.k), *strides(call.g), *strides(call.beta),
        **call.constants, BK=stage.tile.BK, GATE=call.gate, BETA=call.strength, SPLIT=call.variant.split,
        UNIT=call.maps.unit, **stage.config,
    )  # fmt: skip
    solve(call, L, made.M)
    return made


def vector_operands(call: ChunkedCall, kept: Scores | None) -> StateOperands:
    """Decayed rows for a vector gate; scores and solved systems unless they were ``kept``.

    The first stage takes every chunk whose scores are plain products and says how much each decays; the second, for those that
    decay too much, finds them by that.
    """
    (B, T, HV, _), K = call.v.shape, call.q.shape[-1]
    new = functools.partial(torch.empty, device=call.q.device)
    rows = functools.partial(new, (B, T, HV, K), dtype=call.state_dtype)
    chunks = functools.partial(new, dtype=torch.float32)
    scores = kept or Scores.empty(call, call.lengths)
    made = StateOperands(
        rows(), rows(), rows(), rows() if call.dplr else None, scores,
        chunks((call.chunks.count, HV, K)), chunks((call.chunks.count, HV)),
    )  # fmt: skip
    L = scores.M if kept else unsolved(call, scores.M)
    for name in ("scores", "scores_strong") if kept is None else ("rows",):
        launch_vector_stage(call, name, made, L)
    if kept is None:
        solve(call, L, scores.M)
    return made


def launch_vector_stage(call: ChunkedCall, name: str, made: StateOperands, L: Tensor) -> None:
    """Launch one of the stages that write decayed rows."""
    stage, count, strong = call.variant[name], call.chunk_heads, name == "scores_strong"
    A_log, bias, kind, number = call.maps.gate
    launch(
        stage.kernel, call.variant.few(count) if strong else count, call,
        call.q, call.a, call.b, call.k, call.g, *call.lengths, A_log, bias, call.beta,
        made.scores.A, L, made.scores.A2, made.scores.L2, made.rates,
        made.read, made.compare, made.write, made.write2, made.log_decays, *call.places, count, call.scale, number,
        *strides(call.q), *strides(call.k), *strides(call.g), *strides(call.a), *strides(call.b), *strides(call.beta),
        *call.maps.gate.strides,
        **call.constants, **call.products, BK=stage.tile.BK, DPLR=call.dplr, SCORES=name != "rows", STRONG=strong,
        SPLIT=call.variant.split, RANGE=call.variant.range, UNIT=call.maps.unit, MAP=kind, **stage.config,
    )  # fmt: skip


def unsolved(call: ChunkedCall, M: Tensor) -> Tensor:
    """Where scores of keys ``L`` go: to memory of their own if a stage solves them, else where ``M`` is."""
    return torch.empty_like(M, dtype=torch.float32) if "solve" in call.variant.stages else M


def solve(call: ChunkedCall, L: Tensor, M: Tensor) -> None:
    """Make ``M`` of every chunk's ``L``, if no other stage does."""
    stage = call.variant.stages.get("solve")
    if stage is not None:
        launch(
            stage.kernel, call.chunk_heads, call,
            L, M, call.beta, *call.places, *strides(call.beta),
            C=call.chunk, BETA=call.strength, PACKED=call.cu is not None, PREC=call.variant.precision, **stage.config,
        )  # fmt: skip
