"""Diagonal plus low rank transitions: RWKV-7 (Peng et al. 2025) and, by lowering, the delta families."""

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
    name="dplr",
    recurrence="S = Diag(e^g) S⁻ + bᵀ(a S⁻) + kᵀv;  o = scale · q S",
    args=(
        Arg("q", "B T H K"),
        Arg("k", "B T H K"),
        Arg("v", "B T HV V"),
        Arg("g", "B T HV K", "float"),
        Arg("a", "B T HV K", "float"),
        Arg("b", "B T HV K", "float"),
    ),
    options=(*COMMON_OPTIONS, QK_NORM, GATE),
)


@family(SPEC)
def _dplr(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    a: Array,
    b: Array,
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
    """Diagonal plus low rank: ``S_t = Diag(e^{g_t}) S_{t-1} + b_tᵀ (a_t S_{t-1}) + k_tᵀ v_t``, ``o_t = scale · q_t S_t``
    (RWKV-7, Peng et al. 2025, eq. 2).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``.
        g: Natural-log decay of the key channels ``[B, T, HV, K]``; ``≤ 0``.
        a: Reading direction of the low-rank term ``[B, T, HV, K]``.
        b: Writing direction of the low-rank term ``[B, T, HV, K]``.
    """
    ...


dplr, chunk_dplr, recurrent_dplr, parallel_dplr = _dplr


@decoding
def decode_dplr(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    a: Array,
    b: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``dplr`` token by token, on states that it overwrites."""
    ...


@summary
def summary_dplr(
    k: Array,
    v: Array,
    g: Array,
    a: Array,
    b: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``dplr`` as an affine map of the state."""
    ...
