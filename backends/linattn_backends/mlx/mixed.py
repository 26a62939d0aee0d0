"""``mixed_attn``: squared ReLU attention inside chunks of ``C`` tokens, linear attention over whole chunks.

With ``c(t) = t // C``, ``W[t, s] = relu(quad_scale · q_quad_t·k_quad_s + bias)²`` for ``s ≤ t`` of one chunk, and ``S`` the sum
of ``k_linᵀ v`` over the chunks before: ``o = W v + lin_scale · q_lin S``. Every form runs this chunk algorithm, a few chunks at
a time; one token from a state takes :func:`decode`. Not causal, ``W`` is not masked and ``S`` is the sum over everything.

A sequence that resumes from a state has the ``p`` tokens held there in front, as keys without queries: a *virtual* sequence of
``p + T`` tokens, of which only an upper bound is static. :mod:`.virtual` says where its tokens lie.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
from linattn.plugin import MixedState

from .cores import Arrays, walk
from .layout import Bounds
from .matrix_state import bidirectional
from .segments import Segmented, accumulation, from_heads, to_heads, total
from .transforms import differentiable
from .tree import causal, transposed
from .virtual import Equal, Virtual

TOKENS_A_SEGMENT = 512
NEW = ("q_quad", "k_quad", "q_lin", "k_lin", "v")
STATE = ("kv", "held_k_quad", "held_k_lin", "held_v", "length")
TAILS = ("k_quad", "k_lin", "v")


class Options(NamedTuple):
    """What is static about a call."""

    C: int
    quad_scale: float
    lin_scale: float
    causal: bool
    keep: bool  # the final state is wanted


def mixed_attention(
    form: str,
    arrays: Arrays,
    *,
    bias: mx.array | None,
    quad_scale: float | None,
    lin_scale: float | None,
    causal: bool,
    initial_state: MixedState[mx.array] | None,
    output_final_state: bool,
    cu_seqlens: mx.array | None,
    chunk_size: int,
) -> tuple[mx.array, MixedState[mx.array] | None]:
    """``(o, final_state)``, the state a ``MixedState``."""
    quad_scale = 1.0 / chunk_size if quad_scale is None else float(quad_scale)
    lin_scale = 1.0 / chunk_size if lin_scale is None else float(lin_scale)
    options = Options(chunk_size, quad_scale, lin_scale, causal, output_final_state)
    v, state = arrays["v"], initial_state
    N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if v.size == 0 or N == 0:
        dtype = accumulation(v.dtype)
        kept = nothing(arrays, N, chunk_size, dtype) if state is None else widened(state, dtype)
        return mx.zeros_like(v), kept if output_final_state else None
    if form == "recurrent" and cu_seqlens is None and state is not None and v.shape[1] == 1:
        o, state = decode(arrays, bias, state, options)
        return o, state if output_final_state else None
    given = arrays | {} if state is None else arrays | dict(zip(STATE, state, strict=True))
    given |= {name: x for name, x in (("bias", bias), ("cu_seqlens", cu_seqlens)) if x is not None}
    outputs = differentiable(
        lambda arrays: forward(arrays, options),
        lambda arrays, cotangents, outputs: backward(arrays, cotangents, outputs, options),
    )(given)
    o = outputs["o"]
    if not causal:
        linear = {"q": arrays["q_lin"], "k": arrays["k_lin"], "v": v}
        o = (o + bidirectional({name: x.astype(o.dtype) for name, x in linear.items()}, cu_seqlens, lin_scale)).astype(v.dtype)
    return o, MixedState(*(outputs[name] for name in MixedState._fields)) if output_final_state else None


class Mixed(Segmented):
    """The segments of one call; without the sum over everything of one that is not causal."""

    def __init__(self, arrays: Arrays, options: Options):
        self.arrays, self.options = arrays, options
        B, T, H, V = arrays["v"].shape
        self.H, self.S0, self.dtype = H, arrays.get("kv"), accumulation(arrays["v"].dtype)
        cu_seqlens = arrays.get("cu_seqlens")
        self.places: Equal | Virtual
        if self.S0 is None and cu_seqlens is None:
            self.places = Equal(T, options.C, TOKENS_A_SEGMENT)
        else:
            self.places = Virtual(B, T, options.C, TOKENS_A_SEGMENT, cu_seqlens, arrays.get("length"))
        self.shape = (1 if self.places.packed else B, H, arrays["k_lin"].shape[-1], V)
        self.tokens = [name for name in NEW if options.causal or not name.endswith("lin")]
        c = self.places.C
        self.shared = {"bias": arrays["bias"].astype(self.dtype)[:, :c, :c]} if "bias" in arrays else {}
        # one that is not causal is added to the sum over everything, before it is rounded
        self.out = arrays["v"].dtype if options.causal else self.dtype

    def held(self, name: str) -> mx.array | None:
        return self.arrays.get(f"held_{name}")

    def cut(self, name: str, segment: int) -> mx.array:
        return self.places.pick(self.arrays[name], self.held(name), segment)

    def compute(self, x: Arrays, S: mx.array, bounds: Bounds | None, segment: int) -> tuple[mx.array, mx.array, list[mx.array]]:
        given = {name: to_heads(x[name], self.places.C, self.H, self.dtype) for name in self.tokens}
        scores = self.options.quad_scale * (given["q_quad"] @ transposed(given["k_quad"]))
        kept = mx.maximum(scores if "bias" not in x else scores + x["bias"], 0)
        weights = mx.square(causal(kept, False) if self.options.causal else kept)
        o, after = weights @ given["v"], []
        if self.options.causal:
            whole = self.places.whole[slice(*self._chunks(segment))]
            sums = mx.where(whole[:, None, None, None, None], transposed(given["k_lin"]) @ given["v"], 0)
            S, before, after, _ = walk(lambda S, chunk: (S + chunk, None), S, (sums,), bounds)
            o = o + self.options.lin_scale * (given["q_lin"] @ mx.stack(before))
        return from_heads(o).astype(self.out), S, after

    def _chunks(self, segment: int) -> tuple[int, int]:
        """First and last but one chunk of a segment."""
        if self.places.packed:
            return self.places.spans[segment]
        start, stop = self.places.spans[segment]
        return start // self.places.C, -(-stop // self.places.C)

    def tails(self, *given: mx.array) -> tuple[mx.array, ...]:
        """Keys and values of the unfinished chunks, from the new ones and, where there is a state, those held."""
        new, held = given[:3], given[3:] or (None,) * 3
        return tuple(self.places.tail(x, y, self.dtype) for x, y in zip(new, held, strict=True))

    def of_tails(self) -> list[str]:
        """What :meth:`tails` wants."""
        held = [f"held_{name}" for name in TAILS]
        return [*TAILS, *(held if self.S0 is not None else [])]


def forward(arrays: Arrays, options: Options) -> dict[str, Any]:
    """``o``, the arrays of the final state by their names, and the states before each segment but the first, ``kept``."""
    mixed = Mixed(arrays, options)
    o, kv, kept = mixed.forward(options.keep)
    outputs = {"o": mixed.places.new(o, arrays["v"]), "kept": kept}
    if kv is None:
        return outputs
    tails = mixed.tails(*(arrays[name] for name in mixed.of_tails()))
    length = mixed.places.length(arrays["v"].shape[0])
    return {**outputs, "kv": kv, **dict(zip(TAILS, tails, strict=True)), "length": length}


def backward(arrays: Arrays, cotangents: dict[str, Any], outputs: dict[str, Any], options: Options) -> Arrays:
    """The gradient of every array."""
    mixed = Mixed(arrays, options)
    places, do = mixed.places, cotangents["o"]
    found, dkv = mixed.backward(lambda i: places.pick(do, None, i), cotangents.get("kv"), outputs["kept"])
    grads = {name: mx.zeros_like(x) for name, x in arrays.items()}
    for name in mixed.tokens:
        grads[name] = places.new(found[name], arrays[name])
        if mixed.held(name) is not None:
            grads[f"held_{name}"] = places.old(found[name]).astype(mixed.held(name).dtype)
    if "bias" in arrays:
        d = total(found["bias"], arrays["bias"])
        grads["bias"] = mx.pad(d, [(0, 0)] + [(0, n - m) for n, m in zip(arrays["bias"].shape[1:], d.shape[1:], strict=True)])
    if "kv" in arrays:
        grads["kv"] = dkv.astype(arrays["kv"].dtype)
    if options.keep:
        names = mixed.of_tails()
        _, extra = mx.vjp(mixed.tails, [arrays[name] for name in names], [cotangents[name] for name in TAILS])
        grads |= {name: grads[name] + d for name, d in zip(names, extra, strict=True)}
    return grads


def nothing(arrays: Arrays, N: int, C: int, dtype: mx.Dtype) -> MixedState[mx.array]:
    """The state before any token."""
    H, V = arrays["v"].shape[2:]
    held = (mx.zeros((N, C, H, arrays[name].shape[-1]), dtype) for name in TAILS)
    return MixedState(mx.zeros((N, H, arrays["k_lin"].shape[-1], V), dtype), *held, mx.zeros((N,), mx.int32))


def widened(state: MixedState[mx.array], dtype: mx.Dtype) -> MixedState[mx.array]:
    """Its arrays in the accumulation dtype; rows from ``length`` on are zero, and so is their gradient."""
    length = state.length.astype(mx.int32)
    seen = (mx.arange(state.v.shape[1], dtype=mx.int32) < length[:, None])[..., None, None]
    return MixedState(state.kv.astype(dtype), *(mx.where(seen, x.astype(dtype), 0) for x in state[1:4]), length)


def decode(
    arrays: Arrays, bias: mx.array | None, state: MixedState[mx.array], options: Options
) -> tuple[mx.array, MixedState[mx.array]]:
    """One token: written at row ``length`` of the chunk held, which is folded into ``kv`` once full."""
    dtype = accumulation(arrays["v"].dtype)
    state, new = widened(state, dtype), {name: x.astype(dtype) for name, x in arrays.items()}
    at, row = state.length, mx.arange(options.C, dtype=mx.int32)
    here, seen = row == at[:, None], row <= at[:, None]  # [N, C]
    k_quad, k_lin, v = (mx.where(here[..., None, None], new[name], held) for name, held in zip(TAILS, state[1:4], strict=True))
    heads = (0, 2, 1, 3)  # [N, 1 or C, H, W] as [N, H, 1 or C, W]
    q_quad, q_lin = new["q_quad"].transpose(heads), new["q_lin"].transpose(heads)
    keys, values = k_quad.transpose(heads), v.transpose(heads)
    scores = options.quad_scale * (q_quad @ transposed(keys))  # [N, H, 1, C]
    if bias is not None:
        scores = scores + mx.take(bias.astype(dtype), at, axis=1).transpose(1, 0, 2)[:, :, None]
    weights = mx.where(seen[:, None, None], mx.square(mx.maximum(scores, 0)), 0)
    o = weights @ values + options.lin_scale * (q_lin @ state.kv)
    full = (at + 1 == options.C)[:, None, None, None]
    kv = mx.where(full, state.kv + transposed(k_lin.transpose(heads)) @ values, state.kv)
    held = (mx.where(full, 0, x) for x in (k_quad, k_lin, v))
    length = mx.where(at + 1 == options.C, 0, at + 1)
    return o.transpose(heads).astype(arrays["v"].dtype), MixedState(kv, *held, length)
