"""The recurrences of ``mlx_lm`` (0.32), on ``linattn.gated_delta_rule``, ``kda`` and ``ssd``: by chunks, so with gradients.

>>> from linattn.integrations.mlx_lm import gated_delta_update, ssm_update

Its states have values before keys, ``[B, H, V, K]``; its queries bring their scale, and its decays are factors, not logs.
A token that a mask leaves out changes no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .. import ops
from ..errors import ShapeError
from ..frameworks import framework_of
from ..gate_maps import BoundedSigmoid, Softplus
from ..ops.ssd import steps
from .seams import Integration

__all__ = [
    "FUNCTIONS",
    "disable",
    "enable",
    "gated_delta_kernel",
    "gated_delta_ops",
    "gated_delta_update",
    "ssm_attn",
    "ssm_update",
]


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule on raw projections, as ``mlx_lm.models.gated_delta`` calls it.

    Args:
        q: Queries ``[B, T, Hk, K]``, normed and scaled.
        k: Keys ``[B, T, Hk, K]``, normed.
        v: Values ``[B, T, Hv, V]``.
        a: The decays' projection, ``[B, T, Hv]``, or ``[B, T, Hv, K]`` with a decay for each key channel.
        b: The strengths' projection ``[B, T, Hv]``; their sigmoid is taken.
        A_log: Log of the decay rate, one number a head.
        dt_bias: Added to ``a``, a number for each of its columns.
        state: States before the first token ``[B, Hv, V, K]``. Default zeros.
        mask: False ``[B, T]`` for tokens that are none: their outputs are zero. Default: all are.
        use_kernel: Changes nothing here: the backend is chosen by the call, and every one has gradients.
        lower_bound: Log decays are ``lower_bound · sigmoid(exp(A_log) · (a + dt_bias))``; below zero. Default:
            ``−exp(A_log) · softplus(a + dt_bias)``.
        allow_neg_eigval: Strengths are twice the sigmoid. Default False.

    Returns:
        Outputs ``[B, T, Hv, V]`` of the dtype of ``q``, and states like ``state``, float32 where there was none.

    Raises:
        ArgumentError: As :func:`linattn.gated_delta_rule` raises.
    """
    rate, bias = mx.reshape(A_log, (-1,)), mx.reshape(dt_bias, a.shape[2:])
    gate = Softplus(rate, bias) if lower_bound is None else BoundedSigmoid(rate, bias, lower_bound)
    strength = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
    return _gated_delta(q, k, v, gate(a), strength, state, mask)


def gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule, as ``mlx_lm.models.gated_delta`` calls it.

    Args:
        q: Queries ``[B, T, Hk, K]``, normed and scaled.
        k: Keys ``[B, T, Hk, K]``, normed.
        v: Values ``[B, T, Hv, V]``.
        g: Decay factors between 0 and 1, ``[B, T, Hv]``, or ``[B, T, Hv, K]``, one for each key channel.
        beta: Strengths ``[B, T, Hv]``.
        state: States before the first token ``[B, Hv, V, K]``. Default zeros.
        mask: False ``[B, T]`` for tokens that are none: their outputs are zero. Default: all are.

    Returns:
        Outputs ``[B, T, Hv, V]`` of the dtype of ``q``, and states like ``state``, float32 where there was none.

    Raises:
        ArgumentError: As :func:`linattn.gated_delta_rule` raises.
    """
    kept = g > 0  # no gradient where nothing is kept: that of a logarithm has no bound
    decay = mx.where(kept, mx.log(mx.where(kept, g, 1).astype(mx.float32)), -mx.inf)
    return _gated_delta(q, k, v, decay, beta, state, mask)


def gated_delta_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """:func:`gated_delta_ops`: arguments, results and errors are those of it, and ``state`` is needed."""
    return gated_delta_ops(q, k, v, g, beta, state, mask)


def ssm_attn(
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    step: int = 256,
) -> tuple[mx.array, mx.array]:
    """:func:`ssm_update`, as ``mlx_lm.models.ssm`` calls it for many tokens. ``step`` changes nothing here."""
    return ssm_update(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """State-space duality (Mamba-2), as ``mlx_lm.models.ssm`` calls it.

    Args:
        hidden_states: Inputs ``[B, T, H, P]``.
        A_log: Log of the decay rate ``[H]``.
        B: Input projection ``[B, T, G, N]``; head ``j`` uses group ``j // (H / G)``.
        C: Output projection ``[B, T, G, N]``.
        D: Skip ``[H]``.
        dt: Step sizes' projection ``[B, T, H]``, whose softplus is taken.
        dt_bias: Added to ``dt`` ``[H]``.
        state: States before the first token ``[B, H, P, N]``. Default zeros.
        time_step_limit: The least and the greatest step. Default ``(0.001, 100.0)``.
        mask: False ``[B, T]`` for tokens that are none: no state changes there. Default: all are.
        lengths: How many tokens each row has ``[B]``; those behind are none. Default: all of them.

    Returns:
        Outputs like ``hidden_states``, and states like ``state``, float32 where there was none.

    Raises:
        ArgumentError: As :func:`linattn.ssd` raises.
    """
    delta = steps(framework_of(dt), dt, dt_bias, {"dt_softplus": True, "dt_limit": time_step_limit})
    for live in (mask, None if lengths is None else mx.arange(dt.shape[1]) < lengths[:, None]):
        delta = delta if live is None else mx.where(live[..., None], delta, 0)
    rate = -mx.exp(A_log.astype(mx.float32))
    x, keys, queries = _of_one_dtype(hidden_states, B, C)
    start = None if state is None else state.swapaxes(-1, -2)
    y, final = ops.ssd(x, delta, rate, keys, queries, D=D, initial_state=start, output_final_state=True)
    assert final is not None
    return y.astype(hidden_states.dtype), _like(final, state)


def _gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array | None, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """With log decays ``g``. A token that is none keeps all and adds nothing."""
    if mask is not None:
        if tuple(mask.shape) != tuple(q.shape[:2]):
            raise ShapeError(f"gated_delta_update: mask must be [B, T] = {tuple(q.shape[:2])}, got {tuple(mask.shape)}")
        g = mx.where(mx.reshape(mask, (*mask.shape, *[1] * (g.ndim - 2))), g, 0)
        beta = mx.where(mask[..., None], beta, 0)
    rule = ops.gated_delta_rule if g.ndim == 3 else ops.kda
    start = None if state is None else state.swapaxes(-1, -2)
    queries, keys, values = _of_one_dtype(q, k, v)
    y, final = rule(queries, keys, values, g, beta, scale=1.0, initial_state=start, output_final_state=True)
    assert final is not None
    y = y if mask is None else mx.where(mask[..., None, None], y, 0)
    return y.astype(q.dtype), _like(final, state)


def _like(final: mx.array, state: mx.array | None) -> mx.array:
    """Values before keys, in the dtype of the states that came."""
    final = final.swapaxes(-1, -2)
    return final if state is None else final.astype(state.dtype)


def _of_one_dtype(*arrays: mx.array) -> Sequence[Any]:
    """All in the widest dtype among them."""
    dtype = mx.result_type(*arrays)
    return [x.astype(dtype) for x in arrays]


_DELTA = "mlx_lm.models.gated_delta"
_SSM = "mlx_lm.models.ssm"

FUNCTIONS = {
    f"{_DELTA}.gated_delta_update": gated_delta_update,
    f"{_DELTA}.gated_delta_ops": gated_delta_ops,
    f"{_DELTA}.gated_delta_kernel": gated_delta_kernel,
    f"{_SSM}.ssm_update": ssm_update,
    f"{_SSM}.ssm_attn": ssm_attn,
}
"""Of the package's functions, those that are served, and by which of ours."""

_integration = Integration("mlx_lm", "mlx-lm", FUNCTIONS, adapter="mlx_lm")
enable = _integration.enable
disable = _integration.disable
