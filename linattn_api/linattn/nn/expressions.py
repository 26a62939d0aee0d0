# pyright: basic
"""Functions of several operations that parts and layers share, as every framework can say them.

A framework in which each operation reads and writes memory says in its ``functions`` those that it has in one.
"""

from __future__ import annotations

from typing import Any

from ..frameworks import framework_of

__all__ = ["Expressions", "joined_heads"]


def joined_heads(x: Any) -> Any:
    """``[B, T, H, V]`` to ``[B, T, H·V]``, also where there are no tokens to infer a size of."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


class Expressions:
    """Base class of a framework's ``functions``."""

    @staticmethod
    def convolves(x: Any) -> bool:
        """Whether a short convolution of ``x`` takes less time than the sums and products that it stands for."""
        return False

    @staticmethod
    def multiply_add(x: Any, y: Any, z: Any) -> Any:
        """``x + y ∘ z``."""
        return x + y * z

    @staticmethod
    def unit(x: Any, eps: float) -> Any:
        """``x · (Σ x² + ε)^{-1/2}`` over the last axis."""
        return x * ((x * x).sum(-1)[..., None] + eps) ** -0.5

    @staticmethod
    def group_norm(x: Any, weight: Any, bias: Any, eps: float) -> Any:
        """``[B, T, H·V]``: the layer norm of each head of ``x [B, T, H, V]``, in at least float32; ``weight, bias [H·V]``."""
        xp = framework_of(x)
        wide = xp.astype(x, xp.accumulation(x))
        wide = wide - wide.mean(-1)[..., None]
        wide = wide * ((wide * wide).mean(-1)[..., None] + eps) ** -0.5
        wide = joined_heads(wide)
        if weight is not None:
            wide = wide * xp.astype(weight, xp.dtype(wide)) + xp.astype(bias, xp.dtype(wide))
        return xp.astype(wide, xp.dtype(x))
