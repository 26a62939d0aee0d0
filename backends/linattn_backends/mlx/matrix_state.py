"""The differentiable operation behind every matrix-state family."""

from __future__ import annotations

import mlx.core as mx

from . import operations
from .cores import Arrays
from .operations import Options
from .segments import accumulation, from_heads, to_heads
from .selection import engine_of, facts_of_arrays
from .transforms import differentiable

Result = tuple[mx.array, mx.array | None]


def matrix_state(arrays: Arrays, options: Options) -> Result:
    """``o``, and the final states if they are to be kept."""
    v, S0, cu_seqlens = arrays["v"], arrays.get("initial_state"), arrays.get("cu_seqlens")
    B, T, HV, V = v.shape
    dtype = accumulation(v.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.size == 0 or N == 0:
        nothing = mx.zeros((N, HV, arrays["k"].shape[-1], V), dtype) if S0 is None else S0.astype(dtype)
        return mx.zeros_like(v), nothing if options.keep else None
    engine = engine_of(facts_of_arrays(arrays, options.form))
    if engine is operations and options.form == "recurrent" and cu_seqlens is None and T == 1:
        o, S = operations.decode(arrays, options.scale)
        return o, S if options.keep else None
    outputs = differentiable(
        lambda arrays: engine.forward(arrays, options),
        lambda arrays, cotangents, outputs: engine.backward(arrays, cotangents, outputs, options),
    )(arrays)
    return outputs["o"], outputs.get("final")


def bidirectional(arrays: Arrays, cu_seqlens: mx.array | None, scale: float) -> mx.array:
    """``o_t = scale · q_t Σ_s k_sᵀ v_s`` over the whole sequence: two matmuls.

    Packed, a first pass finds the sum of each sequence and a second one, which writes nothing, reads it.
    """
    v = arrays["v"]
    if cu_seqlens is None:
        if v.size == 0:
            return mx.zeros_like(v)
        q, k, x = (to_heads(y, y.shape[1], v.shape[2], accumulation(v.dtype)) for y in (arrays["q"], arrays["k"], v))
        return from_heads(q @ (k.swapaxes(-1, -2) @ x) * scale).astype(v.dtype)
    _, final = matrix_state({**arrays, "cu_seqlens": cu_seqlens}, Options("chunk", 0.0, None, True))
    nothing = {**arrays, "k": mx.zeros_like(arrays["k"]), "v": mx.zeros_like(v)}
    reading = Options("chunk", scale, None, False)
    return matrix_state({**nothing, "initial_state": final, "cu_seqlens": cu_seqlens}, reading)[0]
