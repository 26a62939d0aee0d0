"""RWKV-6: a vector decay and a bonus for the current token (Peng et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..context import Context
from ..feature_maps import FeatureMap
from ..gate_maps import Gate
from ..spec import COMMON_OPTIONS, Arg, OpSpec
from ._family import decoding, family, summary
from ._input_maps import GATE, QK_NORM

Array = TypeVar("Array")

SPEC = OpSpec(
    name="rwkv6",
    recurrence="S = Diag(e^g) S⁻ + kᵀv;  o = scale · q (S⁻ + Diag(u) kᵀv)",
    args=(
        Arg("q", "B T H K"),
        Arg("k", "B T H K"),
        Arg("v", "B T HV V"),
        Arg("g", "B T HV K", "float"),
        Arg("u", "HV K", "float"),
    ),
    options=(*COMMON_OPTIONS, QK_NORM, GATE),
)


@family(SPEC)
def _rwkv6(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    u: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """RWKV-6: ``S_t = Diag(e^{g_t}) S_{t-1} + k_tᵀ v_t``, ``o_t = scale · q_t (S_{t-1} + Diag(u) k_tᵀ v_t)`` (Peng et al.
    2024, eqs. 14-15).

    Args:
        q: Receptance ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``.
        g: Natural-log decay of the key channels ``[B, T, HV, K]``; ``≤ 0``.
        u: Bonus of the current token ``[HV, K]``.
    """
    ...


rwkv6, chunk_rwkv6, recurrent_rwkv6, parallel_rwkv6 = _rwkv6


@decoding
def decode_rwkv6(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    u: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``rwkv6`` token by token, on states that it overwrites."""
    ...


@summary
def summary_rwkv6(
    k: Array,
    v: Array,
    g: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``rwkv6`` as an affine map of the state."""
    ...
