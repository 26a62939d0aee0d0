"""Rotary positions, on arrays of any framework."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .errors import DtypeError, OptionError, ShapeError
from .feature_maps.base import check_float, check_place
from .frameworks import Framework, framework_of
from .validate import check_offsets, check_packing

__all__ = ["rotary"]

Array = TypeVar("Array")


def rotary(
    x: Array,
    *,
    positions: Array | None = None,
    cu_seqlens: Array | None = None,
    base: float = 10000.0,
    interleaved: bool = False,
) -> Array:
    """Rotary positions: pair ``i`` of a token at position ``p`` turns by ``p · base^{−2i/K}`` (RoFormer, Su et al. 2021,
    eq. 34).

    ``rotary(q_t)·rotary(k_s)`` depends on ``t − s`` alone. It fits queries and keys, and features ``φ(q)``, ``φ(k)`` as well.
    Computed in float32 (float64 for float64) and rounded once.

    Args:
        x: ``[B, T, H, K]``, ``K`` even; any float dtype.
        positions: Integers ``[T]`` or ``[B, T]``. Default ``0 … T−1``.
        cu_seqlens: Offsets ``[N+1]`` of packed sequences, ``B == 1``: positions start from 0 in each.
        base: Wavelengths are ``2π … 2π · base`` tokens, positive. Default 10000.
        interleaved: Pairs are ``(x_2i, x_2i+1)``, as in the paper; by default ``(x_i, x_{i+K/2})``, as in most models.

    Returns:
        Array of the shape and dtype of ``x``.

    Raises:
        ShapeError: a rank or size is wrong, or ``K`` is odd.
        DtypeError: ``x`` holds no floats, or positions or offsets no integers.
        FrameworkError: positions or offsets belong to another framework than ``x``.
        DeviceError: they are on another device.
        OptionError: ``base`` is no positive number, or both positions and offsets are given.
    """
    xp = framework_of(x, "x", "rotary: ")
    check_float(xp, "rotary: ", "x", x)
    T, K = _check_shape(x)
    _check_base(base)
    if positions is not None and cu_seqlens is not None:
        raise OptionError("rotary: positions and cu_seqlens both say where tokens stand: give one of them")
    wide: Any = xp.astype(x, xp.accumulation(x))
    places = _places(xp, wide, T, positions, cu_seqlens)
    angle = places[..., None, None] * xp.constant(_frequencies, (K, float(base)), like=wide)
    cos, sin = xp.cos(angle), xp.sin(angle)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else (wide[..., : K // 2], wide[..., K // 2 :])
    turned = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        out = xp.concat([part[..., None] for part in turned], axis=-1).reshape(wide.shape)
    else:
        out = xp.concat(turned, axis=-1)
    return xp.astype(out, xp.dtype(x))


def _check_shape(x: Any) -> tuple[int, int]:
    if len(x.shape) != 4 or x.shape[-1] % 2:
        raise ShapeError(f"rotary: x must be [B, T, H, K] with K even, got {list(x.shape)}")
    return x.shape[1], x.shape[-1]


def _check_base(base: Any) -> None:
    if isinstance(base, bool) or not isinstance(base, (int, float, np.number)) or not 0 < base < math.inf:
        raise OptionError(f"rotary: base must be a positive number, got {base!r}")


def _places(xp: Framework, x: Any, T: int, positions: Any, cu_seqlens: Any) -> Any:
    """Position of each token in the dtype of ``x``: ``[T]``, or ``[B, T]``."""
    if cu_seqlens is not None:
        return xp.astype(_places_in_sequences(xp, x, T, cu_seqlens), xp.dtype(x))
    if positions is None:
        return xp.arange(T, like=x)
    _check_integers(xp, x, "positions", positions)
    if tuple(positions.shape) not in ((T,), tuple(x.shape[:2])):
        raise ShapeError(f"rotary: positions must be [T] = [{T}] or [B, T] = {list(x.shape[:2])}, got {list(positions.shape)}")
    return xp.astype(positions, xp.dtype(x))


def _places_in_sequences(xp: Framework, x: Any, T: int, cu_seqlens: Any) -> Any:
    """How far each token is from the start of its sequence; a token behind the last one, from that one's end."""
    _check_integers(xp, x, "cu_seqlens", cu_seqlens)
    check_packing("rotary", cu_seqlens.shape, x.shape[0])
    if not xp.tracing() and (offsets := xp.offsets(cu_seqlens)) is not None:
        check_offsets("rotary", offsets, T)
    tokens = xp.arange(T, like=cu_seqlens)
    return tokens - cu_seqlens[xp.count_up_to(cu_seqlens, T) - 1]


def _check_integers(xp: Framework, x: Any, name: str, value: Any) -> None:
    check_place(xp, "rotary: ", "x", x, name, value)
    if xp.dtype(value) not in ("int32", "int64"):
        raise DtypeError(f"rotary: {name} must be int32 or int64, got {xp.dtype(value)}")


def _frequencies(K: int, base: float) -> NDArray[np.float64]:
    """``base^{−2i/K}`` for pair ``i``: ``[K/2]``."""
    return base ** (-2.0 * np.arange(K // 2) / K)
