"""What ``mixed_attn`` means (FLASH, Hua et al. 2022, eqs. 7 and 8): attention inside a chunk, a state across chunks.

With ``c(t) = t // C``, and rows for vectors::

    o_t = Σ_{s: c(s)=c(t), s≤t} relu(quad_scale · q_quad_t·k_quad_s + bias)² v_s
        + lin_scale · q_lin_t Σ_{s: c(s)<c(t)} k_lin_sᵀ v_s

and, not causal, without ``s≤t`` and with the second sum over all ``s``.

One sequence at a time, because each may stand at another place in its chunk. The state holds the tokens of the chunk
that is not yet full; a sequence that goes on from a state has them in front, as keys and values without queries, so
that every token stands where it would have stood had the sequence never been cut. All arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from linattn.plugin import MixedState

from .recurrence import Array, outer, row_times, sum_outer, times_column

__all__ = ["forward", "vjp"]


class Sequence(NamedTuple):
    """One sequence of ``T`` tokens after the ``P`` of its initial state, or the gradient of one."""

    q_quad: Array  # [T, H, K]
    q_lin: Array  # [T, H, L]
    k_quad: Array  # [P + T, H, K]
    k_lin: Array  # [P + T, H, L]
    v: Array  # [P + T, H, V]
    kv: Array  # [H, L, V], the sum over the whole chunks before these


class Meaning(NamedTuple):
    """What all sequences of a call share."""

    C: int
    quad_scale: float
    lin_scale: float
    causal: bool
    bias: Array | None  # [H, C, C]


# One sequence.


def attend(one: Sequence, how: Meaning) -> tuple[Array, Array]:
    """The equation above: ``o [T, H, V]``, and the sum over all whole chunks."""
    o = np.empty((len(one.q_quad), *one.v.shape[1:]))
    sums = chunk_sums(one, how)
    for t, near, far, place in visits(one, how):
        weights = np.maximum(scores(one, how, t, near, place), 0.0) ** 2
        o[t] = np.einsum("hs,shv->hv", weights, one.v[near]) + how.lin_scale * row_times(one.q_lin[t], sums[far])
    return o, sums[-1]


def attend_vjp(one: Sequence, how: Meaning, do: Array, d_sum: Array, d_bias: Array | None) -> Sequence:
    """Gradients of ``o`` and of the last sum → that of the sequence. Adds that of the bias to ``d_bias``."""
    d = Sequence(*(np.zeros_like(array) for array in one))
    sums = chunk_sums(one, how)
    d_sums = [np.zeros_like(one.kv) for _ in sums]
    for t, near, far, place in visits(one, how):
        kept = np.maximum(scores(one, how, t, near, place), 0.0)
        d_score = 2.0 * kept * np.einsum("hv,shv->hs", do[t], one.v[near])
        d.q_quad[t] = how.quad_scale * np.einsum("hs,shk->hk", d_score, one.k_quad[near])
        d.k_quad[near] += how.quad_scale * np.einsum("hs,hk->shk", d_score, one.q_quad[t])
        d.v[near] += np.einsum("hs,hv->shv", kept**2, do[t])
        if d_bias is not None:
            d_bias[place] += d_score
        d.q_lin[t] = how.lin_scale * times_column(sums[far], do[t])
        d_sums[far] += how.lin_scale * outer(one.q_lin[t], do[t])
    d_sums[-1] += d_sum
    chunk_sums_vjp(one, how, d_sums, d)
    return d


def visits(one: Sequence, how: Meaning) -> Iterator[tuple[int, slice, int, tuple[Any, ...]]]:
    """For every query: its token, the keys near it, which chunk sum it reads, its place in the bias ``[H, C, C]``."""
    T, end = len(one.q_quad), len(one.k_quad)
    for t in range(T):
        s = end - T + t  # where the query stands among the keys
        chunk, row = divmod(s, how.C)
        stop = s + 1 if how.causal else min(end, (chunk + 1) * how.C)
        near = slice(chunk * how.C, stop)
        yield t, near, chunk if how.causal else -1, (slice(None), row, slice(stop - near.start))


def scores(one: Sequence, how: Meaning, t: int, near: slice, place: tuple[Any, ...]) -> Array:
    """``quad_scale · q_quad_t·k_quad_s + bias`` for the keys near: ``[H, s]``."""
    products = how.quad_scale * np.einsum("hk,shk->hs", one.q_quad[t], one.k_quad[near])
    return products if how.bias is None else products + how.bias[place]


def terms(one: Sequence, how: Meaning) -> list[slice]:
    """The keys that each term of the second sum covers: a whole chunk, or, not causal, all of them."""
    end = len(one.k_quad)
    return [slice(c, c + how.C) for c in range(0, end - how.C + 1, how.C)] if how.causal else [slice(0, end)]


def chunk_sums(one: Sequence, how: Meaning) -> list[Array]:
    """``Σ k_linᵀ v`` before each chunk, and after the last whole one."""
    sums = [one.kv]
    for keys in terms(one, how):
        sums.append(sums[-1] + sum_outer(one.k_lin[keys], one.v[keys]))
    return sums


def chunk_sums_vjp(one: Sequence, how: Meaning, d_sums: list[Array], d: Sequence) -> None:
    """Add the gradients of the sums to those of ``k_lin``, ``v`` and ``kv``."""
    d_sum = d_sums[-1]
    for keys, d_before in zip(reversed(terms(one, how)), reversed(d_sums[:-1]), strict=True):
        d.k_lin[keys] += times_column(d_sum, one.v[keys])
        d.v[keys] += row_times(one.k_lin[keys], d_sum)
        d_sum = d_sum + d_before
    d.kv[...] = d_sum


# All sequences of a call.

QUERIES = ("q_quad", "q_lin")
HELD = ("k_quad", "k_lin", "v")  # what the state keeps of each token of the chunk that is not yet full


def forward(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, MixedState[Any]]:
    """``o [B, T, H, V]`` and the final state, from float64 arrays and options by the names of the public function."""
    how = meaning(arrays, options)
    o, final = np.zeros(arrays["v"].shape), nothing(arrays, how)
    for n, tokens in places(arrays):
        one = placed(arrays, n, tokens)
        o[tokens], final.kv[n] = attend(one, how)
        rest = unfinished(one, how)
        final.length[n] = len(one.v[rest])
        for name in HELD:
            getattr(final, name)[n, : final.length[n]] = getattr(one, name)[rest]
    return o, final


def vjp(arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any, d_state: Any) -> dict[str, Any]:
    """Gradients of ``o`` and of the final state → those of all float arrays."""
    how = meaning(arrays, options)
    d_o = np.zeros(arrays["v"].shape) if d_o is None else d_o
    d_final = nothing(arrays, how) if d_state is None else d_state
    d_initial = nothing(arrays, how)._replace(length=None)
    gradients = {name: np.zeros(arrays[name].shape) for name in (*QUERIES, *HELD)}
    d_bias = None if how.bias is None else np.zeros_like(how.bias)
    for n, tokens in places(arrays):
        one = placed(arrays, n, tokens)
        d = attend_vjp(one, how, d_o[tokens], d_final.kv[n], d_bias)
        rest = unfinished(one, how)
        P = len(one.v) - len(one.q_quad)
        for name in QUERIES:
            gradients[name][tokens] = getattr(d, name)
        for name in HELD:
            d_held = getattr(d, name)
            d_held[rest] += getattr(d_final, name)[n, : len(d_held[rest])]
            getattr(d_initial, name)[n, :P], gradients[name][tokens] = d_held[:P], d_held[P:]
        d_initial.kv[n] = d.kv
    others = {"bias": d_bias, "initial_state": d_initial}
    return gradients | {name: gradient for name, gradient in others.items() if name in arrays}


def meaning(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Meaning:
    """The options with their defaults, and the bias."""
    C = options.get("chunk_size", 256)
    scales = (1.0 / C if options.get(name) is None else options[name] for name in ("quad_scale", "lin_scale"))
    return Meaning(C, *scales, options.get("causal", True), arrays.get("bias"))


def places(arrays: Mapping[str, Any]) -> list[tuple[int, tuple[int, slice]]]:
    """Each sequence's number and where its tokens lie in an input: one a batch row, or packed in the only one."""
    if "cu_seqlens" not in arrays:
        return [(b, (b, slice(None))) for b in range(len(arrays["v"]))]
    return [(n, (0, slice(*span))) for n, span in enumerate(pairwise(arrays["cu_seqlens"].tolist()))]


