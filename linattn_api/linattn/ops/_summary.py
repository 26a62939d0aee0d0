"""A summary read off the final state of a wider call, so that every backend with the chunk form of a family can make one.

``S_out = A ∘ S_in + b`` holds for every column of the state by itself. Columns beside the values that start as the identity and
are written nothing end as ``A``, while those of the values start at zero and end as ``b``: one pass of the family's own
recurrence gives both, whatever the gates, resets and packed sequences. How ``A`` acts says which columns that takes:

* nothing decays (``linear_attn``): none, ``A`` is 1;
* a number a head, or a key channel: one column of ones;
* key and value channels (``gla`` with ``gv``): such a column, and such a row, which only the values' gate decays;
* a matrix: ``K`` columns, the identity;
* a matrix a value channel (``beta`` per value channel): likewise, with every value channel as a head of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..call import Call
from ..frameworks import Framework
from ..spec import FAMILIES, accumulation_dtype, redescribe
from ._input_maps import apply_beta_map, apply_gate, describe_beta_map, describe_gate
from ._normalize import with_column

__all__ = ["Wider", "as_chunk", "kind_of", "widen"]

Kind = Literal["one", "head", "keys", "keys and values", "matrix", "matrices"]
OF_A_SUMMARY = {"output_final_state": True, "scale": 1.0}
"""Options of the chunk call: its final state is all that is read."""


def kind_of(op: str, value_gate: bool, value_beta: bool) -> Kind:
    """How ``A`` acts on the state of a family."""
    if op == "linear_attn":
        return "one"
    if op in ("simple_gla", "ssd"):
        return "head"
    if op in ("gla", "rwkv6"):
        return "keys and values" if value_gate else "keys"
    return "matrices" if value_beta else "matrix"


# -- static facts ----------------------------------------------------------------------------------------------------


def as_chunk(call: Call) -> Call:
    """The chunk call that a summary is read off."""
    wide, shapes, K = accumulation_dtype(call), call.shapes, call.K
    kind = kind_of(call.op, call.has("gv"), call.beta == "vector")
    if kind == "matrices":
        call = describe_gate(call) if call.gate else call
        call = describe_beta_map(call) if call.option("beta_map") else call
    V = call.V + (call.option("normalize") is True)
    dims = {
        "one": {"V": V},
        "head": {"V": V + 1},
        "keys": {"V": V + 1},
        "keys and values": {"V": V + 1, "K": K + 1},
        "matrix": {"V": V + K},
        "matrices": {"V": 1 + K, "HV": call.HV * V},
    }[kind]
    give = {"C": (shapes["B"], call.dtypes["B"])} if call.op == "ssd" else {"q": (shapes["k"], call.dtype)}
    if call.op == "rwkv6":
        give["u"] = ("HV K", wide)
    if kind == "matrices":
        give["beta"] = ("B T HV", call.dtypes["beta"])
    if kind != "one":
        give["initial_state"] = ("N HV K V", wide)
    call = redescribe(call, call.op, give, dims=dims)
    family = FAMILIES[call.op]
    asked = {**dict(call.options), **OF_A_SUMMARY, **({"normalize": False} if call.option("normalize") else {})}
    options = tuple((name, asked.get(name, default)) for name, default in family.defaults.items())
    return replace(call, form="chunk", options=options)


# -- arrays ----------------------------------------------------------------------------------------------------------


class Wider(NamedTuple):
    """The wider call.

    Attributes:
        arrays: Positional arrays of the chunk form, by name.
        options: Its keywords.
        read: From its final state, ``(A, b)``.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]
    read: Callable[[Any], tuple[Any, Any]]


