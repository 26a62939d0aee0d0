"""The custom ops ``linattn::triton_ssd``, its backward, and ``linattn::triton_decode_ssd``: opaque nodes for every tracer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from linattn_backends.torch.transforms import asks_for_gradients, register

from ..diagonal.backward import backward
from ..diagonal.call import DiagonalCall
from ..diagonal.forward import forward
from ..host.chunks import rows_contiguous
from ..host.tails import zero_behind
from ..recurrent.op import Tokens, recurrent_forward
from ..runtime.operator import filled, final_shape, in_place, rules
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .surroundings import Surroundings

__all__ = ["decode_ssd", "ssd"]


def core(
    around: Surroundings, C: Tensor, B: Tensor, start: Tensor | None, cu: Tensor | None, form: str, chunk: int, final: bool
) -> tuple[Tensor, Tensor | None, bool]:
    """Outputs of the recurrence, zero behind packed sequences, final states if asked for, and whether the skip is added."""
    x = around.x
    if form == "recurrent":
        end = x.new_empty(final_shape(C, x, cu, True), dtype=torch.float32) if final else None
        return recurrent_forward(Tokens(C, B, *around.inputs()), start, end, 1.0, x.dtype, cu), end, False
    call = call_of(around, C, B, start, cu, chunk)
    weighted = call.forward_variant(x.dtype).takes_weights
    skip = around.D if weighted and around.skip == 1 and around.z is None else None
    call = filled_in(call, around, weighted, skip)
    o, end, _ = forward(call, call.forward_variant(x.dtype), x.dtype, final)
    return o, end, skip is not None


def call_of(
    around: Surroundings, C: Tensor, B: Tensor, start: Tensor | None, cu: Tensor | None, chunk: int
) -> DiagonalCall:  # fmt: skip
    """The core's call as far as kernels are chosen by it: step sizes stand for log decays, which have their shape."""
    return DiagonalCall.of(C, B, around.x, around.dt, None, None, start, cu, 1.0, chunk)


def filled_in(call: DiagonalCall, around: Surroundings, weighted: bool, skip: Tensor | None) -> DiagonalCall:
    """The core's call with what is made for it: step sizes as weights of ``x``, or values."""
    if weighted:
        weight, g = around.steps()
        return replace(call, g=g, weight=weight, skip=skip)
    v, g = around.inputs()
    return replace(call, v=v, g=g)


@torch.library.custom_op("linattn::triton_ssd_backward", mutates_args=())
@recorded
@precompiled()
def ssd_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    inner: Tensor | None,
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
    softplus: bool,
    least: float,
    most: float,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's.

    What the core takes is made again, and what it gave (``inner``) if it was not kept.
    """
    around = Surroundings.of(x, dt, rate, skip, z, bias, cu_seqlens, softplus, least, most)
    do, dz = rows_contiguous(dy), None
    if z is not None:
        if inner is None:
            inner, _, _ = core(around, C, B, initial_state, cu_seqlens, "chunk", chunk, False)
        do, dz = around.output_gradients(do, inner)
    call = call_of(around, C, B, initial_state, cu_seqlens, chunk)
    weighted = around.has_slopes and replace(call, weight=around.dt).backward_variant(do).takes_weights
    call = filled_in(call, around, weighted, around.D)
    grads = backward(call, call.backward_variant(do), do, dfinal, None)
    found = dict(C=grads["q"], B=grads["k"], z=dz, start=grads["start"])
    if weighted:
        zero_behind(call, cu_seqlens, grads["q"], grads["k"], grads["v"])
        found |= dict(x=grads["v"]) | around.step_gradients(grads["g"], grads["weight"], grads["skip"])
    else:
        zero_behind(call, cu_seqlens, grads["q"], grads["k"])
        found |= around.input_gradients(do, grads["v"], grads["g"].contiguous())
    given = dict(C=C, B=B, x=x, dt=dt, A=rate, D=skip, z=z, bias=bias, start=initial_state)
    return [found[name].to(a.dtype) for name, a in given.items() if a is not None]


@ssd_backward.register_fake
def _(dy, dfinal, inner, C, B, x, dt, rate, skip, z, bias, initial_state, *_):
    given = (C, B, x, dt, rate, skip, z, bias, initial_state)
    return [torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in given if a is not None]


_backward_call = register(ssd_backward)
rule = rules(10, ssd_backward, _backward_call, more=3)


@recorded
@precompiled(rule.rehearse)
def computed(
    C: Tensor, B: Tensor, x: Tensor, dt: Tensor, rate: Tensor, skip: Tensor | None, z: Tensor | None, bias: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, form: str, scale: float, chunk: int, final: bool, softplus: bool,
    least: float, most: float, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`state_space` returns, and ``None`` for what is not wanted."""
    around = Surroundings.of(x, dt, rate, skip, z, bias, cu_seqlens, softplus, least, most)
    o, end, skipped = core(around, C, B, initial_state, cu_seqlens, form, chunk, final)
    if z is None and (skip is None or skipped):
        return o, end, None
    kept = keep and z is not None
    return around.outputs(o, around.new() if kept else o), end, o if kept else None


