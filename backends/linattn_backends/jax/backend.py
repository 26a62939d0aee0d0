"""The backend: every family and form, lowered to one of three cores by the arrays it was given.

``linear_attn``, ``simple_gla``, ``gla`` and ``rwkv6`` run the diagonal core, ``delta_rule``, ``gated_delta_rule`` and ``kda``
the delta core, ``dplr`` its own (:mod:`.cores`); ``mixed_attn`` is in :mod:`.mixed`.
"""

from __future__ import annotations

import jax.numpy as jnp
from linattn.plugin import Call, Unsupported, form_methods

from .. import Jax
from ..companions import gated_rms_norm, short_conv
from .compat import Array
from .mixed import mixed_attention
from .scales import scale_of
from .segments import OPERANDS, bidirectional, matrix_state

Result = tuple[Array, Array | None]


def family(
    form: str,
    arrays: dict[str, Array | None],
    *,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int | None,
) -> Result:
    """Any matrix-state family."""
    given = {name: arrays[name] for name in OPERANDS if arrays.get(name) is not None}
    scale = scale_of(given["q"], scale)
    options = dict(form=form, scale=scale, chunk_size=chunk_size, keep=output_final_state)
    return matrix_state(given, initial_state, cu_seqlens, **options)


def linear_attn(form: str, arrays: dict[str, Array], *, causal: bool, **options) -> Result:
    """The ungated family."""
    if causal:
        return family(form, arrays, **options)
    scale = scale_of(arrays["q"], options["scale"])
    return bidirectional(**arrays, cu_seqlens=options["cu_seqlens"], scale=scale), None


def simple_gla(form: str, arrays: dict[str, Array], **options) -> Result:
    """A fixed decay per head is the same gate at every token."""
    g, v = arrays["g"], arrays["v"]
    return family(form, dict(arrays, g=jnp.broadcast_to(g, v.shape[:3]) if g.ndim == 1 else g), **options)


@form_methods(
    {
        "linear_attn": linear_attn,
        "simple_gla": simple_gla,
        "gla": family,
        "rwkv6": family,
        "delta_rule": family,
        "gated_delta_rule": family,
        "kda": family,
        "dplr": family,
        "mixed_attn": mixed_attention,
    }
)
class JaxBackend(Jax):
    """Plain JAX: every family, form and flag, on any device, under every transform."""

    short_conv = staticmethod(short_conv)
    gated_rms_norm = staticmethod(gated_rms_norm)

    def supports(self, call: Call) -> Unsupported | None:
        """All but symbolic lengths, and numbers of packed sequences: how much there is to do is known while JAX traces."""
        fixed = ("T", "N") if call.varlen else ("T",)
        symbolic = [symbol for symbol in fixed if call.sizes.get(symbol, 0) is None]
        return Unsupported(f"takes no symbolic {symbolic[0]}: export a program for each size") if symbolic else None
