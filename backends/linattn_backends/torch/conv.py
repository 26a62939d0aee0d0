"""The short convolution on a CPU: ``y_t = act(bias + Σ_i weight[:, i] x_{t−W+1+i})`` by blocks of tokens.

A block reads its window, the ``W−1`` inputs before its first token and its own. Backward, ``d = dy ∘ act'``, from sums that
are computed again, goes through every tap: ``dx_{t−W+1+i} += weight[:, i] d_t`` and ``dweight[:, i] = Σ_t x_{t−W+1+i} d_t``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import companions
from . import blocks
from .library import accumulation, plain

__all__ = ["short_conv"]


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(y, final_state)`` as the specification has it."""
    if cu_seqlens is not None or x.shape[1] < weight.shape[1] or not blocks.serves(x, weight, bias, initial_state):
        given = dict(activation=activation, initial_state=initial_state, output_final_state=output_final_state)
        return companions.short_conv(x, weight, bias, **given, cu_seqlens=cu_seqlens)
    with plain(x):
        y = blocks.run(Convolution(activation), x, weight, bias, initial_state)
    last = x[:, x.shape[1] - weight.shape[1] + 1 :].mT if output_final_state else None
    return y, None if last is None else last.to(accumulation(x.dtype), copy=True)


@dataclass(frozen=True)
class Convolution:
    """A pass over ``x [B, T, D]``, ``T ≥ W``, with ``weight [D, W]``, ``bias [D]`` and a state ``[B, D, W−1]``, if given."""

    activation: str | None

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> Tensor:
        taps = _taps(weight, x)
        y = x.new_empty(x.shape)
        for rows in _spans(x, weight):
            total = _sum(_window(x, state, rows, len(taps)), taps, bias)
            y[:, rows] = total if self.activation is None else torch.nn.functional.silu(total, inplace=True)
        return y

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> blocks.Arrays:
        taps, W = _taps(weight, x), weight.shape[1]
        dx, dtaps = x.new_zeros(x.shape, dtype=taps.dtype), torch.zeros_like(taps)
        dbias, dbefore = taps.new_zeros(x.shape[2]), taps.new_zeros(x.shape[0], W - 1, x.shape[2])
        for rows in _spans(x, weight):
            window, d = _window(x, state, rows, W), dy[:, rows].to(taps.dtype)
            if self.activation is not None:
                d = torch.ops.aten.silu_backward(d, _sum(window, taps, bias))
            reach = dx[:, rows.start - W + 1 : rows.stop] if rows.start else torch.zeros_like(window)
            for i in range(W):
                part = slice(i, i + d.shape[1])
                reach[:, part].addcmul_(d, taps[i])
                dtaps[i] += (window[:, part] * d).sum((0, 1))
            if not rows.start:
                dx[:, rows] += reach[:, W - 1 :]
                dbefore += reach[:, : W - 1]
            if bias is not None:
                dbias += d.sum((0, 1))
        gradients = dx, dtaps.T, dbias, dbefore.mT
        arrays = x, weight, bias, state
        return tuple(None if a is None else g.to(a.dtype) for g, a in zip(gradients, arrays, strict=True))

    def operations(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> Tensor:
        return companions.short_conv(x, weight, bias, activation=self.activation, initial_state=state)[0]


def _spans(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Blocks of tokens of all rows, each as long as the filter at least, so that only the first reads a state."""
    return blocks.spans(x.shape[1], x.shape[0] * x.shape[2], least=weight.shape[1])


def _taps(weight: Tensor, x: Tensor) -> Tensor:
    """``[W, D]`` in the dtype of sums."""
    return weight.T.to(accumulation(x.dtype)).contiguous()


def _window(x: Tensor, state: Tensor | None, rows: slice, W: int) -> Tensor:
    """What the tokens of a block read ``[B, W−1+n, D]``, in the dtype of sums."""
    dtype = accumulation(x.dtype)
    if rows.start:
        return x[:, rows.start - W + 1 : rows.stop].to(dtype).contiguous()
    first = x[:, rows].to(dtype)
    before = first.new_zeros(x.shape[0], W - 1, x.shape[2]) if state is None else state.mT.to(dtype)
    return torch.cat([before, first], 1)


def _sum(window: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """``bias + Σ_i weight[:, i] x_{t−W+1+i}`` of a block."""
    W = len(taps)
    n = window.shape[1] - W + 1
    total = window[:, :n] * taps[0]
    for i in range(1, W):
        total.addcmul_(window[:, i : i + n], taps[i])
    return total if bias is None else total.add_(bias)
