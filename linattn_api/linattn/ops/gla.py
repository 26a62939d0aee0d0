"""Gated linear attention with a decay per key channel, and optionally per value channel (Yang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..context import Context
from ..feature_maps import FeatureMap
from ..gate_maps import Gate
from ..spec import COMMON_OPTIONS, Arg, OpSpec
from ._family import decoding, family, summary
from ._input_maps import GATE, QK_NORM
from ._normalize import NORMALIZE, normalized_state

Array = TypeVar("Array")

SPEC = OpSpec(
    name="gla",
    recurrence="S = Diag(e^g) S⁻ Diag(e^gv) + kᵀv;  o = scale · q S",
    args=(
        Arg("q", "B T H K"),
        Arg("k", "B T H K"),
        Arg("v", "B T HV V"),
        Arg("g", "B T HV K | B T H K", "float"),
        Arg("gv", "B T HV V", "float", optional=True),
    ),
    options=(*COMMON_OPTIONS, QK_NORM, GATE, NORMALIZE),
    state=normalized_state,
)


@family(SPEC)
def _gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
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
    """Vector gate: ``S_t = Diag(e^{g_t}) S_{t-1} Diag(e^{gv_t}) + k_tᵀ v_t``, ``o_t = scale · q_t S_t`` (GLA, Yang et al.
    2024, §4).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``.
        g: Natural-log decay of the key channels ``[B, T, HV, K]`` or ``[B, T, H, K]``; ``≤ 0``, ``-inf`` resets a channel.
        gv: Natural-log decay of the value channels ``[B, T, HV, V]``; ``None`` keeps everything.
        normalize: Divide by ``q_t · z_t``, ``z_t = Diag(e^{g_t}) z_{t-1} + k_t``, which ``gv`` does not decay; ``scale``
            cancels, the state gains a value column that carries ``z``: ``[N, HV, K, V+1]``. A denominator of zero gives a
            zero row.
    """
    ...


gla, chunk_gla, recurrent_gla, parallel_gla = _gla


@decoding
def decode_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
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
    """``gla`` token by token, on states that it overwrites."""
    ...


@summary
def summary_gla(
    k: Array,
    v: Array,
    g: Array,
    gv: Array | None = None,
    *,
    qk_norm: str | None = None,
    gate: Gate | None = None,
    normalize: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``gla`` as an affine map of the state."""
    ...
