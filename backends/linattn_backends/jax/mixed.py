"""``mixed_attn``: squared ReLU attention inside chunks of ``C`` tokens, linear attention over whole chunks.

With ``c(t) = t // C``, ``W[t, s] = relu(quad_scale · q_quad_t·k_quad_s + bias)²`` for ``s ≤ t`` of one chunk, and ``S`` the sum
of ``k_linᵀ v`` over the chunks before: ``o = W v + lin_scale · q_lin S``. Every form runs this chunk algorithm, a few chunks at
a time; one token from a state takes :func:`decode`. Not causal, ``W`` is not masked and ``S`` is the sum over everything.

A sequence that resumes from a state has the ``p`` tokens held there in front, as keys without queries: a *virtual* sequence of
``p + T`` tokens, of which only an upper bound is static. :mod:`.virtual` says where its tokens lie.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from linattn.plugin import MixedState

from .compat import Array, arrays_of, checkpoint_in_scan, varying
from .cores import walk
from .layout import Bounds
from .scales import mixed_scale
from .segments import accumulation, from_heads, to_heads
from .tree import matmul
from .virtual import Equal, Virtual

TOKENS_A_SEGMENT = 512


def mixed_attention(
    form: str,
    arrays: dict[str, Array],
    *,
    bias: Array | None,
    quad_scale: float | None,
    lin_scale: float | None,
    causal: bool,
    initial_state: MixedState[Array] | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int,
) -> tuple[Array, MixedState[Array] | None]:
    """``(o, final_state)``, the state a ``MixedState``."""
    quad_scale, lin_scale = mixed_scale(chunk_size, quad_scale), mixed_scale(chunk_size, lin_scale)
    new = tuple(arrays.values())
    if form == "recurrent" and cu_seqlens is None and initial_state is not None and new[4].shape[1] == 1:
        o, state = decode(new, bias, initial_state, quad_scale=quad_scale, lin_scale=lin_scale)
        return o, state if output_final_state else None
    options = dict(C=chunk_size, quad_scale=quad_scale, lin_scale=lin_scale, causal=causal, keep=output_final_state)
    return attend(new, bias, initial_state, cu_seqlens, **options)


@partial(jax.jit, static_argnames=("C", "quad_scale", "lin_scale", "causal", "keep"))
def attend(
    new: tuple[Array, ...],
    bias: Array | None,
    state: MixedState[Array] | None,
    cu_seqlens: Array | None,
    *,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
    keep: bool,
) -> tuple[Array, MixedState[Array] | None]:
    """Any number of tokens."""
    v = new[4]
    B, T, H, V = v.shape
    L, dtype = new[3].shape[-1], accumulation(v.dtype)
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kv0 = None if state is None else state.kv.astype(dtype)
    if v.size == 0 or N == 0:
        after = nothing(new, N, C, dtype) if state is None else unchanged(state, dtype)
        return jnp.zeros_like(v), after if keep else None
    if state is None and cu_seqlens is None:
        places = Equal(T, C, TOKENS_A_SEGMENT)
    else:
        places = Virtual(B, T, C, TOKENS_A_SEGMENT, cu_seqlens, None if state is None else state.length)
    held = (None,) * 5 if state is None else (None, state.k_quad, None, state.k_lin, state.v)
    cut = [places.cut(x, y, dtype) for x, y in zip(new, held, strict=True)]
    c = places.c
    bias = None if bias is None else bias.astype(dtype)[:, :c, :c]
    total = None if causal else chunk_totals(places, cut[3], cut[4], c, dtype)

    def segment(S: Array, given: Any) -> tuple[Array, Any]:
        cut, whole, bounds, total = given
        q_quad, k_quad, q_lin, k_lin, v = (to_heads(x, c, H, dtype) for x in cut)
        sums = matmul(k_lin.mT, v) * whole[:, None, None, None, None]
        S, (before, after, _) = walk(lambda S, chunk: (S + chunk, None), S, sums, v, per_row(bounds))
        o = matmul(weights(q_quad, k_quad, bias, quad_scale, causal), v)
        o = o + lin_scale * matmul(q_lin, before if total is None else total)
        return S, (from_heads(o).astype(new[4].dtype), after[:, 0] if keep and bounds is not None else None)

    rows = B if isinstance(places, Equal) else 1
    zeros = jnp.zeros((rows, H, L, V), dtype)
    first = varying(zeros, *new, *arrays_of((bias, kv0, cu_seqlens)))
    xs = (cut, places.whole, places.bounds(kv0), total)
    S, (o, after) = lax.scan(checkpoint_in_scan(segment), first, xs)
    o = places.join(o).reshape(v.shape)
    if not keep:
        return o, None
    kv = S if isinstance(places, Equal) else places.final(after, kv0)
    tails = (places.tail(new[i], held[i], dtype) for i in (1, 3, 4))
    return o, MixedState(kv, *tails, places.rest(B))


def per_row(bounds: Bounds | None) -> Bounds | None:
    """A row of its own, as every state has."""
    if bounds is None:
        return None
    return Bounds(bounds.begins[:, None, None, None, None], None if bounds.start is None else bounds.start[:, None])


def weights(q: Array, k: Array, bias: Array | None, quad_scale: float, causal: bool) -> Array:
    """``relu(quad_scale · q kᵀ + bias)²``, masked."""
    scores = quad_scale * matmul(q, k.mT)
    kept = jnp.maximum(scores if bias is None else scores + bias, 0)
    return jnp.square(jnp.tril(kept) if causal else kept)


def chunk_totals(places: Any, k_lin: Array, v: Array, c: int, dtype: Any) -> Array:
    """For each chunk ``k_linᵀ v`` summed over its whole sequence, ``[segments, m, rows, H, L, V]``."""
    H = v.shape[3]
    sums = lax.map(lambda x: matmul(to_heads(x[0], c, H, dtype).mT, to_heads(x[1], c, H, dtype)), (k_lin, v))
    flat = sums.reshape(-1, *sums.shape[2:])
    return places.total(flat).reshape(sums.shape)


def unchanged(state: MixedState[Array], dtype: Any) -> MixedState[Array]:
    """The state after no token; rows from ``length`` on hold nothing, and get no gradient."""
    row = jnp.arange(state.v.shape[1])
    held = (row < state.length[:, None])[:, :, None, None]
    kept = (jnp.where(held, x, 0).astype(dtype) for x in (state.k_quad, state.k_lin, state.v))
    return MixedState(state.kv.astype(dtype), *kept, state.length)


def nothing(new: tuple[Array, ...], N: int, C: int, dtype: Any) -> MixedState[Array]:
    """The state before any token."""
    H, L, V = new[4].shape[2], new[3].shape[-1], new[4].shape[-1]
    held = (jnp.zeros((N, C, H, new[i].shape[-1]), dtype) for i in (1, 3, 4))
    return MixedState(jnp.zeros((N, H, L, V), dtype), *held, jnp.zeros(N, jnp.int32))


@partial(jax.jit, static_argnames=("quad_scale", "lin_scale"))
def decode(
    new: tuple[Array, ...], bias: Array | None, state: MixedState[Array], *, quad_scale: float, lin_scale: float
) -> tuple[Array, MixedState[Array]]:
    """One token: written at row ``length`` of the chunk held, which is folded into ``kv`` once full."""
    dtype = accumulation(new[4].dtype)
    q_quad, k_quad, q_lin, k_lin, v = (x.astype(dtype) for x in new)
    kv, *held = (x.astype(dtype) for x in state[:4])
    at, C = state.length.astype(jnp.int32), held[0].shape[1]
    row = jnp.arange(C, dtype=jnp.int32)
    here, seen = row == at[:, None], row <= at[:, None]  # [N, C]
    spread = (..., None, None)
    held = [jnp.where(here[spread], x, jnp.where(seen[spread], y, 0)) for x, y in zip((k_quad, k_lin, v), held, strict=True)]
    product = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    scores = quad_scale * product("nhk,nchk->nhc", q_quad[:, 0], held[0])
    if bias is not None:
        scores = scores + jnp.moveaxis(bias.astype(dtype)[:, at], 1, 0)
    W = jnp.square(jnp.maximum(scores, 0)) * seen[:, None]
    o = product("nhc,nchv->nhv", W, held[2]) + lin_scale * product("nhl,nhlv->nhv", q_lin[:, 0], kv)
    full = at + 1 == C
    folded = kv + product("nchl,nchv->nhlv", held[1], held[2])
    kv = jnp.where(full[:, None, None, None], folded, kv)
    held = [jnp.where(full[:, None, None, None], 0, x) for x in held]
    return o[:, None].astype(new[4].dtype), MixedState(kv, *held, jnp.where(full, 0, at + 1))
