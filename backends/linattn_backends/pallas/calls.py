"""One call of a family: the caller's arrays in, kernels, and the results as the caller expects them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..chunks import LONGEST, chunk_length
from ..jax.scales import scale_of
from .compat import alike, refuse_forward_mode
from .decode import decode
from .layout import Layout
from .tiles import Array
from .walk import Static, walk

Result = tuple[Array, Array | None]

MOST_TOKENS = 1 << 20  # in shorter chunks than 64: what the kernel is told of every chunk must fit in 1 MiB
SHORTEST_CHUNK = 16  # rows of a bfloat16 tile


def run(
    form: str,
    arrays: dict[str, Array],
    *,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int | None,
    interpret: Any,
) -> Result:
    """Any of the families: by chunks, or one token."""
    refuse_forward_mode("pallas", [*arrays.values(), initial_state])
    v = arrays["v"]
    if "g" in arrays and arrays["g"].ndim == 1:  # a fixed decay is the same gate at every token
        arrays = {**arrays, "g": jnp.broadcast_to(arrays["g"], v.shape[:3])}
    scale = scale_of(arrays["q"], scale)
    if initial_state is None:
        N = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = jnp.zeros((N, v.shape[2], arrays["k"].shape[-1], v.shape[3]), jnp.float32)
    arrays, initial_state = alike((arrays, initial_state.astype(jnp.float32)))
    if form == "recurrent":
        o, final = decode(arrays, initial_state, scale, interpret)
    else:
        longest = longest_chunk(v.dtype, arrays["k"].shape[-1], v.shape[-1])
        wanted = min(chunk_size or longest, longest)
        wanted = max(wanted, 64) if v.shape[0] * v.shape[1] > MOST_TOKENS else wanted
        C = max(chunk_length("chunk", wanted, v.shape[1], cu_seqlens is not None, LONGEST), SHORTEST_CHUNK)
        o, final = by_chunks(arrays, initial_state, cu_seqlens, static=Static(C, scale, interpret))
    return o, final if output_final_state else None


def longest_chunk(dtype: Any, K: int, V: int) -> int:
    """The fewest bundles a token (docs/performance/pallas-tpu.md) that leave the backward kernel in 16 MiB of VMEM."""
    return 64 if dtype == jnp.float32 and K + V > 384 else 128


@partial(jax.jit, static_argnames=("static",))
def by_chunks(arrays: dict[str, Array], initial: Array, cu_seqlens: Array | None, *, static: Static) -> Result:
    """``o`` and the final states."""
    v, N = arrays["v"], initial.shape[0]
    B, T = v.shape[:2]
    if v.size == 0 or N == 0:
        return jnp.zeros_like(v), initial
    layout = Layout(B, T, static.C, cu_seqlens)
    x = {name: operand(name, y, layout) for name, y in arrays.items()}
    one_more = [(0, 1), (0, 0), (0, 0), (0, 0)]  # for the chunks beyond the last sequence
    o, final = walk(static, x, jnp.pad(initial.mT, one_more), layout.index)
    return layout.join(o), final[:N].mT


def operand(name: str, x: Array, layout: Layout) -> Array:
    """One argument as the kernels take it. What is neither bfloat16 nor float32 is no type of a TPU."""
    if name == "u":
        return x.astype(jnp.float32)[:, None]
    return layout.cut(x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32))
