"""What every feature map is, and what those with parameters or random numbers share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ..errors import DeviceError, DtypeError, FrameworkError, OptionError, ShapeError
from ..frameworks import FLOAT_DTYPES, Framework, framework_of

__all__ = [
    "HIGHEST",
    "LEAST",
    "FeatureMap",
    "Wide",
    "bounded_softmax",
    "check_fit",
    "check_float",
    "check_place",
    "check_whole",
    "learned",
    "outer",
    "parameter",
    "power",
    "rectified",
]

HIGHEST = 35.0
"""Exponents of a map are held within ± this, so that products of two features, ``e^70``, can be summed over millions of tokens
in float32. Beyond, the sum of weights is infinite, and so a normalised output, and every gradient, not a number."""

LEAST = math.exp(-HIGHEST)
"""Features that are a softmax are held to this and more. Where those of a query and of a key are large in different places, all
their products would leave float32, and an output, divided by the sum of them, be ``0 / 0``."""


class FeatureMap:
    """Base class of feature maps: ``map(x)`` turns ``[…, K]`` into ``[…, K']``.

    Attributes:
        signed: True if ``φ(q)·φ(k)`` can be negative. Dividing by a sum of such weights (``normalize=True``) can divide by
            nearly zero, so that is warned of.
        positional: True if features depend on where a token is in its sequence; such a map defines :meth:`at`.
        axes: The axes of those of its arrays that are no parameters, by name, e.g. ``{"positions": "B T"}``. What else of
            floats the fields of a dataclass hold are parameters, which a layer takes for its own.
    """

    signed: ClassVar[bool] = False
    positional: ClassVar[bool] = False
    axes: ClassVar[Mapping[str, str]] = {}

    def __call__(self, x: Any) -> Any:
        """Features of ``x``, an array ``[…, K]`` of any framework; same dtype and device."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def at(self, positions: Any) -> Self:
        """The map of tokens that are not the first of their sequences, which layers call for.

        Args:
            positions: Of the tokens in their sequences ``[B, T]``, or ``[1, T]`` for all rows: integers.
        """
        return self

    def signed_within(self, T: int) -> bool:
        """Whether the weights of ``T`` tokens in a row can be negative; a map that depends on distances knows better."""
        return self.signed


class Wide(FeatureMap):
    """A map that computes in the accumulation dtype, and rounds its features once."""

    def __call__(self, x: Any) -> Any:
        xp = framework_of(x, "x")
        check_float(xp, type(self).__name__.lower() + ": ", "x", x)
        return xp.astype(self.features_of(xp, xp.astype(x, xp.accumulation(x))), xp.dtype(x))

    def features_of(self, xp: Framework, x: Any) -> Any:
        """Features of ``x``, which is float32 or float64."""
        raise NotImplementedError


def learned(phi: FeatureMap) -> dict[str, Any]:
    """The parameters of a map by name: arrays of floats among the fields of a dataclass, but those that have ``axes``."""
    found = {f.name: getattr(phi, f.name) for f in fields(phi) if f.init} if is_dataclass(phi) else {}
    return {name: x for name, x in found.items() if name not in phi.axes and _has_floats(x)}


def _has_floats(x: Any) -> bool:
    """Whether ``x`` is an array of floats, in a container of a framework's for parameters or not; a number is none."""
    return hasattr(x, "shape") and not isinstance(x, np.generic) and "float" in str(getattr(x, "dtype", ""))


def rectified(xp: Framework, x: Any) -> Any:
    """``max(x, 0)``, with NaN kept."""
    return xp.where(x < 0, xp.zeros_like(x), x)


def power(xp: Framework, y: Any) -> Any:
    """``exp(y)``, ``y`` held within ``±HIGHEST``, with NaN kept; no gradient passes beyond."""
    bound = xp.full((), HIGHEST, like=y)
    return xp.exp(-xp.maximum(-xp.maximum(y, -bound), -bound))


def bounded_softmax(xp: Framework, y: Any) -> Any:
    """``softmax(y)`` over the last axis, held to :data:`LEAST` and more, with NaN kept; no gradient passes below."""
    return xp.maximum(xp.softmax(y), xp.full((), LEAST, like=y))


def outer(x: Any) -> Any:
    """``vec(x xᵀ)``: ``[…, K]`` to ``[…, K²]``, so that ``outer(q)·outer(k) = (q·k)²``."""
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], x.shape[-1] ** 2)


def parameter(xp: Framework, x: Any, owner: str, name: str, value: Any, symbols: str, sizes: Sequence[int | None]) -> Any:
    """A map's parameter in the dtype of ``x``, once it is known to fit, as :func:`check_fit` has it, and to be floats."""
    check_fit(xp, x, owner, name, value, symbols, sizes)
    check_float(xp, f"{owner}: ", name, value)
    return xp.astype(value, xp.dtype(x))


def check_fit(xp: Framework, x: Any, owner: str, name: str, value: Any, symbols: str, sizes: Sequence[int | None]) -> None:
    """An array that belongs to a map is of the framework, on the device and of the sizes it has to be.

    Args:
        xp: The framework of ``x``.
        x: What the map is applied to, in the accumulation dtype.
        owner: The map's name, for messages.
        name: The parameter's name.
        value: The parameter.
        symbols: Its symbolic shape, e.g. ``"H K D"``.
        sizes: The sizes expected, ``None`` where any will do.
    """
    check_place(xp, f"{owner}: ", "x", x, name, value)
    shape, named = tuple(value.shape), symbols.split()
    fits = len(shape) == len(sizes) and all(want in (None, size) for want, size in zip(sizes, shape, strict=True))
    if not fits:
        expected = ", ".join([symbol if size is None else str(size) for symbol, size in zip(named, sizes, strict=True)])
        raise ShapeError(f"{owner}: {name} must be [{', '.join(named)}] = [{expected}], got {list(shape)}")


def check_place(xp: Framework, where: str, first: str, x: Any, name: str, value: Any) -> None:
    """``value`` is an array of the framework and on the device of ``x``, which is called ``first``."""
    other = framework_of(value, name, where)
    if other is not xp:
        raise FrameworkError(
            f"{where}{name} is a {other.name} array but {first} is a {xp.name} array: convert it, nothing is copied for you"
        )
    here, there = xp.placement(x), xp.placement(value)
    if here and there and here != there:
        raise DeviceError(f"{where}{name} is on {there} but {first} is on {here}: move it, nothing is copied for you")


def check_float(xp: Framework, where: str, name: str, value: Any) -> None:
    """``value`` has a float dtype."""
    if xp.dtype(value) not in FLOAT_DTYPES:
        raise DtypeError(f"{where}{name} must be {', '.join(FLOAT_DTYPES[:-1])} or {FLOAT_DTYPES[-1]}, got {xp.dtype(value)}")


def check_whole(owner: str, least: int = 1, **options: Any) -> None:
    """Each option is an integer, of Python or NumPy, and at least ``least``."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise OptionError(f"{owner}: {name} must be an integer of at least {least}, got {value!r}")
