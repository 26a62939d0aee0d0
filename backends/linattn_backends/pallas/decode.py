"""One token of every sequence: read the state, write the state, and as little else as there is.

The grid is (sequence, group of value heads). The state stays as the caller has it, ``[K, V]``: what multiplies its rows comes
as a row and is turned into a column in registers, since reading a column from memory would take as long as reading the state.
All of it is float32 on the vector unit; the matrix unit has nothing to do for one row.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..jax.segments import decode as plain_decode
from .compat import compiler_params, out_shape
from .tiles import Array, column

Arrays = dict[str, Array]

MOST_HEADS = 16  # in one grid step: their loop is unrolled
STATE_BYTES = 1 << 20
"""Of state that one grid step holds; there are two in flight, and as many on their way out."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def decode(arrays: Arrays, S: Array, scale: float, interpret: Any) -> tuple[Array, Array]:
    """``o [B, 1, HV, V]`` and the states after the token; differentiated through the plain form, which nothing repeats."""
    v = arrays["v"]
    B, _, HV, V = v.shape
    if v.size == 0:
        return jnp.zeros_like(v), S
    rows = {name: per_head(name, x, B, HV) for name, x in arrays.items()}
    o, S = step(rows, S, scale=scale, interpret=interpret)
    return o.reshape(B, 1, HV, V).astype(v.dtype), S


def _forward(arrays: Arrays, S: Array, scale: float, interpret: Any) -> tuple[Any, Any]:
    return decode(arrays, S, scale, interpret), (arrays, S)


def _backward(scale: float, interpret: Any, kept: Any, d: Any) -> tuple[Arrays, Array]:
    _, pull = jax.vjp(lambda arrays, S: plain_decode(arrays, scale, S), *kept)
    return pull(d)


decode.defvjp(_forward, _backward)


def per_head(name: str, x: Array, B: int, HV: int) -> Array:
    """``[B, HV, 1, W]`` float32; small, so repeated for the value heads of a group, and a number is as wide as a lane."""
    x = x.astype(jnp.float32)
    if name == "u":
        x = jnp.broadcast_to(x, (B, *x.shape))
    else:
        x = x[:, 0] if x.ndim == 4 else x[:, 0, :, None]
    return jnp.repeat(x, HV // x.shape[1], axis=1)[:, :, None]


@partial(jax.jit, static_argnames=("scale", "interpret"))
def step(x: Arrays, S: Array, *, scale: float, interpret: Any) -> tuple[Array, Array]:
    """``o [B, HV, 1, V]`` and the states, of rows ``[B, HV, 1, W]`` and states ``[B, HV, K, V]``."""
    B, HV, K, V = S.shape
    padded = -(-K // 8) * 8 * -(-V // 128) * 128 * 4  # bytes of a state in VMEM
    heads = max((h for h in range(1, min(HV, MOST_HEADS) + 1) if HV % h == 0 and h * padded <= STATE_BYTES), default=1)
    block = lambda *shape: pl.BlockSpec((None, heads, *shape), lambda b, h: (b, h, 0, 0))  # noqa: E731
    rows = {name: block(1, y.shape[3]) for name, y in x.items()}

    def kernel(*refs: Any) -> None:
        *given, before, o, after = refs
        for head in range(heads):
            token = {name: ref[head] for name, ref in zip(x, given, strict=True)}
            o[head], after[head] = one_token(token, before[head], scale)

    return pl.pallas_call(
        kernel,
        out_shape=[out_shape((B, HV, 1, V), jnp.float32, *x.values(), S), out_shape(S.shape, jnp.float32, *x.values(), S)],
        grid=(B, HV // heads),
        in_specs=[*rows.values(), block(K, V)],
        out_specs=[block(1, V), block(K, V)],
        compiler_params=compiler_params("parallel", "parallel"),
        interpret=interpret,
        name="linattn_decode",
    )(*x.values(), S)


def one_token(x: Arrays, before: Array, scale: float) -> tuple[Array, Array]:
    """The definition: rows ``[1, W]``, the state ``[K, V]``."""
    q, k, v = column(x["q"]), column(x["k"]), x["v"]
    S = before
    if "g" in x:
        S = S * (jnp.exp(x["g"]) if x["g"].shape[1] == 1 else column(jnp.exp(x["g"])))
    if "beta" in x:
        v = x["beta"] * (v - jnp.sum(k * S, axis=0, keepdims=True))
    S = S + k * v
    if "u" in x:
        o = jnp.sum(q * before, axis=0, keepdims=True) + jnp.sum(x["q"] * x["u"] * x["k"], axis=1, keepdims=True) * v
    else:
        o = jnp.sum(q * S, axis=0, keepdims=True)
    return o * scale, S
