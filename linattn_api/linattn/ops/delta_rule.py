"""The delta rule (DeltaNet): the state is corrected towards each new value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..call import Call
from ..context import Context
from ..feature_maps import FeatureMap
from ..spec import COMMON_OPTIONS, Arg, Lowered, Lowering, OpSpec, accumulation_dtype, redescribe, unchanged
from ._family import decoding, family, summary
from ._input_maps import BETA_MAP, QK_NORM

Array = TypeVar("Array")


def to_gated_delta_rule(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """A decay of zero."""
    v = arrays["v"]
    g = xp.full(tuple(v.shape[:3]), 0.0, like=v, dtype=xp.accumulation(v))
    return Lowered({**arrays, "g": g}, options, unchanged)


def as_gated_delta_rule(call: Call) -> Call:
    """What ``to_gated_delta_rule`` gives, as static facts."""
    beta = call.shapes["beta"], call.dtypes["beta"]
    return redescribe(call, "gated_delta_rule", {"g": ("B T HV", accumulation_dtype(call)), "beta": beta}, drop=("beta",))


SPEC = OpSpec(
    name="delta_rule",
    recurrence="S = S⁻ + kᵀ(beta ∘ (v − k S⁻));  o = scale · q S",
    args=(
        Arg("q", "B T H K"),
        Arg("k", "B T H K"),
        Arg("v", "B T HV V"),
        Arg("beta", "B T HV | B T HV V", "float"),
    ),
    options=(*COMMON_OPTIONS, QK_NORM, BETA_MAP),
    lowering=Lowering("gated_delta_rule", to_gated_delta_rule, as_gated_delta_rule),
)


@family(SPEC)
def _delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    qk_norm: str | None = None,
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
    """Delta rule: ``S_t = S_{t-1} + k_tᵀ (beta_t ∘ (v_t − k_t S_{t-1}))``, ``o_t = scale · q_t S_t`` (DeltaNet, Schlag et
    al. 2021; chunk form Yang et al. 2024b).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``; normalise them yourself (L2) if the model wants a contraction.
        v: Values ``[B, T, HV, V]``.
        beta: Writing strength ``[B, T, HV]``, or ``[B, T, HV, V]`` per value channel.
    """
    ...


delta_rule, chunk_delta_rule, recurrent_delta_rule, parallel_delta_rule = _delta_rule


@decoding
def decode_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    qk_norm: str | None = None,
    beta_map: str | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``delta_rule`` token by token, on states that it overwrites."""
    ...


@summary
def summary_delta_rule(
    k: Array,
    v: Array,
    beta: Array,
    *,
    qk_norm: str | None = None,
    beta_map: str | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``delta_rule`` as an affine map of the state."""
    ...
