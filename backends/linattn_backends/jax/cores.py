"""The chunk form of every matrix-state family, one segment at a time.

With ``P, Q, Γ`` of :mod:`.decay`, ``S`` the state before a chunk, ``q̃ = q e^P``, ``k̂ = k e^Q`` and ``A = pairs(q, k)``:

* diagonal (``linear_attn simple_gla gla rwkv6``): ``o = q̃ S + A v``, ``S ← e^{P+Q} S + k̂ᵀ v``. A value gate does to ``v``'s
  channels what ``g`` does to ``k``'s; the bonus of ``rwkv6`` is the diagonal of ``A``.
* delta (``delta_rule gated_delta_rule kda``): the values written are ``x = beta ∘ (v − k̃ S − tril(pairs(k, k), −1) x)``,
  a unit lower triangular system; then as above with ``x`` for ``v``.
* dplr: ``w = ã S + pairs(a, k) v + pairs(a, b) w`` with ``a`` reading ``S⁻``; ``o = q̃ S + A v + pairs(q, b) w``,
  ``S ← e^{P+Q} S + k̂ᵀ v + b̂ᵀ w``.

Arrays are ``[m, B, HV, C, W]``, states ``[B, HV, K, V]``. What needs no state is done for the ``m`` chunks together; a scan
carries the state over them. All of it is differentiated by JAX, one segment at a time: see :mod:`.segments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from .compat import Array
from .decay import Decayed, decayed, decayed_values
from .layout import Bounds
from .solve import solve, solve_by_column, unit_lower_inverse
from .tree import matmul

Arrays = dict[str, Array]
Step = Callable[[Array, Any], tuple[Array, Any]]
Result = tuple[Array, Array, Array]
"""``o [m, B, HV, C, V]``, the state after the segment, the states after each of its chunks."""


def times(x: Array, factor: Array | None) -> Array:
    """``x ∘ factor``; ``None`` is one."""
    return x if factor is None else x * factor


def nothing(v: Array) -> Array:
    """Zeros ``[..., 1, V]`` of ``v [..., C, V]`` that XLA cannot know to be zeros: added to a state that it may know.

    In a fusion of XLA's CPU library (YNNPACK, jaxlib 0.10.2) that also holds a sum, a caller's too, a product with one number
    everywhere on its right reads memory nobody wrote: such as that with a state of zeros, once a lone chunk's loop is gone.
    """
    return (v[..., :1, :] > jnp.inf).astype(v.dtype)


def walk(step: Step, S: Array, xs: Any, v: Array, bounds: Bounds | None) -> tuple[Array, tuple[Array, Array, Any]]:
    """Carry the state over ``m`` chunks of ``v [m, B, HV, C, V]``. Returns the last state; the states before and after each,
    and what ``step`` returned."""
    zeros = nothing(v[0])

    def visit(S: Array, given: Any) -> tuple[Array, Any]:
        x, bound = given
        if bound is not None:
            S = jnp.where(bound.begins, 0 if bound.start is None else bound.start.astype(S.dtype), S)
        S = S + zeros
        after, y = step(S, x)
        return after, (S, after, y)

    return lax.scan(visit, S, (xs, bounds))


def diagonal(x: Arrays, S: Array, bounds: Bounds | None) -> Result:
    """Gates only; ``u`` makes ``q`` read the state before the token."""
    q, k, v = x["q"], x["k"], x["v"]
    gate = decayed(x.get("g"), [q], [k], ("u" in x,))
    ((A,),) = gate.pairs
    values = decayed_values(x["gv"], A, v) if "gv" in x else None
    written = matmul(times(k, gate.end).mT, times(v, None if values is None else values.end))

    def step(S: Array, chunk: Any) -> tuple[Array, None]:
        written, total, value_total = chunk
        return times(times(S, total), value_total) + written, None

    S, (before, after, _) = walk(step, S, (written, gate.total, None if values is None else values.total), v, bounds)
    o = matmul(times(q, gate.start_exclusive if "u" in x else gate.start), before)
    o = o + matmul(A, v) if values is None else o * values.start + values.read
    if "u" in x:
        o = o + (q * x["u"] * k).sum(-1, keepdims=True) * v
    return o, S, after


def delta(x: Arrays, S: Array, bounds: Bounds | None) -> Result:
    """The delta rule under any gate, ``beta [..., C, 1]`` or ``[..., C, V]``.

    With one ``beta`` a token the system has one inverse for all columns; with one a value channel every column has a system of
    its own, solved by substitution over the chunk's tokens: as many multiplications, but ``C`` small steps.
    """
    q, k, v, beta = x["q"], x["k"], x["v"], x["beta"]
    gate = decayed(x.get("g"), [q, k], [k], (False, False))
    (A,), (within,) = gate.pairs
    shared = beta.shape[-1] == 1
    L = jnp.tril(within, -1) * (beta if shared else 1)
    inverse = unit_lower_inverse(L) if shared else None

    def step(S: Array, chunk: Any) -> tuple[Array, Array]:
        v, beta, k_read, k_end, total, L, inverse = chunk
        r = v - matmul(k_read, S)
        x = solve_by_column(L, beta, r) if inverse is None else solve(L, inverse, beta * r)
        return times(S, total) + matmul(k_end.mT, x), x

    chunks = v, beta, times(k, gate.start), times(k, gate.end), gate.total, L, inverse
    S, (before, after, written) = walk(step, S, chunks, v, bounds)
    return matmul(times(q, gate.start), before) + matmul(A, written), S, after


def dplr(x: Arrays, S: Array, bounds: Bounds | None) -> Result:
    """Diagonal plus low rank; ``a`` reads the state before the token."""
    q, k, v, a, b = (x[name] for name in "qkvab")
    gate: Decayed = decayed(x["g"], [q, a], [k, b], (False, True))
    (Aqk, Aqb), (Aak, Aab) = gate.pairs
    inverse = unit_lower_inverse(-Aab)

    def step(S: Array, chunk: Any) -> tuple[Array, Array]:
        read, written, a_read, b_end, total, Aab, inverse = chunk
        w = solve(-Aab, inverse, read + matmul(a_read, S))
        return S * total + written + matmul(b_end.mT, w), w

    written = matmul((k * gate.end).mT, v)
    chunks = matmul(Aak, v), written, a * gate.start_exclusive, b * gate.end, gate.total, Aab, inverse
    S, (before, after, w) = walk(step, S, chunks, v, bounds)
    return matmul(q * gate.start, before) + matmul(Aqk, v) + matmul(Aqb, w), S, after


def recurrent(x: Arrays, S: Array, bounds: Bounds | None) -> Result:
    """The definition, token by token."""

    def step(S: Array, chunk: Arrays) -> tuple[Array, Array]:
        tokens = {name: jnp.moveaxis(y, -2, 0)[..., None, :] for name, y in chunk.items()}
        return lax.scan(lambda S, now: token_step({**now, **bonus}, S), S, tokens)

    bonus = {"u": x["u"][0]} if "u" in x else {}
    S, (_, after, o) = walk(step, S, {name: y for name, y in x.items() if name != "u"}, x["v"], bounds)
    return jnp.moveaxis(o[..., 0, :], 1, -2), S, after


def token_step(x: Arrays, S: Array) -> tuple[Array, Array]:
    """One token: operands ``[..., 1, W]``, ``S [..., K, V]``. Returns the new state and ``o [..., 1, V]``."""
    q, k, v = x["q"], x["k"], x["v"]
    before = S
    if "g" in x:
        S = S * jnp.exp(x["g"]).mT
    if "gv" in x:
        S = S * jnp.exp(x["gv"])
    if "beta" in x:
        v = x["beta"] * (v - matmul(k, S))
    if "a" in x:
        S = S + x["b"].mT * matmul(x["a"], before)
    S = S + k.mT * v
    if "u" in x:
        return S, matmul(q, before) + (q * x["u"] * k).sum(-1, keepdims=True) * v
    return S, matmul(q, S)


def core_of(form: str, arrays: Arrays) -> Callable[[Arrays, Array, Bounds | None], Result]:
    """The core for the operands given: only ``dplr`` has ``a``, only the delta families ``beta``."""
    if form == "recurrent":
        return recurrent
    return dplr if "a" in arrays else delta if "beta" in arrays else diagonal
