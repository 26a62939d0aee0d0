"""Unit lower triangular systems ``(I + L) x = r``, ``L`` strictly lower triangular ``[..., C, C]``, ``C`` a power of two."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)⁻¹``, blocks merged from single tokens up: ``[[X, 0], [−Y L₂₁ X, Y]]``; never by powers of ``L``."""
    C = L.shape[-1]
    X = torch.ones_like(L.diagonal(dim1=-2, dim2=-1))[..., None, None]  # [..., i, b, b], never written to: it may be saved
    b = 1
    while b < C:
        blocks = L.unflatten(-1, (C // b, b)).unflatten(-3, (C // b, b))  # [..., i, b, j, b]
        below = blocks[..., 1::2, :, 0::2, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        first, second = X[..., 0::2, :, :], X[..., 1::2, :, :]
        upper = torch.cat((first, torch.zeros_like(first)), -1)
        lower = torch.cat((-(second @ below @ first), second), -1)
        X = torch.cat((upper, lower), -2)
        b *= 2
    return X.squeeze(-3)


def substitute(L: Tensor, beta: Tensor, r: Tensor, length: int) -> Tensor:
    """``x = beta ∘ (r − L x)`` token by token, ``beta [..., C, V]`` of its own for every column."""
    rows: list[Tensor] = []
    for t in range(length):
        row = r[..., t : t + 1, :]
        if rows:
            row = row - L[..., t : t + 1, :t] @ torch.cat(rows, -2)
        rows.append(beta[..., t : t + 1, :] * row)
    return torch.cat((*rows, torch.zeros_like(r[..., length:, :])), -2)


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
