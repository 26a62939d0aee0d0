"""Arrays that are taken row by row, as they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..runtime.launch import launch
from .chunks import rows_contiguous
from .variant import Stage

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows:
    """Arrays ``[…, D]``, each of its own ``D``, as ``[M, H, D]``.

    Attributes:
        family: The operator that an error names.
        arrays: The arrays.
        M, H: How many rows, in two factors.
        strides: Those of ``M`` and ``H``, array after array.
    """

    family: str
    arrays: tuple[Tensor, ...]
    M: int
    H: int
    strides: tuple[int, ...]

    @classmethod
    def of(cls, family: str, *arrays: Tensor, heads: bool = False) -> Rows:
        """The arrays as they lie, if two strides say where rows are, else copies; with ``heads``, ``H`` is their number."""
        arrays = tuple(rows_contiguous(x) for x in arrays)
        lead = arrays[0].shape[:-1]
        for cut in (len(lead) - 1,) if heads else range(len(lead), -1, -1):
            strides = [one_stride(lead[part], x.stride()[:-1][part]) for x in arrays for part in (slice(cut), slice(cut, None))]
            if None not in strides:
                return cls(family, arrays, math.prod(lead[:cut]), math.prod(lead[cut:]), tuple(strides))
        return cls.of(family, *(x.contiguous() for x in arrays), heads=heads)

    @property
    def v(self) -> Tensor:
        """The array on whose device it is launched."""
        return self.arrays[0]

    def run(self, stage: Stage, count: int, *args: Any, **constants: Any) -> None:
        """Launch ``count`` programs of a stage's kernel."""
        launch(stage.kernel, count, self, *args, **constants, **stage.config)


def one_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several axes taken as one; ``None`` if there is none."""
    step, size = None, 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        step = stride if step is None else step
        if stride != step * size:
            return None
        size *= n
    return step or 0
