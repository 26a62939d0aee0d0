"""What is read off the arrays of a call with matrices for states, whatever core runs it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.device import Properties
from .variant import Facts, unfit, whole_lines

__all__ = ["MatrixStateCall", "unaligned"]


class MatrixStateCall:
    """A call's arrays, of the specification's names, and what follows from their shapes."""

    q: Tensor
    v: Tensor
    g: Tensor | None
    cu: Tensor | None

    @property
    def gate(self) -> int:
        """The kind of gate on the keys: 0 none, 1 a scalar, 2 a vector."""
        return 0 if self.g is None else self.g.dim() - 2

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1

    @property
    def group(self) -> int:
        """Value heads that share a query/key head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of states and of what else products take from memory. float16 has not the range."""
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else torch.float32


def unaligned(device: Properties, facts: Facts, arrays: dict[str, Tensor | None]) -> tuple[str, ...]:
    """Which arrays kernels for Hopper cannot copy as they lie; none where there are no such kernels."""
    if device.not_hopper is not None or unfit(facts) is not None:
        return ()
    return tuple(name for name, x in arrays.items() if not whole_lines(x))
