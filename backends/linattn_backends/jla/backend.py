"""jax-linear-attention (0.1) as a backend. It calls each family a kind, and picks among implementations itself:
Mosaic kernels on Hopper for 16-bit operands and widths of 64 and 128, else chunked plain JAX; token by token on request.

Its conventions are ours, but for packed sequences in chunks: those it marks by segment ids, each starting from zeros.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jla.ops import linear_attention
from linattn.plugin import Call, Unsupported, form_methods

from .. import Jla

__all__ = ["JlaBackend"]

KINDS = {
    "simple_gla": "simple_gla",
    "gla": "gla",
    "rwkv6": "rwkv6",
    "delta_rule": "deltanet",
    "gated_delta_rule": "gated_deltanet",
    "kda": "kda",
    "dplr": "rwkv7",
}
IMPLEMENTATIONS = {"chunk": "auto", "recurrent": "reference"}
WITHOUT_OFFSETS = ("rwkv6", "dplr")
"""Kinds that take no ``cu_seqlens`` in any implementation."""


_compiled = jax.jit(linear_attention, static_argnums=0, static_argnames=("impl", "scale", "output_final_state"))
"""As whole programs: operation by operation, its plain JAX is compiled in some hundred parts."""


def _run(
    family: str,
    form: str,
    arrays: dict[str, jax.Array | None],
    *,
    scale: float,
    initial_state: jax.Array | None,
    output_final_state: bool,
    cu_seqlens: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """One call of the library. Its kernels would take a ``chunk_size``, which is a hint, for a demand."""
    given = {name: x for name, x in arrays.items() if x is not None}
    v = given["v"]
    if family == "simple_gla" and given["g"].ndim == 1:
        given["g"] = jnp.broadcast_to(given["g"], v.shape[:3])
    if family == "dplr":
        given["w"] = given.pop("g")
    packed = {}
    if cu_seqlens is not None and form == "recurrent":
        packed = {"cu_seqlens": cu_seqlens}
    elif cu_seqlens is not None:
        tokens = jnp.arange(v.shape[1], dtype=cu_seqlens.dtype)
        packed = {"segment_ids": jnp.searchsorted(cu_seqlens, tokens, side="right").astype(jnp.int32)[None]}
    return _compiled(
        KINDS[family],
        **given,
        impl=IMPLEMENTATIONS[form],
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        **packed,
    )


@form_methods({name: partial(_run, name) for name in KINDS}, forms=("chunk", "recurrent"))
class JlaBackend(Jla):
    """The chunked and token-by-token operators of jax-linear-attention, on any device."""

    def supports(self, call: Call) -> Unsupported | None:
        """What the library states that it cannot do."""
        complaint = _complaint(call)
        return None if complaint is None else Unsupported(complaint)


def _complaint(call: Call) -> str | None:
    if call.dtype == "float64":
        return "computes in float32, so takes no float64"
    if call.HV != call.H:
        return "takes no grouped value heads"
    if call.has("gv"):
        return "has no gv"
    if call.beta == "vector":
        return "takes one beta for a token and head"
    if not call.varlen:
        return None
    if call.form == "chunk" and call.state != "none":
        return "takes packed sequences without states in the chunk form, where it marks them by segment ids"
    if call.form == "recurrent" and call.op in WITHOUT_OFFSETS:
        return f"takes no packed sequences in recurrent_{call.op}"
    return None
