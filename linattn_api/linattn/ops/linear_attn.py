"""Linear attention without a gate (Katharopoulos et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..call import Call
from ..context import Context
from ..feature_maps import FeatureMap
from ..spec import COMMON_OPTIONS, Arg, Lowered, Lowering, OpSpec, Option, Options, accumulation_dtype, redescribe, unchanged
from ._family import decoding, family, summary
from ._input_maps import QK_NORM
from ._normalize import NORMALIZE, normalized_state

Array = TypeVar("Array")


def check(form: str | None, options: Options) -> str | None:
    """A sum over the whole sequence has no state and no recurrent form."""
    if options["causal"]:
        return None
    if options["output_final_state"] or options["initial_state"] is not None:
        return "causal=False reads the whole sequence and has no state: drop initial_state and output_final_state"
    if form == "recurrent":
        return "causal=False has no recurrent form: use chunk_linear_attn or parallel_linear_attn"
    return None


def blocked(call: Call) -> str | None:
    """Only the causal sum is a gated one with the gate at zero."""
    return None if call.option("causal", True) else "causal=False is no special case of simple_gla"


def as_simple_gla(call: Call) -> Call:
    """What ``to_simple_gla`` gives, as static facts."""
    return redescribe(call, "simple_gla", {"g": ("HV", accumulation_dtype(call))}, drop=("causal",))


def to_simple_gla(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """A decay of zero."""
    v = arrays["v"]
    g = xp.full((v.shape[2],), 0.0, like=v, dtype=xp.accumulation(v))
    return Lowered({**arrays, "g": g}, {name: value for name, value in options.items() if name != "causal"}, unchanged)


SPEC = OpSpec(
    name="linear_attn",
    recurrence="S = S⁻ + kᵀv;  o = scale · q S",
    args=(Arg("q", "B T H K"), Arg("k", "B T H K"), Arg("v", "B T HV V")),
    options=(*COMMON_OPTIONS, QK_NORM, NORMALIZE, Option("causal", (bool,), True)),
    state=normalized_state,
    check=check,
    lowering=Lowering("simple_gla", to_simple_gla, as_simple_gla, blocked),
)


@family(SPEC)
def _linear_attn(
    q: Array,
    k: Array,
    v: Array,
    *,
    qk_norm: str | None = None,
    scale: float | None = None,
    causal: bool = True,
    normalize: bool = False,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """Linear attention: ``S_t = S_{t-1} + k_tᵀ v_t``, ``o_t = scale · q_t S_t`` (Katharopoulos et al. 2020, eqs. 18-20).

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``; value head ``j`` reads query/key head ``j // (HV / H)``.
        causal: ``False`` lets every token read the sum over the whole sequence (encoders); no state then, and no recurrent
            form.
        normalize: Divide by ``q_t · z_t``, ``z_t = Σ_{j≤t} k_j``; ``scale`` cancels, the state gains a value column that
            carries ``z``: ``[N, HV, K, V+1]``. A denominator of zero gives a zero row.
    """
    ...


linear_attn, chunk_linear_attn, recurrent_linear_attn, parallel_linear_attn = _linear_attn


@decoding
def decode_linear_attn(
    q: Array,
    k: Array,
    v: Array,
    *,
    qk_norm: str | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    normalize: bool = False,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``linear_attn`` token by token, on states that it overwrites."""
    ...


@summary
def summary_linear_attn(
    k: Array,
    v: Array,
    *,
    qk_norm: str | None = None,
    normalize: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    feature_map: str | FeatureMap | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``linear_attn`` as an affine map of the state."""
    ...
