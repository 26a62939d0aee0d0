"""Unit lower triangular systems ``(I + L) x = r``, ``L`` strictly lower triangular ``[..., C, C]``, ``C`` a power of two."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)⁻¹``, blocks merged from single tokens up: ``[[X, 0], [−Y L₂₁ X, Y]]``; never by powers of ``L``."""
    C = L.shape[-1]
    inverse = torch.zeros_like(L)
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    b = 1
    while b < C:
        blocks = L.unflatten(-1, (C // b, b)).unflatten(-3, (C // b, b))  # [..., i, b, j, b]
        built = inverse.unflatten(-1, (C // b, b)).unflatten(-3, (C // b, b))
        diagonal = built.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., i, b, b]
        below = blocks[..., 1::2, :, 0::2, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        target = built[..., 1::2, :, 0::2, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        target.copy_((diagonal[..., 1::2, :, :] @ below @ diagonal[..., 0::2, :, :]).neg_())
        b *= 2
    return inverse


def substitute(L: Tensor, beta: Tensor, r: Tensor, length: int) -> Tensor:
    """``x = beta ∘ (r − L x)`` token by token, ``beta [..., C, V]`` of its own for every column."""
    x = torch.zeros_like(r)
    for t in range(length):
        row = r[..., t : t + 1, :]
        if t:
            row = row - L[..., t : t + 1, :t] @ x[..., :t, :]
        x[..., t : t + 1, :] = beta[..., t : t + 1, :] * row
    return x


def substitute_transposed(L: Tensor, beta: Tensor, d: Tensor, length: int) -> Tensor:
    """``y = d − Lᵀ (beta ∘ y)``, from the last token to the first: the adjoint of :func:`substitute`."""
    y = d.clone()
    scaled = torch.zeros_like(d)
    for t in reversed(range(length)):
        row = y[..., t : t + 1, :]
        if t + 1 < length:
            row -= L[..., t + 1 : length, t : t + 1].mT @ scaled[..., t + 1 : length, :]
        scaled[..., t : t + 1, :] = beta[..., t : t + 1, :] * row
    return y
