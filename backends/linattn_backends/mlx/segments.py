"""One call of a matrix-state family: segments one after the other, each computed again in the backward pass.

What the backward pass keeps is the inputs and the state before each segment, ``[B, HV, K, V]``; nothing is kept for a token.
MLX differentiates a segment (``mx.vjp``), and ``mx.depends`` has it finished before the next one is begun: a lazy graph would
else be free to compute the parts of all segments that need no state first, and hold them all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from .cores import Arrays, core_of
from .layout import CHUNKS_A_SEGMENT, Bounds, Packed, Rows, chunk_length

OPERANDS = ("q", "k", "v", "g", "gv", "beta", "a", "b", "u")
TOKENS_A_SEGMENT = 64 * CHUNKS_A_SEGMENT
CHUNK_BY_COLUMN = 16  # with a beta of its own for each value channel, a chunk has V systems of C × C


class Options(NamedTuple):
    """What is static about a call."""

    form: str
    scale: float
    chunk_size: int | None
    keep: bool  # the final state is wanted


def accumulation(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype of sums and states for operands of ``dtype``."""
    return mx.float64 if dtype == mx.float64 else mx.float32


class Segments:
    """The segments of one call: what goes into each and what it computes."""

    def __init__(self, arrays: Arrays, options: Options):
        self.arrays = {name: arrays[name] for name in OPERANDS if name in arrays}
        self.tokens = [name for name in self.arrays if name != "u"]
        self.options = options
        v, self.S0 = arrays["v"], arrays.get("initial_state")
        self.B, T, self.HV, self.V = v.shape
        self.K, self.dtype, self.out = arrays["k"].shape[-1], accumulation(v.dtype), v.dtype
        cu_seqlens = arrays.get("cu_seqlens")
        by_column = "beta" in arrays and arrays["beta"].ndim == 4
        C = chunk_length(options.form, options.chunk_size, T, cu_seqlens is not None, CHUNK_BY_COLUMN if by_column else 256)
        together = max((64 if options.form == "recurrent" else TOKENS_A_SEGMENT) // C, 1)
        self.places = Rows(T, C, together) if cu_seqlens is None else Packed(T, cu_seqlens, C, together)
        self.core = core_of(options.form, self.arrays)

    @property
    def count(self) -> int:
        return len(self.places.spans)

    def first(self) -> mx.array:
        """The state before the first segment."""
        if self.S0 is None or self.places.packed:
            return mx.zeros((self.B, self.HV, self.K, self.V), self.dtype)
        return self.S0.astype(self.dtype)

    def inputs(self, segment: int, after: list[mx.array]) -> Arrays:
        """The operands of a segment, not before ``after`` is there."""
        given = {name: self.places.cut(self.arrays[name], segment) for name in self.tokens}
        if "u" in self.arrays:
            given["u"] = self.arrays["u"].astype(self.dtype)
        if self.places.packed and self.S0 is not None:
            given["start"] = self.places.start(self.S0, segment)
        return given if not after else dict(zip(given, mx.depends(list(given.values()), after), strict=True))

    def run(self, segment: int, S: mx.array, given: Arrays, keep: bool) -> tuple[mx.array, ...]:
        """``o [B, m·C, HV, V]``, the state after the segment and, of packed sequences, the states after each chunk."""
        C = self.places.C
        x = {name: to_heads(given[name], C, self.HV, self.dtype) for name in self.tokens}
        if "u" in given:
            x["u"] = given["u"][:, None]
        bounds = None
        if self.places.packed:
            begins = self.places.begins[slice(*self.places.spans[segment])]
            start = mx.split(given["start"].astype(self.dtype), len(begins)) if "start" in given else None
            bounds = Bounds(begins, start)
        o, S, after = self.core(x, S, bounds)
        o = from_heads(o * self.options.scale).astype(self.out)
        return (o, S, mx.concatenate(after)) if keep and bounds is not None else (o, S)


def forward(arrays: Arrays, options: Options) -> dict[str, Any]:
    """``o``, the ``final`` states if they are to be kept, and the states before each segment but the first, ``kept``."""
    segments = Segments(arrays, options)
    places, S = segments.places, segments.first()
    packed_final = options.keep and places.packed
    final = mx.zeros((places.N, *S.shape[1:]), S.dtype) if packed_final else None
    o, kept = [], []
    for i in range(segments.count):
        y, S, *after = segments.run(i, S, segments.inputs(i, [o[-1], S] if i else []), packed_final)
        o.append(y)
        kept.append(S)
        if packed_final:
            final = places.keep(final, after[0], i, places.ends)
    if packed_final and segments.S0 is not None:
        final = mx.where(places.empty, segments.S0.astype(S.dtype), final)
    outputs = {"o": places.join(o), "kept": kept[:-1] if options.form != "recurrent" else []}
    return {**outputs, "final": final if packed_final else S} if options.keep else outputs


def backward(arrays: Arrays, cotangents: dict[str, Any], outputs: dict[str, Any], options: Options) -> Arrays:
    """The gradient of every array. Every form has the chunk form's gradient."""
    if options.form == "recurrent":
        options = options._replace(form="chunk")
        outputs = forward(arrays, options._replace(keep=False))
    segments = Segments(arrays, options)
    places, S0 = segments.places, segments.S0
    before = [segments.first(), *outputs["kept"]]
    dS = mx.zeros_like(before[0])
    dfinal, dS0 = cotangents.get("final"), None
    if dfinal is not None and not places.packed:
        dS = dfinal
    if S0 is not None and places.packed:
        dS0 = mx.zeros(S0.shape, segments.dtype)
    found: dict[str, list[mx.array]] = {name: [] for name in segments.arrays}
    done: list[mx.array] = []
    for i in reversed(range(segments.count)):
        given = segments.inputs(i, done)
        names = list(given)
        d = [places.cut(cotangents["o"], i), dS]
        if dfinal is not None and places.packed:
            d.append(places.end(dfinal, i))

        def segment(S: mx.array, *values: mx.array, i: int = i, names: list[str] = names) -> tuple[mx.array, ...]:
            return segments.run(i, S, dict(zip(names, values, strict=True)), dfinal is not None)

        _, done = mx.vjp(segment, [before[i], *given.values()], d)
        dS, *gradients = done
        for name, gradient in zip(names, gradients, strict=True):
            if name == "start":
                dS0 = places.keep(dS0, gradient.astype(dS0.dtype), i, places.begins)
            else:
                found[name].append(gradient)
    grads = {name: places.join(parts[::-1]) for name, parts in found.items() if name != "u"}
    if "u" in found:
        grads["u"] = sum(found["u"][1:], found["u"][0]).astype(arrays["u"].dtype)
    if S0 is not None:
        if dfinal is not None and places.packed:
            dS0 = mx.where(places.empty, dfinal, dS0)
        grads["initial_state"] = (dS if dS0 is None else dS0).astype(S0.dtype)
    if "cu_seqlens" in arrays:
        grads["cu_seqlens"] = mx.zeros_like(arrays["cu_seqlens"])
    return grads


def to_heads(x: mx.array, C: int, HV: int, dtype: mx.Dtype) -> mx.array:
    """``[B, m·C, H or HV, …]`` as ``[m, B, HV, C, W]``, a query/key head once for each of its value heads."""
    x = x[..., None] if x.ndim == 3 else x
    B, length, H, W = x.shape
    x = x.astype(dtype).reshape(B, length // C, C, H, W).transpose(1, 0, 3, 2, 4)
    return x if H == HV else mx.repeat(x, HV // H, axis=2)


def from_heads(y: mx.array) -> mx.array:
    """``[m, B, HV, C, V]`` as ``[B, m·C, HV, V]``."""
    m, B, HV, C, V = y.shape
    return y.transpose(1, 0, 3, 2, 4).reshape(B, m * C, HV, V)