@torch.library.custom_op("linattn::triton_ssd", mutates_args=())
def state_space(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
    final: bool,
    softplus: bool,
    least: float,
    most: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states, and the core's outputs for the backward pass of a gate; empty where not wanted.

    ``rate`` and ``skip`` are ``A`` and ``D`` of the specification, and ``scale`` is 1.
    """
    return filled(
        x,
        computed(
            C, B, x, dt, rate, skip, z, bias, initial_state, cu_seqlens, form, scale, chunk, final, softplus, least, most, keep
        ),
    )  # fmt: skip


@state_space.register_fake
def _(
    C, B, x, dt, rate, skip, z, bias, initial_state, cu_seqlens, form, scale, chunk, final, softplus, least, most, keep
):  # fmt: skip
    end = x.new_empty(final_shape(C, x, cu_seqlens, final), dtype=torch.float32)
    return x.new_empty(x.shape), end, x.new_empty(x.shape if keep and z is not None else 0)


_call = register(state_space, rule.setup_context, rule.backward, computed, results=2)


def ssd(
    form: str,
    arrays: dict[str, Tensor],
    *,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """``ssd``, in chunks or token by token."""
    given = [*(arrays[name] for name in ("C", "B", "x", "dt", "A")), D, z, dt_bias, initial_state, cu_seqlens]
    keep = asks_for_gradients(given)
    least, most = map(float, dt_limit)
    y, final = _call(*given, form, 1.0, chunk_size or 0, output_final_state, dt_softplus, least, most, keep)[:2]
    return y, final if output_final_state else None


@torch.library.custom_op("linattn::triton_decode_ssd", mutates_args=("state",))
def decoded(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    skip: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    softplus: bool,
    least: float,
    most: float,
) -> Tensor:
    """Outputs, zero for slots that are padding; ``state`` is overwritten."""
    return step(C, B, x, dt, rate, skip, z, bias, state, state_indices, softplus, least, most)


@decoded.register_fake
def _(C, B, x, dt, rate, skip, z, bias, state, state_indices, softplus, least, most):
    return x.new_empty(x.shape)


@recorded
def step(
    C: Tensor, B: Tensor, x: Tensor, dt: Tensor, rate: Tensor, skip: Tensor | None, z: Tensor | None, bias: Tensor | None,
    state: Tensor, state_indices: Tensor | None, softplus: bool, least: float, most: float,
) -> Tensor:  # fmt: skip
    """What :func:`decoded` returns."""
    around = Surroundings.of(x, dt, rate, skip, z, bias, None, softplus, least, most)
    slots = None if state_indices is None else state_indices.contiguous()
    o = recurrent_forward(Tokens(C, B, *around.inputs()), state, state, 1.0, x.dtype, slots=slots)
    return o if skip is None and z is None else around.outputs(o, o, slots, state.shape[0])


_decoded_call = in_place(decoded, "decode_ssd", 8, step)


def decode_ssd(
    form: str,
    arrays: dict[str, Tensor],
    *,
    state: Tensor,
    state_indices: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> Tensor:
    """``ssd`` token by token, on states that are overwritten."""
    given = [*(arrays[name] for name in ("C", "B", "x", "dt", "A")), D, z, dt_bias, state, state_indices]
    return _decoded_call(*given, dt_softplus, *map(float, dt_limit))
