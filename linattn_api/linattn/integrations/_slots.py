"""States of sequences in a pool: read as copies, and written back where no gradient may be lost."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Slots", "wants_gradient"]


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether somebody will ask for a gradient of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class Slots:
    """The states of sequences in a pool. A negative index is padding. Nothing is read on the host.

    Args:
        pool: States ``[P, ...]``.
        N: How many sequences there are.
        indices: Their states ``[N]``. Default: state ``n`` for sequence ``n``.
    """

    def __init__(self, pool: Tensor, N: int, indices: Tensor | None) -> None:
        self.pool = pool
        self.N = N
        self.indices = None if indices is None else indices.long()

    def read(self) -> Tensor:
        """Copies of the states ``[N, ...]``; anything for padding."""
        if self.indices is None:
            return self.pool[: self.N].clone()
        return self.pool[self.indices.clamp(min=0)]

    def write(self, states: Tensor) -> None:
        """Put new states in the place of the old ones. Padding writes what the first sequence that is none writes."""
        states = states.to(self.pool.dtype)
        if self.indices is None:
            self.pool[: self.N] = states
            return
        live = self.indices >= 0
        states = torch.where(self._along(live, states), states, self.read())  # if all is padding, state 0 gets what it had
        rows = torch.where(live, torch.arange(self.N, device=live.device), live.int().argmax())
        self.pool[self.indices.clamp(min=0)[rows]] = states[rows]

    def masked(self, y: Tensor) -> Tensor:
        """``y [N, ...]``, zero for padding."""
        return y if self.indices is None else torch.where(self._along(self.indices >= 0, y), y, 0)

    def _along(self, live: Tensor, x: Tensor) -> Tensor:
        return live.reshape(-1, *[1] * (x.dim() - 1))
