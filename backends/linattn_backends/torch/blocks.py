"""Passes over memory in eager calls on a CPU, a block of rows at a time.

A chain of element-wise operations on whole arrays reads and writes memory in each of them. Here a block goes through all of
them while a core's cache holds it, and backward what is in between is computed again in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from .transforms import asks_for_gradients, unwatched

__all__ = ["Pass", "run", "serves", "spans"]

NUMBERS = 1 << 17
"""In a block: half a megabyte in float32."""

Arrays = tuple[Tensor | None, ...]


class Pass(Protocol):
    """What is computed of some arrays."""

    def forward(self, *arrays: Tensor | None) -> Tensor:
        """The output."""
        ...

    def backward(self, d: Tensor, *arrays: Tensor | None) -> Arrays:
        """The gradient of each array, of the output's ``d``."""
        ...

    def operations(self, *arrays: Tensor | None) -> Tensor:
        """The output by operations that PyTorch differentiates as often as it is asked to."""
        ...


def serves(*arrays: Tensor | None) -> bool:
    """Whether arrays are on a CPU, and nobody traces, maps or differentiates forward what is done to them."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or not unwatched(arrays):
        return False
    return all(x is None or (x.is_cpu and not is_legacy_batchedtensor(x)) for x in arrays)


def run(what: Pass, *arrays: Tensor | None) -> Tensor:
    """The output of a pass, with gradients where these will be asked for."""
    return _Differentiable.apply(what, *arrays) if asks_for_gradients(arrays) else what.forward(*arrays)


def spans(rows: int, width: int, least: int = 1) -> Iterator[slice]:
    """Blocks of ``rows``, at least so many in each but the last one, ``width`` numbers in a row."""
    step = max(least, NUMBERS // max(1, width))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, what, *arrays):
        ctx.what = what
        ctx.save_for_backward(*arrays)
        return what.forward(*arrays)

    @staticmethod
    def backward(ctx, d):
        arrays, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()  # a gradient that is to be differentiated itself
        if not again and serves(d, *arrays):
            return (None, *ctx.what.backward(d, *arrays))
        with torch.enable_grad():
            # Aliases: where one array was made of another, the way between them is not the pass's to go.
            arrays = [None if x is None else x.view_as(x) for x in arrays]
            y = ctx.what.operations(*arrays)
        inputs = [x for x, asked in zip(arrays, wanted, strict=True) if asked]
        found = iter(torch.autograd.grad(y, inputs, d, create_graph=again))
        return (None, *(next(found) if asked else None for asked in wanted))
