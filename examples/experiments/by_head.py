"""Attention of stacked models at once: heads know nothing of each other, and so the models of a stack can be heads of one call.

``torch.func.vmap`` would take model after model where a kernel's backward pass has no rule for it (PyTorch's fused softmax), or
where models have parameters of their own (the bias of distances of FLASH).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]
HEADS = 2
"""The axis of the heads of ``[B, T, H, ·]``; an array of three dimensions is a parameter ``[H, ·, ·]``."""


def by_head(function: Function, *arrays: Tensor) -> Tensor:
    """``function(*arrays)``, ``[B, T, H, ·]``, whose heads are apart; under ``vmap`` the mapped axis is one of heads.

    There its backward pass computes it again.
    """
    stacked = torch._C._are_functorch_transforms_active()
    return Call.apply(function, *arrays) if stacked else function(*arrays)


class Call(torch.autograd.Function):
    """What :func:`by_head` computes."""

    @staticmethod
    def forward(function: Function, *arrays: Tensor) -> Tensor:
        return function(*arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *Gradients.apply(ctx.function, gradient, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Function, *arrays: Tensor) -> tuple[Tensor, int]:
        folded = [fold(x, d, info.batch_size) for x, d in zip(arrays, in_dims[1:], strict=True)]
        return unfold(Call.apply(function, *folded), info.batch_size), HEADS


class Gradients(torch.autograd.Function):
    """Those of the arrays, by PyTorch's own rules for what the function does; they have no gradient of their own."""

    @staticmethod
    def forward(function: Function, gradient: Tensor, *arrays: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in arrays]
            return torch.autograd.grad(function(*inputs), inputs, gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("by_head: its gradient has no gradient of its own")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Function, *arrays: Tensor) -> tuple[Any, Any]:
        folded = [fold(x, d, info.batch_size) for x, d in zip(arrays, in_dims[1:], strict=True)]
        found = [unfold(x, info.batch_size) for x in Gradients.apply(function, *folded)]
        return tuple(found), tuple(axis(x.dim() - 1) for x in found)


def axis(dimensions: int) -> int:
    """That of the heads of an array of one model."""
    return HEADS if dimensions > 3 else 0


def fold(x: Tensor, mapped: int | None, size: int) -> Tensor:
    """``size`` models' heads as heads."""
    x = x.expand(size, *x.shape) if mapped is None else x.movedim(mapped, 0)
    at = axis(x.dim() - 1)
    return x.movedim(0, at).flatten(at, at + 1)


def unfold(x: Tensor, size: int) -> Tensor:
    """Heads as those of ``size`` models."""
    return x.unflatten(axis(x.dim()), (size, -1))
