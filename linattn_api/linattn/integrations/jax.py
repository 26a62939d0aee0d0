"""The function that JAX ports of Qwen3-Next and Qwen3.5 call (MaxText and those after it), on ``linattn.gated_delta_rule``.

>>> from linattn.integrations.jax import jax_chunk_gated_delta_rule

Each port has a copy of it in its own model's file, so there is no package whose functions could be swapped: import this one
where the copy was called. It runs under every transform of JAX and has gradients of every array.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ShapeError
from ..ops import gated_delta_rule

__all__ = ["jax_chunk_gated_delta_rule"]


def jax_chunk_gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    chunk_size: int = 64,
    initial_state: jax.Array | None = None,
    use_qk_norm_in_gdn: bool = False,
    compute_dtype: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The gated delta rule, as MaxText's Qwen3-Next calls it.

    Args:
        query: Queries ``[B, S, H, K]``; multiplied by ``K ** -0.5`` here.
        key: Keys ``[B, S, H, K]``.
        value: Values ``[B, S, HV, V]``, ``HV`` a multiple of ``H``.
        g: Log decays ``[B, S, HV]``.
        beta: Strengths ``[B, S, HV]``.
        chunk_size: Changes nothing here: the backend chooses its own.
        initial_state: States before the first token ``[B, HV, K, V]``. Default zeros.
        use_qk_norm_in_gdn: Give queries and keys unit length first. Default False.
        compute_dtype: Changes nothing here: operands have the widest of their dtypes, and sums are float32.

    Returns:
        ``(o, final_state)``: outputs ``[B, S, HV, V]`` of the dtype of ``query``; states after the last token, float32, if
        there were initial ones, else ``None``.

    Raises:
        ShapeError: Arrays whose heads come before time, or in groups, as some ports have them.
        ArgumentError: As :func:`linattn.gated_delta_rule` raises.
    """
    if query.ndim != 4 or g.ndim != 3 or g.shape[1] != query.shape[1]:
        raise ShapeError(
            "jax_chunk_gated_delta_rule: query must be [B, S, H, K] and g [B, S, HV], "
            f"got {tuple(query.shape)} and {tuple(g.shape)}: move heads behind time and put groups of them together"
        )
    dtype = jnp.result_type(query, key, value)
    o, final = gated_delta_rule(
        query.astype(dtype),
        key.astype(dtype),
        value.astype(dtype),
        g,
        beta,
        qk_norm="l2" if use_qk_norm_in_gdn else None,
        initial_state=initial_state,
        output_final_state=initial_state is not None,
    )
    return o.astype(query.dtype), final
