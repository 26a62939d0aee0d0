# pyright: basic
"""Batches of different lengths: tokens of a padded batch laid end to end, with sizes that depend on no data."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..errors import ShapeError
from ..frameworks import Framework, framework_of

__all__ = ["Packing", "positions"]


class Packing(NamedTuple):
    """Where each token of a padded batch goes: those of the sequences first, one sequence after the other, then the padding.

    Operators leave tokens behind the last offset alone, so nothing has to be cut off, no size is read from the device, and a
    compiled function serves every mask.

    Attributes:
        order: For each packed token, where it stood in the flattened batch ``[B·T]``.
        place: For each token of the flattened batch, where it goes ``[B·T]``.
        offsets: ``cu_seqlens`` ``[B+1]``, int32.
        live: The mask ``[B, T]``, bool.
    """

    order: Any
    place: Any
    offsets: Any
    live: Any

    @classmethod
    def of(cls, mask: Any, x: Any) -> Packing:
        """The packing of a batch ``x [B, T, D]`` by its mask ``[B, T]``, true or nonzero where a token is one.

        Raises:
            ShapeError: The mask is not ``[B, T]``.
        """
        if tuple(mask.shape) != tuple(x.shape[:2]):
            raise ShapeError(f"mask must be [B, T] = {list(x.shape[:2])}, got {list(mask.shape)}")
        xp = framework_of(mask, "mask")
        live = mask != 0
        ones = xp.astype(live, "int32")
        flat = ones.reshape(-1)
        before = xp.astype(xp.module.cumsum(flat, 0), "int32")
        padding_before = xp.astype(xp.module.cumsum(1 - flat, 0), "int32")
        place = xp.where(flat != 0, before, flat.sum() + padding_before) - 1
        ends = xp.astype(xp.module.cumsum(ones.sum(1), 0), "int32")
        offsets = xp.concat([xp.full((1,), 0, like=ends), ends], axis=0)
        return cls(xp.module.argsort(place), place, offsets, live)

    def pack(self, x: Any) -> Any:
        """``[B, T, D]`` to ``[1, B·T, D]``."""
        B, T, D = x.shape
        return x.reshape(1, B * T, D)[:, self.order]

    def unpack(self, y: Any) -> Any:
        """``[1, B·T, D]`` to ``[B, T, D]``, with zeros where there is padding."""
        B, T = self.live.shape
        y = y[:, self.place].reshape(B, T, y.shape[-1])
        return framework_of(y).where(self.live[..., None], y, y * 0)


def positions(xp: Framework, like: Any, offsets: Any, lengths: Any) -> Any:
    """The position of each token in its sequence ``[B, T]``, int32, counted from its start in earlier calls.

    Args:
        xp: The framework.
        like: The tokens ``[B, T, …]``.
        offsets: ``cu_seqlens [N+1]`` int32, or ``None`` for sequences that are rows.
        lengths: Tokens of each sequence read before ``[N]`` int32, or ``None`` for none.
    """
    _B, T = like.shape[:2]
    steps = counted(xp, like, T)
    if offsets is None:
        return steps[None] if lengths is None else lengths[:, None] + steps[None]
    ends = offsets[1:]
    sequence = xp.astype((ends[None] <= steps[:, None]).sum(-1), "int32")
    sequence = xp.minimum(sequence, offsets.shape[0] - 2)  # padding behind the last counts on
    start = steps - offsets[sequence]
    return (start if lengths is None else start + lengths[sequence])[None]


def counted(xp: Framework, like: Any, T: int) -> Any:
    """``0 … T-1`` int32 where ``like`` lives."""
    return xp.arange(T, like=zeros(xp, 1, like))


def zeros(xp: Framework, size: int, like: Any) -> Any:
    """``size`` zeros, int32, where ``like`` lives."""
    return xp.astype(xp.numbers([0.0] * size, like=like), "int32")
