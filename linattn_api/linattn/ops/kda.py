"""Kimi Delta Attention: a decay per key channel, then the delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..call import Call
from ..context import Context
from ..feature_maps import FeatureMap
from ..gate_maps import Gate
from ..spec import COMMON_OPTIONS, Arg, Lowered, Lowering, OpSpec, accumulation_dtype, redescribe
from ._family import decoding, family, summary
from ._input_maps import BETA_MAP, GATE, QK_NORM

Array = TypeVar("Array")


def blocked(call: Call) -> str | None:
    """A beta per value channel makes the transition differ from column to column of the state; ``a`` and ``b`` are made of
    mapped inputs.
    """
    if call.beta == "vector":
        return "beta per value channel is no special case of dplr"
    maps = [name for name in ("qk_norm", "gate", "beta_map") if call.option(name) is not None]
    return f"dplr takes what {' and '.join(maps)} {'make' if len(maps) > 1 else 'makes'}" if maps else None


def as_dplr(call: Call) -> Call:
    """What ``to_dplr`` gives, as static facts."""
    wide = ("B T HV K", accumulation_dtype(call))
    return redescribe(call, "dplr", {"g": wide, "a": wide, "b": wide}, drop=("beta", "beta_map"), widen=True)


def to_dplr(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """``a = −e^g ∘ k``, ``b = beta · k``, ``v ← beta · v``, in the accumulation dtype so that nothing more is rounded."""
    q, k, v, g, beta = (xp.astype(arrays[name], xp.accumulation(arrays["v"])) for name in ("q", "k", "v", "g", "beta"))
    out_dtype = xp.dtype(arrays["v"])
    keys, beta = xp.repeat_heads(k, v.shape[2]), beta[..., None]
    general = {**arrays, "q": q, "k": k, "v": beta * v, "g": g, "a": -xp.exp(g) * keys, "b": beta * keys}
    del general["beta"]

    def finish(o: Any, state: Any) -> tuple[Any, Any]:
        return xp.astype(o, out_dtype), state

    return Lowered(general, options, finish)


SPEC = OpSpec(
    name="kda",
    recurrence="S' = Diag(e^g) S⁻;  S = S' + kᵀ(beta ∘ (v − k S'));  o = scale · q S",
    args=(
        Arg("q", "B T H K"),
        Arg("k", "B T H K"),
        Arg("v", "B T HV V"),
        Arg("g", "B T HV K", "float"),
        Arg("beta", "B T HV | B T HV V", "float"),
    ),
    options=(*COMMON_OPTIONS, QK_NORM, GATE, BETA_MAP),
    lowering=Lowering("dplr", to_dplr, as_dplr, blocked),
)


@family(SPEC)
def _kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    beta_map: str | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """Kimi Delta Attention: ``S' = Diag(e^{g_t}) S_{t-1}``, ``S_t = S' + k_tᵀ (beta_t ∘ (v_t − k_t S'))``,
    ``o_t = scale · q_t S_t`` (Kimi Linear, 2025, eq. 1).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``.
        g: Natural-log decay of the key channels ``[B, T, HV, K]``; ``≤ 0``, ``-inf`` resets a channel.
        beta: Writing strength ``[B, T, HV]``, or ``[B, T, HV, V]`` per value channel.
    """
    ...


kda, chunk_kda, recurrent_kda, parallel_kda = _kda


@decoding
def decode_kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    beta_map: str | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``kda`` token by token, on states that it overwrites."""
    ...


@summary
def summary_kda(
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    beta_map: str | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``kda`` as an affine map of the state."""
    ...
