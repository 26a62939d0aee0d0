"""The backend: every family and form, lowered to one of two custom ops by the arrays it was given.

``linear_attn``, ``simple_gla``, ``gla`` and ``rwkv6`` run the diagonal core, ``delta_rule``, ``gated_delta_rule`` and
``kda`` the delta core, ``dplr`` its own (:mod:`.cores`); ``mixed_attn`` is in :mod:`.mixed`. A family is one function here,
with the spec's parameters after the form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from linattn.plugin import FORMS, Backend
from torch import Tensor

from . import recurrent
from .layout import chunk_length
from .library import OPERANDS, accumulation, matrix_state_call, plain
from .mixed import mixed_attention

Result = tuple[Tensor, Tensor | None]


def _run(
    form: str,
    arrays: dict[str, Tensor | None],
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
        o, final, _ = matrix_state_call(*given, initial_state, cu_seqlens, form, scale, chunk_length(form, chunk_size))
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


def _linear_attn(
    form,
    q,
    k,
    v,
    *,
    scale=None,
    causal=True,
    normalize=False,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    chunk_size=None,
):
    dtype = v.dtype
    if normalize:  # the sums of keys are one more value column, of ones
        q, k, v = (x.to(accumulation(dtype)) for x in (q, k, v))
        v = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    if causal:
        o, final = _run(form, dict(q=q, k=k, v=v), scale, initial_state, output_final_state, cu_seqlens, chunk_size)
    else:
        o, final = _bidirectional(form, q, k, v, scale, cu_seqlens, chunk_size), None
    if normalize:
        numerator, denominator = o[..., :-1], o[..., -1:]
        zero = denominator == 0
        o = (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0).to(dtype)
    return o, final


def _bidirectional(form, q, k, v, scale, cu_seqlens, chunk_size) -> Tensor:
    """Every token reads the last state: one pass to find it, one that starts from it and writes nothing."""
    _, final = _run(form, dict(q=q, k=k, v=v), 0.0, None, True, cu_seqlens, chunk_size)
    nothing = dict(q=q, k=torch.zeros_like(k), v=torch.zeros_like(v))
    return _run(form, nothing, scale, final, False, cu_seqlens, chunk_size)[0]


def _simple_gla(
    form, q, k, v, g, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None
):
    g = g.expand(v.shape[:3]) if g.dim() == 1 else g
    return _run(form, dict(q=q, k=k, v=v, g=g), scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _gla(
    form, q, k, v, g, gv=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None
):
    arrays = dict(q=q, k=k, v=v, g=g, gv=gv)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _rwkv6(form, q, k, v, g, u, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):
    arrays = dict(q=q, k=k, v=v, g=g, u=u)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _delta_rule(
    form, q, k, v, beta, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None
):
    arrays = dict(q=q, k=k, v=v, beta=beta)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _gated_delta_rule(
    form, q, k, v, g, beta, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None
):
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _dplr(
    form, q, k, v, g, a, b, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None
):
    arrays = dict(q=q, k=k, v=v, g=g, a=a, b=b)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


_FAMILIES: dict[str, Callable[..., Any]] = {
    "linear_attn": _linear_attn,
    "simple_gla": _simple_gla,
    "gla": _gla,
    "rwkv6": _rwkv6,
    "delta_rule": _delta_rule,
    "gated_delta_rule": _gated_delta_rule,
    "kda": _gated_delta_rule,
    "dplr": _dplr,
    "mixed_attn": mixed_attention,
}


def _method(form: str, family: str) -> Callable[..., Any]:
    """The backend method of one form of a family: its function's parameters with ``self`` for the form."""
    function = _FAMILIES[family]

    def method(self, *args, **kwargs):
        return function(form, *args, **kwargs)

    first, *others = inspect.signature(function).parameters.values()
    method.__signature__ = inspect.Signature([first.replace(name="self"), *others])
    method.__name__ = method.__qualname__ = f"{form}_{family}"
    method.__doc__ = f"{form.capitalize()} form of ``{family}``."
    return method


class TorchBackend(Backend):
    """Pure PyTorch: every family, form and flag, on any device."""

    name = "torch"
    api = ">=1,<2"
    frameworks = ("torch",)


for _form in FORMS:
    for _family in _FAMILIES:
        setattr(TorchBackend, f"{_form}_{_family}", _method(_form, _family))