def placed(arrays: Mapping[str, Any], n: int, tokens: tuple[int, slice]) -> Sequence:
    """One sequence, with the keys and values that its initial state holds in front."""
    queries = [arrays[name][tokens] for name in QUERIES]
    keys = [arrays[name][tokens] for name in HELD]
    if "initial_state" not in arrays:
        H, L = arrays["k_lin"].shape[2:]
        return Sequence(*queries, *keys, kv=np.zeros((H, L, arrays["v"].shape[-1])))
    state = arrays["initial_state"]
    held = [getattr(state, name)[n, : state.length[n]] for name in HELD]
    return Sequence(*queries, *map(np.concatenate, zip(held, keys, strict=True)), kv=state.kv[n])


def unfinished(one: Sequence, how: Meaning) -> slice:
    """The keys of the chunk that is not yet full."""
    end = len(one.v)
    return slice(end - end % how.C, end)


def nothing(arrays: Mapping[str, Any], how: Meaning) -> MixedState[Any]:
    """The state before any token."""
    N, C = len(places(arrays)), how.C
    H, L, V = *arrays["k_lin"].shape[2:], arrays["v"].shape[-1]
    held = (np.zeros((N, C, *arrays[name].shape[2:])) for name in HELD)
    return MixedState(np.zeros((N, H, L, V)), *held, np.zeros(N, np.int32))
