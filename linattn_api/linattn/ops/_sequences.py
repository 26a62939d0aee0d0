"""Rows that no sequence has: what is made of them token by token must not reach anything else."""

from __future__ import annotations

from typing import Any

__all__ = ["of_sequences"]


def of_sequences(xp: Any, x: Any, offsets: Any, slots: Any = None) -> Any:
    """``x [B, T, …]``, zero behind the last packed sequence, and in rows whose slot is padding.

    Whatever stands there, a map of zeros has a gradient that is finite, so that zero times it is zero: for the tokens, and for
    parameters, whose gradients are sums over all of them.
    """
    if offsets is not None:
        live = (xp.arange(x.shape[1], like=offsets) < offsets[-1]).reshape(1, x.shape[1], *[1] * (len(x.shape) - 2))
    elif slots is not None:
        live = (slots >= 0).reshape(x.shape[0], *[1] * (len(x.shape) - 1))
    else:
        return x
    return xp.where(live, x, xp.zeros_like(x))