def widen(xp: Framework, op: str, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Wider:
    """The chunk call whose final state holds the summary.

    Args:
        xp: Of the arrays.
        op: The family.
        arrays: Positional arrays of the summary, by name.
        options: Its keywords.
    """
    x = dict(arrays)
    asked: dict[str, Any] = {**FAMILIES[op].defaults, "initial_state": None, **options, **OF_A_SUMMARY}
    beta, values = x.get("beta"), "x" if op == "ssd" else "v"
    kind = kind_of(op, x.get("gv") is not None, beta is not None and len(beta.shape) == 4)
    if asked.get("normalize"):
        x[values], x["gv"] = with_column(xp, x[values], x.get("gv"))
        asked["normalize"] = False
    if op == "ssd":
        x["C"] = x["B"]
        asked |= {"D": None, "z": None}
    v, k = x[values], x["B" if op == "ssd" else "k"]
    K, V, HV = k.shape[-1], v.shape[-1], v.shape[2]
    N = v.shape[0] if asked.get("cu_seqlens") is None else asked["cu_seqlens"].shape[0] - 1
    like = xp.full((), 0.0, like=v, dtype=xp.accumulation(v))
    if op == "rwkv6":
        x["u"] = xp.full((HV, K), 0.0, like=like)

    def start(draw: Callable[..., NDArray[Any]], K: int, V: int, heads: int, rows: int, columns: int) -> Any:
        return xp.broadcast_to(xp.constant(draw, (K, V), like), (N, heads, rows, columns))

    if kind == "one":
        read = lambda S: (xp.full((N, HV), 1.0, like=S), S)  # noqa: E731
    elif kind in ("head", "keys"):
        x[values] = padded(xp, v, 1)
        asked["initial_state"] = start(last_column, K, V, HV, K, V + 1)
        read = lambda S: (S[:, :, 0, V] if kind == "head" else S[..., V], S[..., :V])  # noqa: E731
    elif kind == "keys and values":
        x |= {"v": padded(xp, v, 1), "gv": padded(xp, x["gv"], 1), "k": padded(xp, k, 1), "g": padded(xp, x["g"], 1)}
        asked["initial_state"] = start(last_row_and_column, K, V, HV, K + 1, V + 1)
        read = lambda S: (xp.concat([S[:, :, :K, V], S[:, :, K, :V]], axis=-1), S[:, :, :K, :V])  # noqa: E731
    elif kind == "matrix":
        x["v"] = padded(xp, v, K)
        asked["initial_state"] = start(identity_beside, K, V, HV, K, V + K)
        read = lambda S: (S[..., V:], S[..., :V])  # noqa: E731
    else:
        x, asked = by_value_channel(xp, x, asked)
        asked["initial_state"] = start(identity_beside, K, 1, HV * V, K, 1 + K)

        def read(S: Any) -> tuple[Any, Any]:
            each = S.reshape(N, HV, V, K, 1 + K)
            return each[..., 1:], xp.swapaxes(each[..., 0], -1, -2)

    if op != "ssd":
        x["q"] = x["k"]
    return Wider(x, asked, read)


def by_value_channel(xp: Framework, x: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A ``beta`` per value channel: every channel is a head of width 1, which ``beta`` is one number for."""
    if options.get("gate") is not None:
        x, options, _ = apply_gate(xp, x, options)
    if options.get("beta_map") is not None:
        x, options, _ = apply_beta_map(xp, x, options)
    B, T, HV, V = x["v"].shape
    K = x["k"].shape[-1]
    x = {**x, "v": padded(xp, x["v"].reshape(B, T, HV * V, 1), K), "beta": x["beta"].reshape(B, T, HV * V)}
    if x.get("g") is not None:
        x["g"] = xp.repeat_heads(x["g"], HV * V)
    return x, options


def padded(xp: Framework, x: Any, more: int) -> Any:
    """``x`` with more channels, of zeros."""
    return xp.concat([x, xp.full((*x.shape[:-1], more), 0.0, like=x)], axis=-1)


def last_column(K: int, V: int) -> NDArray[Any]:
    """Zeros, and a last column of ones ``[K, V+1]``."""
    return np.eye(1, V + 1, V).repeat(K, axis=0)


def last_row_and_column(K: int, V: int) -> NDArray[Any]:
    """Zeros, and a last row and column of ones ``[K+1, V+1]``."""
    return np.maximum(last_column(K + 1, V), last_column(V + 1, K).T)


def identity_beside(K: int, V: int) -> NDArray[Any]:
    """Zeros, and the identity beside them ``[K, V+K]``."""
    return np.eye(K, V + K, V)
