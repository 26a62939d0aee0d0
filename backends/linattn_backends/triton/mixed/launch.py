"""Launches of ``mixed_attn``, and of ``linear_attn`` with ``causal=False``.

The recurrent form is the chunk form, which goes on from any state, but for one token a sequence (:func:`step`). No launch reads
a tensor's data: how many tokens a state holds, and where packed sequences end, is found out on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from linattn.plugin import MixedState
from torch import Tensor

from ..host.chunks import rows_contiguous, strides
from ..host.tails import zero_behind
from ..host.tiles import programs
from ..runtime.launch import launch
from .call import Chunked, MixedCall
from .config import step_variant

__all__ = ["FinalGradients", "backward", "forward", "held_after", "step"]


def chunk_sums(
    chunked: Chunked, x: Tensor, y: Tensor, held: tuple[Tensor | None, Tensor | None], scale: float, queries: bool
) -> Tensor:  # fmt: skip
    """``scale xᵀ y`` of every chunk."""
    call, stage = chunked.call, chunked.variant["sums"]
    tile = stage.tile
    L, V, HV = call.widths["L"], call.widths["V"], call.v.shape[2]
    out = call.new_states(chunked.chunks.count)
    launch(
        stage.kernel, chunked.chunks.count * HV * programs(L, V, tile.BL, tile.BV), call,
        x, y, *held, out, *chunked.place, scale, *strides(x), *strides(y), HV * L, HV * V,
        L=L, V=V, BT=tile.BT, BL=tile.BL, BV=tile.BV, GROUP=call.group, QUERIES=queries, **chunked.flags, **stage.config,
    )  # fmt: skip
    return out


def scan(chunked: Chunked, sums: Tensor, start: Tensor | None, end: Tensor | None, reverse: bool) -> Tensor:
    """The states that the chunks read, from their sums; the state at the far end goes to ``end``."""
    call, stage = chunked.call, chunked.variant["states"]
    tile = stage.tile
    states = call.new_states(chunked.chunks.count, narrow=True)
    size = sums.shape[-2] * sums.shape[-1]
    launch(
        stage.kernel, call.N * call.v.shape[2] * programs(1, size, tile.BK, tile.BV), call,
        sums, states, start, end, *chunked.place, SIZE=size, BLOCK=tile.BV, PACKED=call.cu is not None,
        HELD=call.state is not None, CAUSAL=call.causal, REVERSE=reverse, START=start is not None, END=end is not None,
        **stage.config,
    )  # fmt: skip
    return states


def states_of(chunked: Chunked, end: Tensor | None = None) -> Tensor:
    """``S`` of every chunk; the state after the last whole one goes to ``end``."""
    call = chunked.call
    sums = chunk_sums(chunked, call.k_lin, call.v, call.held[1:], 1.0, False)
    return scan(chunked, sums, None if call.state is None else call.state.kv, end, False)


def forward(call: MixedCall, out_dtype: torch.dtype, end: Tensor | None) -> Tensor:
    """Outputs; the sum after the last whole chunk goes to ``end``."""
    chunked = Chunked.of(call, backward=False)
    stage = chunked.variant["outputs"]
    states = states_of(chunked, end)
    q_quad, k_quad, q_lin, _, v = call.heads
    held_k, _, held_v = call.held
    out = v.new_empty(v.shape, dtype=out_dtype)
    launch(
        stage.kernel, chunked.programs(programs(1, v.shape[3], 1, stage.tile.BV)), call,
        q_quad, k_quad, q_lin, v, held_k, held_v, call.bias, states, out, *chunked.place, chunked.blocks,
        call.quad_scale, call.lin_scale, *strides(q_quad), *strides(k_quad), *strides(q_lin), *strides(v),
        GROUP=call.group, **chunked.inside(stage),
    )  # fmt: skip
    zero_behind(call, call.cu, out)
    return out


class FinalGradients(NamedTuple):
    """Gradients of a final state; ``None`` where none flows in."""

    kv: Tensor | None = None
    k_quad: Tensor | None = None
    k_lin: Tensor | None = None
    v: Tensor | None = None


class Gradients(NamedTuple):
    """Gradients of the new arrays, of the bias, and of the arrays of the state gone on from."""

    heads: list[Tensor | None]
    bias: Tensor | None
    state: list[Tensor | None]


def backward(call: MixedCall, do: Tensor, dfinal: FinalGradients) -> Gradients:
    """All gradients of a call."""
    chunked = Chunked.of(call, backward=True)
    do = rows_contiguous(do)
    dfinal = FinalGradients(*(None if x is None else x.contiguous() for x in dfinal))
    dstate: list[Tensor | None] = [None] * 4
    if call.state is not None:
        dstate = [torch.zeros_like(x, dtype=torch.float32) for x in call.state[:4]]
    states = states_of(chunked)
    sums = chunk_sums(chunked, call.q_lin, do, (None, None), call.lin_scale, True)
    dstates = scan(chunked, sums, dfinal.kv, dstate[0], True)
    dq_quad, dq_lin = query_gradients(chunked, do, states)
    dk_quad, dk_lin = key_gradients(chunked, do, dstates, dfinal, dstate)
    dv = value_gradients(chunked, do, dstates, dfinal, dstate)
    if call.group > 1:
        dq_lin, dk_lin = (x.unflatten(2, (-1, call.group)).sum(3).to(dv.dtype) for x in (dq_lin, dk_lin))
    dbias = None if call.bias is None else bias_gradient(chunked, do)
    heads = [dq_quad, dk_quad, dq_lin, dk_lin, dv]
    zero_behind(call, call.cu, *heads)
    return Gradients(heads, dbias, dstate)


def per_value_head(call: MixedCall) -> Tensor:
    """An array for the gradient of linear heads: one a value head, to be summed over a group."""
    kind = call.v.dtype if call.group == 1 else torch.float32
    return call.v.new_empty((*call.v.shape[:3], call.k_lin.shape[3]), dtype=kind)


def like(x: Tensor | None) -> Tensor | None:
    """A dense array for the gradient of ``x``."""
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


def query_gradients(chunked: Chunked, do: Tensor, states: Tensor) -> tuple[Tensor | None, Tensor]:
    """``dq_quad`` and ``dq_lin``."""
    call, stage = chunked.call, chunked.variant["queries"]
    q_quad, k_quad, q_lin, _, v = call.heads
    held_k, _, held_v = call.held
    dq_quad, dq_lin = like(q_quad), per_value_head(call)
    launch(
        stage.kernel, chunked.programs(), call,
        q_quad, k_quad, q_lin, v, do, held_k, held_v, call.bias, states, dq_quad, dq_lin, *chunked.place, chunked.blocks,
        call.quad_scale, call.lin_scale, *strides(q_quad), *strides(k_quad), *strides(v), *strides(do),
        **chunked.inside(stage),
    )  # fmt: skip
    return dq_quad, dq_lin


def key_gradients(
    chunked: Chunked, do: Tensor, dstates: Tensor, dfinal: FinalGradients, dstate: list[Tensor | None]
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """``dk_quad`` and ``dk_lin``; those of held keys go to ``dstate``."""
    call, stage = chunked.call, chunked.variant["keys"]
    q_quad, k_quad, _, _, v = call.heads
    held_k, _, held_v = call.held
    dk_quad, dk_lin = like(k_quad), per_value_head(call)
    launch(
        stage.kernel, chunked.programs(), call,
        q_quad, k_quad, v, do, held_k, held_v, call.bias, dstates, dk_quad, dk_lin, dstate[1], dstate[2],
        dfinal.k_quad, dfinal.k_lin, *chunked.place, chunked.blocks, call.quad_scale,
        *strides(q_quad), *strides(k_quad), *strides(v), *strides(do),
        DFINAL_QUAD=dfinal.k_quad is not None, DFINAL_LIN=dfinal.k_lin is not None, **chunked.inside(stage),
    )  # fmt: skip
    return dk_quad, dk_lin


def value_gradients(
    chunked: Chunked, do: Tensor, dstates: Tensor, dfinal: FinalGradients, dstate: list[Tensor | None]
) -> Tensor:  # fmt: skip
    """``dv``; that of held values goes to ``dstate``."""
    call, stage = chunked.call, chunked.variant["values"]
    q_quad, k_quad, _, k_lin, v = call.heads
    held_k, held_l, _ = call.held
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    launch(
        stage.kernel, chunked.programs(programs(1, v.shape[3], 1, stage.tile.BV)), call,
        q_quad, k_quad, k_lin, do, held_k, held_l, call.bias, dstates, dv, dstate[3], dfinal.v, *chunked.place, chunked.blocks,
        call.quad_scale, *strides(q_quad), *strides(k_quad), *strides(k_lin), *strides(do),
        GROUP=call.group, DFINAL=dfinal.v is not None, **chunked.inside(stage),
    )  # fmt: skip
    return dv


def bias_gradient(chunked: Chunked, do: Tensor) -> Tensor:
    """``dbias``, summed by one program for each tile, chunk after chunk."""
    call, stage = chunked.call, chunked.variant["bias"]
    q_quad, k_quad, _, _, v = call.heads
    held_k, _, held_v = call.held
    out = call.bias.new_zeros(call.bias.shape, dtype=torch.float32)
    inside = {name: x for name, x in chunked.inside(stage).items() if name not in ("L", "BL", "QUAD", "BIAS", "DT")}
    launch(
        stage.kernel, v.shape[2] * chunked.blocks**2, call,
        q_quad, k_quad, v, do, held_k, held_v, call.bias, out, *chunked.place, chunked.blocks, chunked.chunks.count,
        call.quad_scale, *strides(q_quad), *strides(k_quad), *strides(v), *strides(do), **inside,
    )  # fmt: skip
    return out


def held_after(call: MixedCall) -> list[Tensor]:
    """What the final state holds of the last chunk, float32, and how many tokens."""
    v, state = call.v, call.state
    T, N, C = v.shape[1], call.N, call.C
    sequence = torch.arange(N, device=v.device)
    begin = torch.zeros_like(sequence) if call.cu is None else call.cu[:-1].long()
    tokens = torch.full_like(sequence, T) if call.cu is None else call.cu.diff().long()
    p = torch.zeros_like(sequence) if state is None else state.length.long()
    length = (tokens + p) % C
    r = torch.arange(C, device=v.device)
    j = (tokens + p - length)[:, None] + r  # as the sequence counts its tokens, held ones first
    old, there = j < p[:, None], r < length[:, None]
    row = (sequence if call.cu is None else torch.zeros_like(sequence))[:, None]
    column = (begin[:, None] + j - p[:, None]).clamp_(0, max(T - 1, 0))
    found = []
    for new, before in zip((call.k_quad, call.k_lin, v), call.held, strict=True):
        x = new[row, column].float() if T else new.new_zeros((N, C, *new.shape[2:]), dtype=torch.float32)
        x = x if before is None else torch.where(old[..., None, None], before.float(), x)
        found.append(x.masked_fill(~there[..., None, None], 0.0))
    return [*found, length.to(torch.int32)]


def step(call: MixedCall) -> tuple[Tensor, MixedState[Tensor]]:
    """The output and the state after one new token of every sequence."""
    widths: dict[str, Any] = call.widths
    stage = step_variant(**widths)["step"]
    tile = stage.tile
    (N, _, HV, V), C, before = call.v.shape, call.C, call.state
    after = MixedState(
        *(torch.empty_like(x, dtype=torch.float32) for x in before[:4]), torch.empty_like(before.length, dtype=torch.int32)
    )
    out = call.v.new_empty(call.v.shape)
    launch(
        stage.kernel, N * HV * programs(1, V, 1, tile.BV), call,
        *call.heads, call.bias, *before, out, *after, HV, C, call.quad_scale, call.lin_scale,
        *(x.stride(axis) for x in call.heads for axis in (0, 2)), **widths, BT=tile.BT, BK=tile.BK, BL=tile.BL, BV=tile.BV,
        BIAS=call.bias is not None, PREC="tf32x3", **stage.config,
    )  # fmt: skip
    return out, after
