"""The custom ops ``linattn::triton_delta`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from .delta_launch import Delta, backward, forward
from .steps import Tokens, final_shape, walk

__all__ = ["delta", "delta_backward", "delta_call"]


@torch.library.custom_op("linattn::triton_delta", mutates_args=())
def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
    final: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and final states, which are an empty tensor unless ``final``."""
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
        tokens = Tokens(q, k, v, g, beta=beta, a=a, b=b)
        return walk(tokens, initial_state, end if final else None, scale, v.dtype, cu_seqlens), end
    o, end = forward(Delta.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk), final)
    return o, v.new_empty(0, dtype=torch.float32) if end is None else end


@delta.register_fake
def _(q, k, v, g, beta, a, b, initial_state, cu_seqlens, form, scale, chunk, final):
    return v.new_empty(v.shape), v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)


@torch.library.custom_op("linattn::triton_delta_backward", mutates_args=())
def delta_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's."""
    grads = backward(Delta.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk), do, dfinal)
    given = dict(q=q, k=k, v=v, g=g, beta=beta, a=a, b=b, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@delta_backward.register_fake
def _(do, dfinal, q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk):
    given = (q, k, v, g, beta, a, b, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


def _setup_context(ctx, inputs, output):
    *arrays, _, ctx.scale, ctx.chunk, ctx.final = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, dfinal):
    *floats, cu_seqlens = ctx.saved_tensors
    dfinal = dfinal if ctx.final else None
    if do is None and dfinal is None:
        return (None,) * 13
    do = torch.zeros_like(floats[2]) if do is None else do
    grads = iter(_backward_call(do, dfinal, *floats, cu_seqlens, ctx.scale, ctx.chunk))
    return (*(None if x is None else next(grads) for x in floats), *(None,) * 5)


_backward_call = register(delta_backward)
delta_call = register(delta, _setup_context, _backward)
