"""The backend: every family and form, lowered to one of three cores by the arrays it was given.

``linear_attn``, ``simple_gla``, ``gla`` and ``rwkv6`` run the diagonal core, ``delta_rule``, ``gated_delta_rule`` and ``kda``
the delta core, ``dplr`` its own (:mod:`.cores`); ``mixed_attn`` is in :mod:`.mixed`.
"""

from __future__ import annotations

import mlx.core as mx
from linattn.plugin import Call, Unsupported, form_methods

from .. import Mlx
from ..companions import gated_rms_norm, short_conv
from .matrix_state import bidirectional, matrix_state
from .mixed import mixed_attention
from .operations import Options
from .selection import details_of

Result = tuple[mx.array, mx.array | None]


def family(
    form: str,
    arrays: dict[str, mx.array | None],
    *,
    scale: float | None,
    initial_state: mx.array | None,
    output_final_state: bool,
    cu_seqlens: mx.array | None,
    chunk_size: int | None,
) -> Result:
    """Any matrix-state family."""
    options = Options(form, _scale(arrays["q"], scale), chunk_size, output_final_state)
    given = dict(arrays, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return matrix_state({name: x for name, x in given.items() if x is not None}, options)


def _scale(q: mx.array, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def linear_attn(form: str, arrays: dict[str, mx.array], *, causal: bool, **options) -> Result:
    """The ungated family."""
    if causal:
        return family(form, arrays, **options)
    return bidirectional(arrays, options["cu_seqlens"], _scale(arrays["q"], options["scale"])), None


def simple_gla(form: str, arrays: dict[str, mx.array], **options) -> Result:
    """A fixed decay per head is the same gate at every token."""
    g, v = arrays["g"], arrays["v"]
    return family(form, dict(arrays, g=mx.broadcast_to(g, v.shape[:3]) if g.ndim == 1 else g), **options)


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
class MlxBackend(Mlx):
    """MLX: every family, form and flag, on any device."""

    short_conv = staticmethod(short_conv)
    gated_rms_norm = staticmethod(gated_rms_norm)

    def supports(self, call: Call) -> Unsupported | None:
        wide = [name for name, dtype in call.dtypes.items() if dtype == "float64"]
        if wide and call.device != "cpu":
            return Unsupported(
                f"MLX has float64 on the CPU only, and {wide[0]} is float64 on {call.device}: "
                "cast it to float32, or make mx.cpu the default device"
            )
        return None

    def details(self, call: Call) -> str | None:
        return None if call.form == "direct" else details_of(call)
