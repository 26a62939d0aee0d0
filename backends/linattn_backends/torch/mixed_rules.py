"""Custom ops of ``mixed_attn``, whatever computes them: their results, and how gradients come back through them.

Such an op takes twelve arrays: those of the new tokens ``q_quad, k_quad, q_lin, k_lin, v``, then ``bias``, the five of the
state gone on from, and ``cu_seqlens``; then ``C, quad_scale, lin_scale, causal`` and more. It returns ``o`` and the five arrays
of the final state. The op of its gradients takes ``do``, the gradients of that state's four float arrays, the twelve arrays,
and the four options; it returns gradients of the float arrays given, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .library import accumulation

__all__ = ["Rules", "empty_gradients", "empty_results", "rules"]

ARRAYS, FLOATS, OPTIONS = 12, 10, 4


class Rules(NamedTuple):
    """The rules of an op, as :func:`.transforms.register` takes them."""

    setup_context: Callable[..., None]
    backward: Callable[..., tuple[Any, ...]]


def empty_results(k_quad: Tensor, k_lin: Tensor, v: Tensor, cu_seqlens: Tensor | None, C: int) -> tuple[Tensor, ...]:
    """Uninitialised results of an op, in the shapes and dtypes of its own."""
    B, _, H, K = k_quad.shape
    L, V = k_lin.shape[3], v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = (N, H, L, V), (N, C, H, K), (N, C, H, L), (N, C, H, V)
    states = (v.new_empty(shape, dtype=accumulation(v.dtype)) for shape in shapes)
    return v.new_empty(v.shape), *states, v.new_empty((N,), dtype=torch.int32)


def empty_gradients(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Uninitialised results of the op of gradients, from the arguments of the op."""
    return [x.new_empty(x.shape) for x in inputs[:FLOATS] if x is not None]


def rules(gradients: Callable[..., Any]) -> Rules:
    """The rules of an op; ``gradients`` runs the op of its gradients under any transform.

    An op may return an empty state: then its fifth option says whether it does not.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, more = inputs[ARRAYS : ARRAYS + OPTIONS], inputs[ARRAYS + OPTIONS :]
        ctx.final, ctx.rest = more[0] if more else True, len(inputs) - FLOATS
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[5])
        ctx.save_for_backward(*inputs[:ARRAYS])

    def backward(ctx: Any, do: Tensor | None, *dfinal: Tensor | None) -> tuple[Any, ...]:
        arrays = ctx.saved_tensors
        given = do, *(dfinal[:4] if ctx.final else (None,) * 4)
        if all(d is None for d in given):
            return (None,) * (FLOATS + ctx.rest)
        grads = iter(gradients(*given, *arrays, *ctx.options))
        return (*(None if x is None else next(grads) for x in arrays[:FLOATS]), *(None,) * ctx.rest)

    return Rules(setup_context, backward)
