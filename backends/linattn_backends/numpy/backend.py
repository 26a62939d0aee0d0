"""The oracle as a backend for NumPy arrays. All three forms of a family run its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from linattn.plugin import Backend

from . import oracle

__all__ = ["NumpyBackend"]


class NumpyBackend(Backend):
    """Every form of every family by its definition, in float64: slow, exact, and the measure of the other backends.

    Methods take the parameters of the public functions, and ignore ``chunk_size`` where it is no part of the meaning.
    They return ``o`` in the dtype of ``v``, and the state in float32, or float64 if ``v`` is float64. Arrays of any
    float dtype are taken, the bfloat16 of ``ml_dtypes`` too.
    """

    name = "numpy"
    api = ">=1,<2"
    frameworks = ("numpy",)

    # fmt: off
    def recurrent_linear_attn(
        self, q, k, v, *,
        scale=None, causal=True, normalize=False,
        initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S = S⁻ + kᵀv;  o = scale · q S``."""
        return run("linear_attn", locals())

    chunk_linear_attn = parallel_linear_attn = recurrent_linear_attn

    def recurrent_simple_gla(
        self, q, k, v, g, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S = e^g S⁻ + kᵀv;  o = scale · q S``."""
        return run("simple_gla", locals())

    chunk_simple_gla = parallel_simple_gla = recurrent_simple_gla

    def recurrent_gla(
        self, q, k, v, g, gv=None, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S = Diag(e^g) S⁻ Diag(e^gv) + kᵀv;  o = scale · q S``."""
        return run("gla", locals())

    chunk_gla = parallel_gla = recurrent_gla

    def recurrent_rwkv6(
        self, q, k, v, g, u, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S = Diag(e^g) S⁻ + kᵀv;  o = scale · q (S⁻ + Diag(u) kᵀv)``."""
        return run("rwkv6", locals())

    chunk_rwkv6 = parallel_rwkv6 = recurrent_rwkv6

    def recurrent_delta_rule(
        self, q, k, v, beta, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S = S⁻ + kᵀ(beta ∘ (v − k S⁻));  o = scale · q S``."""
        return run("delta_rule", locals())

    chunk_delta_rule = parallel_delta_rule = recurrent_delta_rule

    def recurrent_gated_delta_rule(
        self, q, k, v, g, beta, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S' = e^g S⁻;  S = S' + kᵀ(beta ∘ (v − k S'));  o = scale · q S``."""
        return run("gated_delta_rule", locals())

    chunk_gated_delta_rule = parallel_gated_delta_rule = recurrent_gated_delta_rule

    def recurrent_kda(
        self, q, k, v, g, beta, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S' = Diag(e^g) S⁻;  S = S' + kᵀ(beta ∘ (v − k S'));  o = scale · q S``."""
        return run("kda", locals())

    chunk_kda = parallel_kda = recurrent_kda

    def recurrent_dplr(
        self, q, k, v, g, a, b, *,
        scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None,
    ):
        """``S = Diag(e^g) S⁻ + bᵀ(a S⁻) + kᵀv;  o = scale · q S``."""
        return run("dplr", locals())

    chunk_dplr = parallel_dplr = recurrent_dplr

    def recurrent_mixed_attn(
        self, q_quad, k_quad, q_lin, k_lin, v, *,
        bias=None, quad_scale=None, lin_scale=None, causal=True,
        initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=256,
    ):
        """Squared ReLU attention inside a chunk, linear attention over whole chunks: see ``mixed.py``."""
        return run("mixed_attn", locals())

    chunk_mixed_attn = parallel_mixed_attn = recurrent_mixed_attn
    # fmt: on

    def vjp(self, op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any, d_state: Any) -> dict[str, Any]:
        """Pull the gradients of ``(o, final_state)`` of family ``op`` back to every float array given.

        Args:
            op: Family name, e.g. ``"gla"``.
            arrays: The arrays by parameter name, ``initial_state``, ``cu_seqlens`` and ``bias`` among them.
            options: The static keywords by name.
            d_o: Gradient of ``o [B, T, HV, V]``, or ``None`` for zero.
            d_state: Gradient of the final state ``[N, HV, K, V]``, or ``None`` for zero.

        Returns:
            Gradients by name, each in the shape and dtype of its array, or in float64 if ``v`` is float64.
        """
        gradients = oracle.vjp(op, arrays, options, d_o, d_state)
        if is_float64(arrays["v"]):
            return gradients
        return {name: cast_like(arrays[name], gradient) for name, gradient in gradients.items()}


OPTIONS = ("scale", "quad_scale", "lin_scale", "causal", "normalize", "output_final_state", "chunk_size")


def run(op: str, parameters: dict[str, Any]) -> tuple[Any, Any]:
    """Run the definition of ``op`` on the parameters of a method, and cast what it returns."""
    options = {name: value for name, value in parameters.items() if name in OPTIONS}
    arrays = {name: value for name, value in parameters.items() if name not in (*OPTIONS, "self")}
    o, state = oracle.forward(op, arrays, options)
    return cast_like(arrays["v"], o), cast(np.float64 if is_float64(arrays["v"]) else np.float32, state)


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
