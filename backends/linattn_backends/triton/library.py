"""The custom ops ``linattn::triton_diagonal`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from . import launch, one_pass, vector_launch
from .launch import Diagonal
from .steps import Tokens, final_shape, walk

__all__ = ["diagonal", "diagonal_call"]


def algorithm(call: Diagonal, backward: bool = False) -> ModuleType:
    """Where the chunk form's ``forward`` and ``backward`` are: in one pass if that can, else with states in memory."""
    if call.gate == 2 and call.w is None:
        return vector_launch
    return one_pass if one_pass.fits(call, backward) else launch


@torch.library.custom_op("linattn::triton_diagonal", mutates_args=())
def diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
    final: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs (float32 if ``wide``) and final states, which are an empty tensor unless ``final``."""
    dtype = torch.float32 if wide else v.dtype
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
        tokens = Tokens(q, k, v, g, gv, u=u)
        return walk(tokens, initial_state, end if final else None, scale, dtype, cu_seqlens), end
    call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    o, end = algorithm(call).forward(call, dtype, final)
    return o, v.new_empty(0, dtype=torch.float32) if end is None else end


@diagonal.register_fake
def _(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, wide):
    o = v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)
    return o, v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)


@torch.library.custom_op("linattn::triton_diagonal_backward", mutates_args=())
def diagonal_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's."""
    call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    grads = algorithm(call, backward=True).backward(call, do, dfinal)
    if g is not None and g.dim() == 1:
        grads["g"] = grads["g"].sum((0, 1))
    given = dict(q=q, k=k, v=v, g=g, gv=gv, u=u, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@diagonal_backward.register_fake
def _(do, dfinal, q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk):
    given = (q, k, v, g, gv, u, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


def _setup_context(ctx, inputs, output):
    *arrays, _, ctx.scale, ctx.chunk, ctx.final, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, dfinal):
    q, k, v, g, gv, u, start, cu_seqlens = ctx.saved_tensors
    none = (None,) * 6  # cu_seqlens, form, scale, chunk, final, wide
    dfinal = dfinal if ctx.final else None
    if do is None and dfinal is None:
        return (*(None,) * 7, *none)
    if do is None:
        do = torch.zeros_like(v)
    grads = iter(_backward_call(do, dfinal, q, k, v, g, gv, u, start, cu_seqlens, ctx.scale, ctx.chunk))
    return (*(None if x is None else next(grads) for x in (q, k, v, g, gv, u, start)), *none)


_backward_call = register(diagonal_backward)
diagonal_call = register(diagonal, _setup_context, _backward)
