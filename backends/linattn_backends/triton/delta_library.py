"""The custom ops ``linattn::triton_delta`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from .ahead import foreseen
from .delta_launch import Delta, Scores, backward, forward
from .steps import Tokens, filled, final_shape, walk

__all__ = ["delta", "delta_backward", "delta_call"]


def gradient_after(args: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> None:
    """The backward pass of a call that keeps something for it, unless it may bring a final state's gradient or not."""
    *arrays, _, scale, chunk, final, keep = args
    o, _, *kept = results
    if keep and not final:
        delta_backward._init_fn(o, None, *not_empty(kept), *arrays, scale, chunk)


@foreseen(gradient_after)
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, form: str, scale: float, chunk: int, final: bool, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`delta` returns, and ``None`` for what is not wanted."""
    nothing = (None,) * len(Scores._fields)
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, True), dtype=torch.float32) if final else None
        return walk(Tokens(q, k, v, g, beta=beta, a=a, b=b), initial_state, end, scale, v.dtype, cu_seqlens), end, *nothing
    o, end, scores = forward(Delta.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk), final)
    return o, end, *(scores if keep else nothing)


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
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states and ``Scores``, for the backward pass; what is not wanted is an empty tensor."""
    return filled(v, computed(q, k, v, g, beta, a, b, initial_state, cu_seqlens, form, scale, chunk, final, keep))


@delta.register_fake
def _(q, k, v, g, beta, a, b, initial_state, cu_seqlens, form, scale, chunk, final, keep):
    results = v.new_empty(v.shape), v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
    if form == "recurrent" or not keep:
        return *results, *(v.new_empty(0) for _ in Scores._fields)
    scores = Scores.empty(Delta.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk))
    return *results, *(v.new_empty(0) if x is None else x for x in scores)


@torch.library.custom_op("linattn::triton_delta_backward", mutates_args=())
@foreseen()
def delta_backward(
    do: Tensor,
    dfinal: Tensor | None,
    A: Tensor | None,
    M: Tensor | None,
    A2: Tensor | None,
    L2: Tensor | None,
    rates: Tensor | None,
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
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's.

    ``Scores`` that were not kept are made again.
    """
    call = Delta.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk)
    scores = None if A is None or M is None else Scores(A, M, A2, L2, rates)
    grads = backward(call, do, dfinal, scores)
    given = dict(q=q, k=k, v=v, g=g, beta=beta, a=a, b=b, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@delta_backward.register_fake
def _(do, dfinal, A, M, A2, L2, rates, q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk):
    given = (q, k, v, g, beta, a, b, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


def not_empty(kept: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """What was kept for the backward pass, ``None`` for the rest."""
    return [x if x is not None and x.numel() else None for x in kept]


def _setup_context(ctx, inputs, output):
    *arrays, _, ctx.scale, ctx.chunk, ctx.final, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(x for x in output[2:] if x is not None))
    ctx.save_for_backward(*arrays, *not_empty(output[2:]))  # as many of the op's outputs as of an eager call's


def _backward(ctx, do, dfinal, *_):
    saved = ctx.saved_tensors  # once: each time unpacks, which checkpointing refuses to do twice
    (*floats, cu_seqlens), kept = saved[:9], saved[9:]
    dfinal = dfinal if ctx.final else None
    if do is None and dfinal is None:
        return (None,) * 14
    do = torch.zeros_like(floats[2]) if do is None else do
    grads = iter(_backward_call(do, dfinal, *kept, *floats, cu_seqlens, ctx.scale, ctx.chunk))
    return (*(None if x is None else next(grads) for x in floats), *(None,) * 6)


_backward_call = register(delta_backward)
_delta_call = register(delta, _setup_context, _backward, computed)


def delta_call(*args):
    """``delta``: scores are kept where a gradient will be asked for."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor))
    return _delta_call(*args, keep)[:2]
