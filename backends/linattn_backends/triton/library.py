"""The custom ops ``linattn::triton_diagonal`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from . import launch, one_pass, vector_launch
from .ahead import foreseen
from .launch import Applied, Diagonal
from .steps import Tokens, filled, final_shape, walk

__all__ = ["diagonal", "diagonal_call"]


def algorithm(call: Diagonal, backward: bool = False) -> ModuleType:
    """Where the chunk form's ``forward`` and ``backward`` are: in one pass if that can, else with states in memory."""
    if call.gate == 2 and call.w is None:
        return vector_launch
    return one_pass if one_pass.fits(call, backward) else launch


def gradient_after(args: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> None:
    """The backward pass of a call that keeps something for it, unless it may bring a final state's gradient or not."""
    *arrays, _, scale, chunk, final, _, keep = args
    o, _, *kept = results
    if keep and not final:
        diagonal_backward._init_fn(o, None, *all_or_none(kept), *arrays, scale, chunk)


@foreseen(gradient_after)
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, form: str, scale: float, chunk: int, final: bool, wide: bool, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`diagonal` returns, and ``None`` for what is not wanted."""
    dtype = torch.float32 if wide else v.dtype
    nothing = (None,) * len(Applied._fields)
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, True), dtype=torch.float32) if final else None
        return walk(Tokens(q, k, v, g, gv, u=u), initial_state, end, scale, dtype, cu_seqlens), end, *nothing
    call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    o, end, applied = algorithm(call).forward(call, dtype, final)
    return o, end, *(applied if keep and applied is not None else nothing)


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
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs (float32 if ``wide``), final states and ``Applied``, for the backward pass; what is not wanted is empty."""
    return filled(v, computed(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, wide, keep))


@diagonal.register_fake
def _(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, wide, keep):
    o = v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)
    end = v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
    if keep and form == "chunk":
        call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
        if algorithm(call) is vector_launch:
            return o, end, *Applied.empty(call)
    return o, end, *(v.new_empty(0) for _ in Applied._fields)


@torch.library.custom_op("linattn::triton_diagonal_backward", mutates_args=())
@foreseen()
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

    ``Applied`` that was not kept is made again.
    """
    call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    if A is not None:
        call = replace(call, applied=Applied(A, read, write, decay, stops))
    grads = algorithm(call, backward=True).backward(call, do, dfinal)
    if g is not None and g.dim() == 1:
        grads["g"] = grads["g"].sum((0, 1))
    given = dict(q=q, k=k, v=v, g=g, gv=gv, u=u, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@diagonal_backward.register_fake
def _(do, dfinal, A, read, write, decay, stops, q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk):
    given = (q, k, v, g, gv, u, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


def all_or_none(kept: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """What was kept for the backward pass; of no tokens, some arrays are empty anyhow."""
    return kept if kept[0] is not None and kept[0].numel() else [None] * len(kept)


def _setup_context(ctx, inputs, output):
    *arrays, _, ctx.scale, ctx.chunk, ctx.final, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
    ctx.save_for_backward(*arrays, *all_or_none(output[2:]))  # as many of the op's outputs as of an eager call's


def _backward(ctx, do, dfinal, *_):
    saved = ctx.saved_tensors  # once: each time unpacks, which checkpointing refuses to do twice
    (*floats, cu_seqlens), kept = saved[:8], saved[8:]
    dfinal = dfinal if ctx.final else None
    if do is None and dfinal is None:
        return (None,) * 14
    do = torch.zeros_like(floats[2]) if do is None else do
    grads = iter(_backward_call(do, dfinal, *kept, *floats, cu_seqlens, ctx.scale, ctx.chunk))
    return (*(None if x is None else next(grads) for x in floats), *(None,) * 7)


_backward_call = register(diagonal_backward)
_diagonal_call = register(diagonal, _setup_context, _backward, computed)


def diagonal_call(*args):
    """``diagonal``: what a vector gate was applied to is kept where a gradient will be asked for."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor))
    return _diagonal_call(*args, keep)[:2]
