"""The matrix-state families in MLX operations: the engine that runs wherever MLX does."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from ..chunks import CHUNK, CHUNKS_A_SEGMENT, chunk_length, widest
from .cores import Arrays, core_of, token_step
from .layout import Bounds, Packed, Rows
from .segments import Segmented, accumulation, from_heads, to_heads, total

OPERANDS = ("q", "k", "v", "g", "gv", "beta", "a", "b", "u")
CHUNK_BY_COLUMN = 16  # with a beta of its own for each value channel, a chunk has V systems of C × C


class Options(NamedTuple):
    """What is static about a call."""

    form: str
    scale: float
    chunk_size: int | None
    keep: bool  # the final state is wanted


def longest_chunk(arrays: Arrays) -> int:
    """Tokens that a chunk may have: fewer where it solves a triangular system."""
    if "beta" in arrays and arrays["beta"].ndim == 4:
        return CHUNK_BY_COLUMN
    return widest(solves="beta" in arrays or "a" in arrays)


class MatrixState(Segmented):
    """The segments of one call."""

    def __init__(self, arrays: Arrays, options: Options):
        self.arrays, self.scale = arrays, options.scale
        v, self.S0 = arrays["v"], arrays.get("initial_state")
        B, T, self.HV, V = v.shape
        self.dtype, self.out = accumulation(v.dtype), v.dtype
        self.shape = (B, self.HV, arrays["k"].shape[-1], V)
        self.tokens = [name for name in OPERANDS if name in arrays and name != "u"]
        self.shared = {"u": arrays["u"].astype(self.dtype)} if "u" in arrays else {}
        cu_seqlens = arrays.get("cu_seqlens")
        if options.form == "recurrent":
            C, together = 1, CHUNK
        else:
            C = chunk_length(options.form, options.chunk_size, T, cu_seqlens is not None, longest_chunk(arrays))
            together = max(CHUNKS_A_SEGMENT * CHUNK // C, 1)
        self.places = Rows(T, C, together) if cu_seqlens is None else Packed(T, cu_seqlens, C, together)
        self.core = core_of(options.form, arrays)

    def cut(self, name: str, segment: int) -> mx.array:
        return self.places.cut(self.arrays[name], segment)

    def compute(self, x: Arrays, S: mx.array, bounds: Bounds | None, segment: int) -> tuple[mx.array, mx.array, list[mx.array]]:
        heads = {name: to_heads(x[name], self.places.C, self.HV, self.dtype) for name in self.tokens}
        o, S, after = self.core(heads | {name: y[:, None] for name, y in x.items() if name == "u"}, S, bounds)
        return from_heads(o * self.scale).astype(self.out), S, after


def forward(arrays: Arrays, options: Options) -> dict[str, Any]:
    """``o``, the ``final`` states if they are to be kept, and what the backward pass wants again, ``kept``."""
    segments = MatrixState(arrays, options)
    o, final, kept = segments.forward(options.keep)
    outputs = {"o": segments.places.join(o), "kept": [] if options.form == "recurrent" else kept}
    return outputs if final is None else {**outputs, "final": final}


def backward(arrays: Arrays, cotangents: dict[str, Any], outputs: dict[str, Any], options: Options) -> Arrays:
    """The gradient of every array. Every form has the chunk form's gradient."""
    if options.form == "recurrent":
        options = options._replace(form="chunk")
        outputs = forward(arrays, options._replace(keep=False))
    segments = MatrixState(arrays, options)
    places, do = segments.places, cotangents["o"]
    found, dS0 = segments.backward(lambda i: places.cut(do, i), cotangents.get("final"), outputs["kept"])
    grads = {name: total(parts, arrays[name]) if name == "u" else places.join(parts) for name, parts in found.items()}
    if "initial_state" in arrays:
        grads["initial_state"] = dS0.astype(arrays["initial_state"].dtype)
    if "cu_seqlens" in arrays:
        grads["cu_seqlens"] = mx.zeros_like(arrays["cu_seqlens"])
    return grads


def decode(arrays: Arrays, scale: float) -> tuple[mx.array, mx.array]:
    """One token of every row, no loop: ``o``, and the state after it."""
    v, S0 = arrays["v"], arrays.get("initial_state")
    B, _, HV, V = v.shape
    dtype = accumulation(v.dtype)
    x = {name: to_heads(y, 1, HV, dtype)[0] for name, y in arrays.items() if name not in ("u", "initial_state")}
    if "u" in arrays:
        x["u"] = arrays["u"][:, None].astype(dtype)
    S, o = token_step(x, mx.zeros((B, HV, x["k"].shape[-1], V), dtype) if S0 is None else S0.astype(dtype))
    return from_heads(o[None] * scale).astype(v.dtype), S
