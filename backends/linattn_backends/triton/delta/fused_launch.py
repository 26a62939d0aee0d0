"""The launch that makes scores and carries the state at once, where there are heads enough and no scores are kept."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..host.chunks import cut, state_strides, strides
from ..host.lengths import lengths_of
from ..host.tails import zero_behind
from ..host.tiles import programs
from ..host.walks import together
from ..runtime.launch import launch
from .call import ChunkedCall, DeltaCall, Kept, States
from .config import DeltaVariant

__all__ = ["empty_outputs", "fused_forward", "fused_state_gradients", "fused_states"]

ONCE, MOST = 0.5, 16
"""Of programs of several sequences, as :func:`..host.walks.together` has them."""


def fused_forward(call: DeltaCall, variant: DeltaVariant, final: bool, keep: bool) -> tuple[Tensor, Tensor | None, Kept | None]:
    """Outputs, zero behind packed sequences, if asked for final states, and if it is to ``keep`` something, states and errors,
    of ``dplr`` only.
    """
    HV, V, K = *call.v.shape[2:], call.q.shape[-1]
    out = empty_outputs(call)
    end = torch.empty((call.N, HV, K, V), dtype=torch.float32, device=call.v.device) if final else None
    kept = Kept.states_of(call) if keep and call.dplr else None
    if call.dplr:
        launch_two_writers(call, variant, out, end, kept)
    else:
        launch_one_writer(call, variant, out, end)
    zero_behind(call, call.cu, out)
    return out, end, kept


def empty_outputs(call: DeltaCall) -> Tensor:
    """An array for the outputs of a call."""
    return torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)


def fused_states(call: ChunkedCall) -> tuple[Tensor, Tensor]:
    """The states before chunks, and errors, of ``dplr``; outputs are made on the way."""
    kept = Kept.states_of(call)
    launch_two_writers(call, call.variant, empty_outputs(call), None, kept)
    return kept.states, kept.errors


def fused_state_gradients(
    call: ChunkedCall, do: Tensor, dfinal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """The gradients of the states after chunks, the errors' adjoint, if there are any the initial states' gradient, and what
    chunks decay by, of ``dplr``.
    """
    (_, T, HV, V), K, stage = call.v.shape, call.q.shape[-1], call.variant["fused_bwd"]
    dstates, adjoint = States.empty(call)
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.v.device)
    log_decays = new((call.chunks.count, HV))
    dstart = None if call.start is None else new((call.N, HV, K, V))
    launch(
        stage.kernel, call.N * HV, call,
        call.q, call.a, call.b, call.g, do, dfinal, dstart, dstates, adjoint, log_decays, call.chunks.first, call.cu, T, HV,
        call.scale, *(stride for x in (call.q, call.a, call.b, call.g, do) for stride in strides(x)), *state_strides(dfinal),
        K=K, V=V, C=call.chunk, GROUP=call.group, RANGE=call.variant.range, PACKED=call.cu is not None,
        START=dfinal is not None, END=dstart is not None, **stage.config,
    )  # fmt: skip
    return dstates, adjoint, dstart, log_decays


def launch_two_writers(call: DeltaCall, variant: DeltaVariant, out: Tensor, end: Tensor | None, kept: Kept | None) -> None:
    """The launch of ``dplr``, whose maps are made before it."""
    (_, T, HV, V), K, stage = call.v.shape, call.q.shape[-1], variant["fused"]
    states, errors, first = None, None, None
    if kept:
        states, errors, first = kept.states, kept.errors, cut(call, call.chunk).first
    launch(
        stage.kernel, call.N * HV, call,
        call.q, call.a, call.b, call.k, call.v, call.g, call.start, end, states, errors, out, first, call.cu, T, HV, call.scale,
        *(stride for x in (call.q, call.a, call.b, call.k, call.v, call.g) for stride in strides(x)),
        *state_strides(call.start),
        K=K, V=V, C=call.chunk, GROUP=call.group, RANGE=variant.range, PACKED=call.cu is not None,
        START=call.start is not None, END=end is not None, KEEP=kept is not None, **stage.config,
    )  # fmt: skip


def launch_one_writer(call: DeltaCall, variant: DeltaVariant, out: Tensor, end: Tensor | None) -> None:
    """The launch of the other families, with at most a scalar gate."""
    (_, T, HV, V), K, stage = call.v.shape, call.q.shape[-1], variant["fused"]
    lengths, num_sms = lengths_of(call), variant.num_sms
    many = together(call, call.chunk, HV, num_sms, call.q, call.k, call.v, call.g, call.beta, once=ONCE, most=MOST)
    step = programs(call.N, 1, many, 1)
    launch(
        stage.kernel, step * HV, call,
        call.q, call.k, call.v, *lengths, call.g, call.beta, call.start, end, out, call.cu, T, HV, call.N, step, call.scale,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(call.g), *strides(call.beta), *state_strides(call.start),
        K=K, V=V, C=call.chunk, BV=stage.tile.BV, GROUP=call.group, GATE=call.gate, UNIT=call.maps.unit,
        PACKED=call.cu is not None, START=call.start is not None, END=end is not None, MANY=many > 1, **stage.config,
    )  # fmt: skip
