"""One call of a matrix-state family: a scan over segments, each computed again in the backward pass.

What the backward pass keeps is the inputs and the state before each segment, ``[segments, B, HV, K, V]``; nothing is kept for
a token. The body of the scan is differentiated by JAX under ``jax.checkpoint``, so that ``jvp`` and second derivatives work
too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..chunks import CHUNK, CHUNKS_A_SEGMENT, LONGEST, chunk_length, widest
from .compat import Array, arrays_of, checkpoint_in_scan, varying
from .cores import Arrays, core_of, nothing, token_step
from .layout import Bounds, Packed, Rows

OPERANDS = ("q", "k", "v", "g", "gv", "beta", "a", "b", "u")


def accumulation(dtype: Any) -> Any:
    """The dtype of sums and states for operands of ``dtype``."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


@partial(jax.jit, static_argnames=("form", "scale", "chunk_size", "keep"))
def matrix_state(
    arrays: Arrays,
    initial_state: Array | None,
    cu_seqlens: Array | None,
    *,
    form: str,
    scale: float,
    chunk_size: int | None,
    keep: bool,
) -> tuple[Array, Array | None]:
    """``o``, and the final states if they are to be kept."""
    v = arrays["v"]
    B, T, HV, V = v.shape
    K, dtype = arrays["k"].shape[-1], accumulation(v.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    S0 = None if initial_state is None else initial_state.astype(dtype)
    if v.size == 0 or N == 0:
        nothing = jnp.zeros((N, HV, K, V), dtype) if S0 is None else S0
        return jnp.zeros_like(v), nothing if keep else None
    if form == "recurrent" and cu_seqlens is None and T == 1:
        o, S = decode(arrays, scale, S0)
        return o, S if keep else None
    C = chunk_length(form, chunk_size, T, cu_seqlens is not None, widest(solves="beta" in arrays or "a" in arrays))
    together = 1 if form in ("recurrent", "parallel") else max(CHUNKS_A_SEGMENT * CHUNK // C, 1)
    places = Rows(T, C, together) if cu_seqlens is None else Packed(T, cu_seqlens, C, together)
    tokens = {name: places.cut(x if x.ndim == 4 else x[..., None]) for name, x in arrays.items() if name != "u"}
    u = arrays["u"][None, None, :, None].astype(dtype) if "u" in arrays else None
    core = core_of(form, arrays)

    def segment(S: Array, given: tuple[Arrays, Bounds | None]) -> tuple[Array, tuple[Array, Array | None]]:
        cut, bounds = given
        x = {name: to_heads(y, C, HV, dtype) for name, y in cut.items()}
        if u is not None:
            x["u"] = u
        if bounds is not None:  # a row of its own, as every state has
            begins = bounds.begins[:, None, None, None, None]
            bounds = Bounds(begins, None if bounds.start is None else bounds.start[:, None])
        o, S, after = core(x, S, bounds)
        o = from_heads(o * scale).astype(v.dtype)
        return S, (o, after[:, 0] if keep and bounds is not None else None)

    zeros = jnp.zeros((B, HV, K, V), dtype)
    first = zeros if S0 is None or cu_seqlens is not None else S0
    first = varying(first, *arrays.values(), *arrays_of((S0, cu_seqlens)))
    S, (o, after) = lax.scan(checkpoint_in_scan(segment), first, (tokens, places.bounds(S0)))
    if not keep:
        S = None
    elif isinstance(places, Packed):
        S = places.final(after, S0)
    return places.join(o), S


def to_heads(x: Array, C: int, HV: int, dtype: Any) -> Array:
    """``[B, m·C, H or HV, W]`` as ``[m, B, HV, C, W]``, a query/key head once for each of its value heads."""
    B, length, H, W = x.shape
    x = x.astype(dtype).reshape(B, length // C, C, H, W).transpose(1, 0, 3, 2, 4)
    return x if H == HV else jnp.repeat(x, HV // H, axis=2)


def from_heads(y: Array) -> Array:
    """``[m, B, HV, C, V]`` as ``[B, m·C, HV, V]``."""
    m, B, HV, C, V = y.shape
    return y.transpose(1, 0, 3, 2, 4).reshape(B, m * C, HV, V)


def decode(arrays: Arrays, scale: float, S0: Array | None) -> tuple[Array, Array]:
    """One token of every row, no loop."""
    v = arrays["v"]
    B, _, HV, V = v.shape
    dtype = accumulation(v.dtype)
    x = {name: to_heads(y if y.ndim == 4 else y[..., None], 1, HV, dtype)[0] for name, y in arrays.items() if name != "u"}
    if "u" in arrays:
        x["u"] = arrays["u"][None, :, None].astype(dtype)
    zeros = jnp.zeros((B, HV, x["k"].shape[-1], V), dtype)
    S, o = token_step(x, (zeros if S0 is None else S0) + nothing(x["v"]))
    return from_heads(o[None] * scale).astype(v.dtype), S


@partial(jax.jit, static_argnames=("scale",))
def bidirectional(q: Array, k: Array, v: Array, cu_seqlens: Array | None, *, scale: float) -> Array:
    """``o_t = scale · q_t Σ_s k_sᵀ v_s`` over the whole sequence: two matmuls, nothing carried."""
    B, T, HV, V = v.shape
    dtype = accumulation(v.dtype)
    if v.size == 0 or (cu_seqlens is not None and cu_seqlens.shape[0] == 1):
        return jnp.zeros_like(v)
    C = chunk_length("chunk", None, T, False, LONGEST)
    places = Rows(T, C, 1) if cu_seqlens is None else Packed(T, cu_seqlens, C, 1)
    xq, xk, xv = (to_heads(chunks_last(places.cut(x)), C, HV, dtype) for x in (q, k, v))  # [n, B, HV, C, W]
    sums = jnp.matmul(xk.mT, xv, precision="highest")
    total = places.total(sums) if isinstance(places, Packed) else sums.sum(0)
    o = from_heads(jnp.matmul(xq, total, precision="highest") * scale).astype(v.dtype)
    return places.join(o.reshape(B, -1, C, HV, V).swapaxes(0, 1))


def chunks_last(x: Array) -> Array:
    """``[n, B, C, heads, W]`` as ``[B, n·C, heads, W]``."""
    n, B, C, *rest = x.shape
    return x.swapaxes(0, 1).reshape(B, n * C, *rest)
