"""The backend: every family and form, lowered to one of three cores by the arrays it was given.

``linear_attn``, ``simple_gla``, ``gla`` and ``rwkv6`` run the diagonal core, ``delta_rule``, ``gated_delta_rule`` and ``kda``
the delta core, ``dplr`` its own (:mod:`.cores`); ``mixed_attn`` is in :mod:`.mixed`. A family is one function here, with the
spec's parameters after the form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from linattn.plugin import FORMS, Backend

from .compat import Array
from .mixed import mixed_attention
from .segments import OPERANDS, accumulation, bidirectional, matrix_state

Result = tuple[Array, Array | None]


def _run(
    form: str,
    arrays: dict[str, Array | None],
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int | None,
) -> Result:
    """Any matrix-state family."""
    given = {name: arrays[name] for name in OPERANDS if arrays.get(name) is not None}
    scale = _scale(given["q"], scale)
    options = dict(form=form, scale=scale, chunk_size=chunk_size, keep=output_final_state)
    return matrix_state(given, initial_state, cu_seqlens, **options)


def _scale(q: Array, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _linear_attn(form, q, k, v, *, scale=None, causal=True, normalize=False, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    dtype = v.dtype
    if normalize:  # the sums of keys are one more value column, of ones
        q, k, v = (x.astype(accumulation(dtype)) for x in (q, k, v))
        v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1)
    if causal:
        o, final = _run(form, dict(q=q, k=k, v=v), scale, initial_state, output_final_state, cu_seqlens, chunk_size)
    else:
        o, final = bidirectional(q, k, v, cu_seqlens, scale=_scale(q, scale)), None
    if normalize:
        numerator, denominator = o[..., :-1], o[..., -1:]
        zero = denominator == 0
        o = jnp.where(zero, 0, numerator / jnp.where(zero, 1, denominator)).astype(dtype)
    return o, final


def _simple_gla(form, q, k, v, g, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    g = jnp.broadcast_to(g, v.shape[:3]) if g.ndim == 1 else g
    return _run(form, dict(q=q, k=k, v=v, g=g), scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _gla(form, q, k, v, g, gv=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    arrays = dict(q=q, k=k, v=v, g=g, gv=gv)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _rwkv6(form, q, k, v, g, u, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    arrays = dict(q=q, k=k, v=v, g=g, u=u)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _delta_rule(form, q, k, v, beta, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    arrays = dict(q=q, k=k, v=v, beta=beta)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _gated_delta_rule(form, q, k, v, g, beta, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    arrays = dict(q=q, k=k, v=v, g=g, beta=beta)
    return _run(form, arrays, scale, initial_state, output_final_state, cu_seqlens, chunk_size)


def _dplr(form, q, k, v, g, a, b, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
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


class JaxBackend(Backend):
    """Plain JAX: every family, form and flag, on any device, under every transform."""

    name = "jax"
    api = ">=1,<2"
    frameworks = ("jax",)


for _form in FORMS:
    for _family in _FAMILIES:
        setattr(JaxBackend, f"{_form}_{_family}", _method(_form, _family))
