"""Custom ops of ``linear_attn`` with ``causal=False``: ``linattn::triton_bidirectional`` and its backward.

Kernels are those of ``mixed_attn``, with one state that every token reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .call import MixedCall
from .launch import FinalGradients, backward, forward

__all__ = ["bidirectional", "bidirectional_backward", "bidirectional_call"]

CHUNK = 256
"""Tokens that are summed by one program."""


def call_of(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float) -> MixedCall:
    """The call that sums over whole sequences, and has no quadratic heads."""
    return MixedCall.of((None, None, q, k, v), None, None, cu_seqlens, CHUNK, 0.0, scale, False)


@torch.library.custom_op("linattn::triton_bidirectional", mutates_args=())
@recorded
@precompiled()
def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """``scale · q Σ kᵀv`` over the whole sequence, float32 if ``wide``; and nothing, since a node has several results."""
    return forward(call_of(q, k, v, cu_seqlens, scale), torch.float32 if wide else v.dtype, None), v.new_empty(0)


@bidirectional.register_fake
def _(q, k, v, cu_seqlens, scale, wide):
    return v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype), v.new_empty(0)


@torch.library.custom_op("linattn::triton_bidirectional_backward", mutates_args=())
@recorded
@precompiled()
def bidirectional_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``q``, ``k`` and ``v``."""
    return backward(call_of(q, k, v, cu_seqlens, scale), do, FinalGradients()).heads[2:]


@bidirectional_backward.register_fake
def _(do, q, k, v, cu_seqlens, scale):
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _setup_context(ctx, inputs, output):
    *arrays, ctx.scale, _ = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, _):
    return (*_bidirectional_backward_call(do, *ctx.saved_tensors, ctx.scale), None, None, None)


_bidirectional_backward_call = register(bidirectional_backward)
bidirectional_call = register(bidirectional, _setup_context, _backward)
