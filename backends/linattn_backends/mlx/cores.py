"""The chunk form of every matrix-state family, one segment at a time.

With ``P, Q, Γ`` of :mod:`.decay`, ``S`` the state before a chunk, ``q̃ = q e^P``, ``k̂ = k e^Q`` and ``A = pairs(q, k)``:

* diagonal (``linear_attn simple_gla gla rwkv6``): ``o = q̃ S + A v``, ``S ← e^{P+Q} S + k̂ᵀ v``. A value gate does to ``v``'s
  channels what ``g`` does to ``k``'s; the bonus of ``rwkv6`` is the diagonal of ``A``.
* delta (``delta_rule gated_delta_rule kda``): the values written are ``x = beta ∘ (v − k̃ S − tril(pairs(k, k), −1) x)``,
  a unit lower triangular system; then as above with ``x`` for ``v``.
* dplr: ``w = ã S + pairs(a, k) v + pairs(a, b) w`` with ``a`` reading ``S⁻``; ``o = q̃ S + A v + pairs(q, b) w``,
  ``S ← e^{P+Q} S + k̂ᵀ v + b̂ᵀ w``.

Arrays are ``[m, B, HV, C, W]``, states ``[B, HV, K, V]``. What needs no state is done for the ``m`` chunks together; a loop
carries the state over them. All of it is differentiated by MLX, one segment at a time: see :mod:`.segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .decay import decayed, decayed_values
from .layout import Bounds
from .solve import solve, unit_lower_inverse
from .tree import causal, exp, transposed

Arrays = dict[str, mx.array]
Step = Callable[..., tuple[mx.array, Any]]
Result = tuple[mx.array, mx.array, list[mx.array]]
"""``o [m, B, HV, C, V]``, the state after the segment, the states after each of its chunks."""


def times(x: mx.array, factor: mx.array | None) -> mx.array:
    """``x ∘ factor``; ``None`` is one."""
    return x if factor is None else x * factor


def walk(
    step: Step, S: mx.array, xs: Sequence[mx.array | None], bounds: Bounds | None
) -> tuple[mx.array, list[mx.array], list[mx.array], list[Any]]:
    """Carry the state over the chunks of ``xs``. Returns the last state; the states before and after each, and what ``step``
    returned."""
    m = next(x.shape[0] for x in xs if x is not None)
    chunks = [[None] * m if x is None else [y.squeeze(0) for y in mx.split(x, m)] for x in xs]
    before, after, found = [], [], []
    for i, chunk in enumerate(zip(*chunks, strict=True)):
        S = S if bounds is None else bounds.enter(i, S)
        before.append(S)
        S, y = step(S, *chunk)
        after.append(S)
        found.append(y)
    return S, before, after, found


def diagonal(x: Arrays, S: mx.array, bounds: Bounds | None) -> Result:
    """Gates only; ``u`` makes ``q`` read the state before the token."""
    q, k, v = x["q"], x["k"], x["v"]
    gate = decayed(x.get("g"), [q], [k], ("u" in x,))
    ((A,),) = gate.pairs
    values = decayed_values(x["gv"], A, v) if "gv" in x else None
    written = transposed(times(k, gate.end)) @ times(v, None if values is None else values.end)

    def step(S: mx.array, written: mx.array, total: mx.array | None, value_total: mx.array | None) -> tuple[mx.array, None]:
        return times(times(S, total), value_total) + written, None

    totals = gate.total, None if values is None else values.total
    S, before, after, _ = walk(step, S, (written, *totals), bounds)
    o = times(q, gate.start_exclusive if "u" in x else gate.start) @ mx.stack(before)
    o = o + A @ v if values is None else o * values.start + values.read
    if "u" in x:
        o = o + (q * x["u"] * k).sum(-1, keepdims=True) * v
    return o, S, after


def delta(x: Arrays, S: mx.array, bounds: Bounds | None) -> Result:
    """The delta rule under any gate, ``beta [..., C, 1]`` or ``[..., C, V]``.

    With one ``beta`` a token the system has one inverse for all columns; with one a value channel every column has a system of
    its own, and the columns become a batch dimension.
    """
    q, k, v, beta = x["q"], x["k"], x["v"], x["beta"]
    gate = decayed(x.get("g"), [q, k], [k], (False, False))
    (A,), (within,) = gate.pairs
    L = causal(within, True)
    shared = beta.shape[-1] == 1
    L = L * beta if shared else L[..., None, :, :] * transposed(beta)[..., None]

    def step(
        S: mx.array,
        v: mx.array,
        beta: mx.array,
        k_read: mx.array,
        k_end: mx.array,
        total: mx.array | None,
        L: mx.array,
        inverse: mx.array,
    ) -> tuple[mx.array, mx.array]:
        r = beta * (v - k_read @ S)
        x = solve(L, inverse, r) if shared else transposed(solve(L, inverse, transposed(r)[..., None]).squeeze(-1))
        return times(S, total) + k_end @ x, x

    chunks = v, beta, times(k, gate.start), transposed(times(k, gate.end)), gate.total, L, unit_lower_inverse(L)
    S, before, after, written = walk(step, S, chunks, bounds)
    return times(q, gate.start) @ mx.stack(before) + A @ mx.stack(written), S, after


def dplr(x: Arrays, S: mx.array, bounds: Bounds | None) -> Result:
    """Diagonal plus low rank; ``a`` reads the state before the token."""
    q, k, v, a, b = (x[name] for name in "qkvab")
    gate = decayed(x["g"], [q, a], [k, b], (False, True))
    (Aqk, Aqb), (Aak, Aab) = gate.pairs
    L = -Aab

    def step(
        S: mx.array,
        read: mx.array,
        written: mx.array,
        a_read: mx.array,
        b_end: mx.array,
        total: mx.array,
        L: mx.array,
        inverse: mx.array,
    ) -> tuple[mx.array, mx.array]:
        w = solve(L, inverse, read + a_read @ S)
        return S * total + written + b_end @ w, w

    written = transposed(k * gate.end) @ v
    chunks = Aak @ v, written, a * gate.start_exclusive, transposed(b * gate.end), gate.total, L, unit_lower_inverse(L)
    S, before, after, w = walk(step, S, chunks, bounds)
    return (q * gate.start) @ mx.stack(before) + Aqk @ v + Aqb @ mx.stack(w), S, after


def recurrent(x: Arrays, S: mx.array, bounds: Bounds | None) -> Result:
    """The definition, token by token: chunks of one token."""
    names = [name for name in x if name != "u"]

    def step(S: mx.array, *token: mx.array) -> tuple[mx.array, mx.array]:
        return token_step({**x, **dict(zip(names, token, strict=True))}, S)

    S, _, after, o = walk(step, S, [x[name] for name in names], bounds)
    return mx.stack(o), S, after


def token_step(x: Arrays, S: mx.array) -> tuple[mx.array, mx.array]:
    """One token: operands ``[..., 1, W]``, ``S [..., K, V]``. Returns the new state and ``o [..., 1, V]``."""
    q, k, v = x["q"], x["k"], x["v"]
    before = S
    if "g" in x:
        S = S * transposed(exp(x["g"]))
    if "gv" in x:
        S = S * exp(x["gv"])
    if "beta" in x:
        v = x["beta"] * (v - k @ S)
    if "a" in x:
        S = S + transposed(x["b"]) * (x["a"] @ before)
    S = S + transposed(k) * v
    if "u" in x:
        return S, q @ before + (q * x["u"] * k).sum(-1, keepdims=True) * v
    return S, q @ S


def core_of(form: str, arrays: Arrays) -> Callable[[Arrays, mx.array, Bounds | None], Result]:
    """The core for the operands given: only ``dplr`` has ``a``, only the delta families ``beta``."""
    if form == "recurrent":
        return recurrent
    return dplr if "a" in arrays else delta if "beta" in arrays else diagonal
