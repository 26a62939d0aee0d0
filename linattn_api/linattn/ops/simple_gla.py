"""Linear attention with a scalar decay per head: RetNet, Lightning Attention, Mamba-2 (SSD), mLSTM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..context import Context
from ..feature_maps import FeatureMap
from ..gate_maps import Gate
from ..spec import COMMON_OPTIONS, Arg, Lowered, Lowering, OpSpec, redescribe, unchanged
from ._family import decoding, family, summary
from ._input_maps import HEAD_GATE, QK_NORM
from ._normalize import NORMALIZE, normalized_state

Array = TypeVar("Array")


def to_gla(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """The same decay for every key channel."""
    B, T, HV = arrays["v"].shape[:3]
    g = xp.broadcast_to(arrays["g"][..., None], (B, T, HV, arrays["k"].shape[-1]))
    return Lowered({**arrays, "g": g}, options, unchanged)


SPEC = OpSpec(
    name="simple_gla",
    recurrence="S = e^g S⁻ + kᵀv;  o = scale · q S",
    args=(Arg("q", "B T H K"), Arg("k", "B T H K"), Arg("v", "B T HV V"), Arg("g", "B T HV | HV", "float")),
    options=(*COMMON_OPTIONS, QK_NORM, HEAD_GATE, NORMALIZE),
    state=normalized_state,
    lowering=Lowering("gla", to_gla, lambda call: redescribe(call, "gla", {"g": ("B T HV K", call.dtypes["g"])})),
)


@family(SPEC)
def _simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """Scalar gate: ``S_t = e^{g_t} S_{t-1} + k_tᵀ v_t``, ``o_t = scale · q_t S_t`` (RetNet; Mamba-2, Dao & Gu 2024).

    Args:
        q: Queries ``[B, T, H, K]`` (``C`` of Mamba-2).
        k: Keys ``[B, T, H, K]`` (``B`` of Mamba-2).
        v: Values ``[B, T, HV, V]`` (``Δx`` of Mamba-2).
        g: Natural-log decay ``[B, T, HV]``, or ``[HV]`` for a fixed decay; ``≤ 0``, ``-inf`` resets the state.
        normalize: Divide by ``q_t · z_t``, ``z_t = e^{g_t} z_{t-1} + k_t`` (gated RFA, Peng et al. 2021, §3.2); ``scale``
            cancels, the state gains a value column that carries ``z``: ``[N, HV, K, V+1]``. A denominator of zero gives a
            zero row.
    """
    ...


simple_gla, chunk_simple_gla, recurrent_simple_gla, parallel_simple_gla = _simple_gla


@decoding
def decode_simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    normalize: bool = False,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``simple_gla`` token by token, on states that it overwrites."""
    ...


@summary
def summary_simple_gla(
    k: Array,
    v: Array,
    g: Array,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    normalize: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``simple_gla`` as an affine map of the state."""
    ...
