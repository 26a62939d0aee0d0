"""The custom ops ``linattn::triton_diagonal`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_backends.torch.transforms import asks_for_gradients, register

from ..host.chunks import rows_contiguous
from ..host.tails import zero_behind
from ..recurrent.op import Tokens, recurrent_forward
from ..runtime.operator import filled, final_shape, rules
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .backward import backward
from .call import DiagonalCall, VectorOperands
from .forward import forward

__all__ = ["diagonal", "diagonal_call"]


@torch.library.custom_op("linattn::triton_diagonal_backward", mutates_args=())
@recorded
@precompiled()
def diagonal_backward(
    do: Tensor,
    dfinal: Tensor | None,
    A: Tensor | None,
    read: Tensor | None,
    write: Tensor | None,
    decay: Tensor | None,
    stops: Tensor | None,
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
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's.

    ``VectorOperands`` that were not kept are made again.
    """
    call, do = DiagonalCall.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk), rows_contiguous(do)
    kept = (A, read, write, decay, stops)
    made = VectorOperands(*kept) if all(x is not None for x in kept) else None  # of no tokens, some are empty
    grads = backward(call, call.backward_variant(do), do, dfinal, made)
    zero_behind(call, cu_seqlens, *map(grads.get, ("q", "k", "v", "g", "gv")))
    if g is not None and g.dim() == 1:
        grads["g"] = grads["g"].sum((0, 1))
    given = dict(q=q, k=k, v=v, g=g, gv=gv, u=u, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@diagonal_backward.register_fake
def _(do, dfinal, A, read, write, decay, stops, q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk):
    given = (q, k, v, g, gv, u, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


_backward_call = register(diagonal_backward)
rule = rules(8, diagonal_backward, _backward_call)


@recorded
@precompiled(rule.rehearse)
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, form: str, scale: float, chunk: int, final: bool, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`diagonal` returns, and ``None`` for what is not wanted."""
    nothing = (None,) * len(VectorOperands._fields)
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, True), dtype=torch.float32) if final else None
        return recurrent_forward(Tokens(q, k, v, g, gv, u=u), initial_state, end, scale, v.dtype, cu_seqlens), end, *nothing
    call = DiagonalCall.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    o, end, made = forward(call, call.forward_variant(v.dtype), v.dtype, final)
    return o, end, *(made if keep and made is not None else nothing)


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
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states, and ``VectorOperands`` for the backward pass; empty where not wanted."""
    return filled(v, computed(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, keep))


@diagonal.register_fake
def _(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, keep):
    o = v.new_empty(v.shape)
    end = v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
    if keep and form == "chunk":
        call = DiagonalCall.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
        if call.applies_gate:
            return o, end, *VectorOperands.empty(call)
    return o, end, *(v.new_empty(0) for _ in VectorOperands._fields)


_diagonal_call = register(diagonal, rule.setup_context, rule.backward, computed, results=2)


def diagonal_call(*args):
    """``diagonal``: what a vector gate was applied to is kept where a gradient will be asked for."""
    keep = asks_for_gradients(args)
    return _diagonal_call(*args, keep)[:2]
