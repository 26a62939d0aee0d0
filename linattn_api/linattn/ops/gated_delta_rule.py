"""The gated delta rule (Gated DeltaNet): a scalar decay, then the delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..context import Context
from ..feature_maps import FeatureMap
from ..gate_maps import Gate
from ..spec import COMMON_OPTIONS, Arg, Lowered, Lowering, OpSpec, redescribe, unchanged
from ._family import decoding, family, summary
from ._input_maps import BETA_MAP, HEAD_GATE, QK_NORM

Array = TypeVar("Array")


def to_kda(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """The same decay for every key channel."""
    g = arrays["g"]
    return Lowered({**arrays, "g": xp.broadcast_to(g[..., None], (*g.shape, arrays["k"].shape[-1]))}, options, unchanged)


SPEC = OpSpec(
    name="gated_delta_rule",
    recurrence="S' = e^g S⁻;  S = S' + kᵀ(beta ∘ (v − k S'));  o = scale · q S",
    args=(
        Arg("q", "B T H K"),
        Arg("k", "B T H K"),
        Arg("v", "B T HV V"),
        Arg("g", "B T HV", "float"),
        Arg("beta", "B T HV | B T HV V", "float"),
    ),
    options=(*COMMON_OPTIONS, QK_NORM, HEAD_GATE, BETA_MAP),
    lowering=Lowering("kda", to_kda, lambda call: redescribe(call, "kda", {"g": ("B T HV K", call.dtypes["g"])})),
)


@family(SPEC)
def _gated_delta_rule(
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
    """Gated delta rule: ``S' = e^{g_t} S_{t-1}``, ``S_t = S' + k_tᵀ (beta_t ∘ (v_t − k_t S'))``, ``o_t = scale · q_t S_t``
    (Gated DeltaNet, Yang et al. 2025, eq. 10).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``.
        g: Natural-log decay ``[B, T, HV]``; ``≤ 0``, ``-inf`` resets the state.
        beta: Writing strength ``[B, T, HV]``, or ``[B, T, HV, V]`` per value channel.
    """
    ...


gated_delta_rule, chunk_gated_delta_rule, recurrent_gated_delta_rule, parallel_gated_delta_rule = _gated_delta_rule


@decoding
def decode_gated_delta_rule(
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
    """``gated_delta_rule`` token by token, on states that it overwrites."""
    ...


@summary
def summary_gated_delta_rule(
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
    """``gated_delta_rule`` as an affine map of the state."""
    ...
