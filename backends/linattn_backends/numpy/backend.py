"""The oracle as a backend for NumPy arrays. All three forms of a family run its definition."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from linattn.plugin import form_methods

from .. import Numpy
from ..companions import decode_short_conv
from . import oracle
from .recurrence import FAMILIES

__all__ = ["NumpyBackend"]

OPTIONS = ("scale", "quad_scale", "lin_scale", "causal", "normalize", "output_final_state", "chunk_size")


def definition(op: str, form: str, arrays: Mapping[str, Any], *, normalize: bool = False, **keywords: Any) -> tuple[Any, Any]:
    """Run the definition of ``op``, whatever the form, and cast what it returns."""
    options = {"normalize": normalize, **{name: value for name, value in keywords.items() if name in OPTIONS}}
    given = {**arrays, **{name: value for name, value in keywords.items() if name not in OPTIONS}}
    o, state = oracle.forward(op, given, options)
    v = arrays["v"]
    return cast_like(v, o), cast(np.float64 if is_float64(v) else np.float32, state)


@form_methods({op: partial(definition, op) for op in (*FAMILIES, "mixed_attn")})
class NumpyBackend(Numpy):
    """Every form of every family by its definition, in float64: slow, exact, and the measure of the other backends.

    Methods take the parameters of the public functions, and ignore ``chunk_size`` where it is no part of the meaning.
    They return ``o`` in the dtype of ``v``, and the state in float32, or float64 if ``v`` is float64. Arrays of any
    float dtype are taken, the bfloat16 of ``ml_dtypes`` too.
    """

    def short_conv(
        self, x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, initial_state: Any = None,
        output_final_state: bool = False, cu_seqlens: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """The convolution by its definition."""
        arrays = dict(x=x, weight=weight, bias=bias, initial_state=initial_state, cu_seqlens=cu_seqlens)
        y, state = oracle.forward("short_conv", arrays, dict(activation=activation, output_final_state=output_final_state))
        return cast_like(x, y), cast(np.float64 if is_float64(x) else np.float32, state)

    decode_short_conv = staticmethod(decode_short_conv)

    def gated_rms_norm(
        self, x: Any, z: Any, weight: Any, *, activation: str = "silu", eps: float = 1e-5, norm_before_gate: bool = True,
        group_size: int | None = None,
    ) -> Any:  # fmt: skip
        """The gated norm by its definition."""
        options = dict(activation=activation, eps=eps, norm_before_gate=norm_before_gate, group_size=group_size)
        return cast_like(x, oracle.forward("gated_rms_norm", dict(x=x, z=z, weight=weight), options)[0])

    def vjp(self, op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any, d_state: Any) -> dict[str, Any]:
        """Pull the gradients of ``(o, final_state)`` of family ``op`` back to every float array given.

        Args:
            op: Family name, e.g. ``"gla"``.
            arrays: The arrays by parameter name, ``initial_state``, ``cu_seqlens`` and ``bias`` among them.
            options: The static keywords by name.
            d_o: Gradient of ``o [B, T, HV, V]``, or ``None`` for zero.
            d_state: Gradient of the final state ``[N, HV, K, V]``, or ``None`` for zero.

        Returns:
            Gradients by name, each in the shape and dtype of its array.
        """
        gradients = oracle.vjp(op, arrays, options, d_o, d_state)
        return {name: cast_like(arrays[name], gradient) for name, gradient in gradients.items()}


def is_float64(array: Any) -> bool:
    """Whether results are wanted in full precision."""
    return np.asarray(array).dtype == np.float64


def cast(dtype: Any, value: Any) -> Any:
    """A float result in ``dtype``; so every array of a ``MixedState``; ``None``, and its ``length``, as they are."""
    if isinstance(value, tuple):
        return type(value)(*(cast(dtype, array) for array in value))
    if value is None or value.dtype.kind == "i":
        return value
    with np.errstate(over="ignore"):  # beyond the largest float16 lies inf, as on any device
        return value.astype(dtype, copy=False)


def cast_like(array: Any, gradient: Any) -> Any:
    """A gradient, or an output, in the dtype of ``array``."""
    if isinstance(gradient, tuple):
        return type(gradient)(*map(cast_like, array, gradient))
    return cast(np.asarray(array).dtype, gradient)
