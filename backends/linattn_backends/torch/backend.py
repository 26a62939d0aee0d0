"""The backend: every family and form, lowered to one of two custom ops by the arrays it was given.

``linear_attn``, ``simple_gla``, ``gla`` and ``rwkv6`` run the diagonal core, ``delta_rule``, ``gated_delta_rule`` and
``kda`` the delta core, ``dplr`` its own (:mod:`.cores`); ``mixed_attn`` is in :mod:`.mixed`.
"""

from __future__ import annotations

import torch
from linattn.plugin import form_methods
from torch import Tensor

from .. import Torch
from ..companions import decode_short_conv
from . import recurrent
from .conv import short_conv
from .layout import chunk_length
from .library import OPERANDS, accumulation, matrix_state_call, plain
from .mixed import mixed_attention
from .norm import gated_rms_norm

Result = tuple[Tensor, Tensor | None]


def matrix_state(
    form: str,
    arrays: dict[str, Tensor | None],
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> Result:
    """Any matrix-state family. One token of equal-length sequences takes a short path of a few plain calls."""
    q = arrays["q"]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if form == "recurrent" and cu_seqlens is None and q.shape[1] == 1:
        o, final = _decode(arrays, scale, initial_state)
    else:
        given = [arrays.get(name) for name in OPERANDS]
        solves = arrays.get("beta") is not None or arrays.get("a") is not None
        chunk = chunk_length(form, chunk_size, solves)
        o, final, _ = matrix_state_call(*given, initial_state, cu_seqlens, form, scale, chunk)
    return o, final if output_final_state else None


def _decode(arrays: dict[str, Tensor | None], scale: float, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token, no loop: differentiable plain calls on ``[B, HV, 1, W]``."""
    q, v = arrays["q"], arrays["v"]
    dtype, HV = accumulation(v.dtype), v.shape[2]
    x = {}
    for name, y in arrays.items():
        if y is None:
            continue
        y = y.to(dtype)
        if name == "u":
            x[name] = y[:, None]
            continue
        y = y.transpose(1, 2) if y.dim() == 4 else y.transpose(1, 2)[..., None]
        x[name] = y if y.shape[1] == HV else y.repeat_interleave(HV // y.shape[1], 1)
    if initial_state is None:
        S = v.new_zeros((v.shape[0], HV, q.shape[-1], v.shape[-1]), dtype=dtype)
    else:
        S = initial_state.to(dtype)
    with plain(v):
        o, final = recurrent.step(x, S)
    return (o * scale).transpose(1, 2).to(v.dtype), final


def linear_attn(form: str, arrays: dict[str, Tensor | None], *, causal: bool, **options) -> Result:
    """The ungated family."""
    return matrix_state(form, arrays, **options) if causal else (_bidirectional(form, arrays, **options), None)


def _bidirectional(form: str, arrays: dict[str, Tensor | None], *, scale: float | None, **options) -> Tensor:
    """Every token reads the last state: one pass to find it, one that starts from it and writes nothing."""
    _, final = matrix_state(form, arrays, **{**options, "scale": 0.0, "output_final_state": True})
    nothing = dict(arrays, k=torch.zeros_like(arrays["k"]), v=torch.zeros_like(arrays["v"]))
    return matrix_state(form, nothing, **{**options, "scale": scale, "initial_state": final})[0]


def simple_gla(form: str, arrays: dict[str, Tensor | None], **options) -> Result:
    """A fixed decay per head is the same gate at every token."""
    g, v = arrays["g"], arrays["v"]
    return matrix_state(form, dict(arrays, g=g.expand(v.shape[:3]) if g.dim() == 1 else g), **options)


@form_methods(
    {
        "linear_attn": linear_attn,
        "simple_gla": simple_gla,
        "gla": matrix_state,
        "rwkv6": matrix_state,
        "delta_rule": matrix_state,
        "gated_delta_rule": matrix_state,
        "kda": matrix_state,
        "dplr": matrix_state,
        "mixed_attn": mixed_attention,
    }
)
class TorchBackend(Torch):
    """Pure PyTorch: every family, form and flag, on any device."""

    short_conv = staticmethod(short_conv)
    gated_rms_norm = staticmethod(gated_rms_norm)
    decode_short_conv = staticmethod(decode_short_conv)
