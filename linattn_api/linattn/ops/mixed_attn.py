"""Mixed chunk attention (FLASH, Hua et al. 2022): squared ReLU inside a chunk, linear attention over whole chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..context import Context
from ..feature_maps import FeatureMap
from ..plugin import MixedState
from ..spec import OUTPUT_FINAL_STATE, Arg, OpSpec, Option, Options, Sizes
from ._family import family

Array = TypeVar("Array")


STATE = (
    Arg("initial_state.kv", "N H L V", "float", optional=True),
    Arg("initial_state.k_quad", "N C H K", "float", optional=True),
    Arg("initial_state.k_lin", "N C H L", "float", optional=True),
    Arg("initial_state.v", "N C H V", "float", optional=True),
    Arg("initial_state.length", "N", "index", optional=True),
)


def resolve(options: Options, sizes: Sizes) -> dict[str, Any]:
    """Both scales default to ``1 / C``."""
    default = 1.0 / options["chunk_size"]
    scales = {name: default if options[name] is None else float(options[name]) for name in ("quad_scale", "lin_scale")}
    return {**options, **scales}


def check(form: str | None, options: Options) -> str | None:
    """A sum over the whole sequence has no state and no recurrent form."""
    if options["causal"]:
        return None
    if options["output_final_state"] or options["initial_state"] is not None:
        return "causal=False reads the whole sequence and has no state: drop initial_state and output_final_state"
    if form == "recurrent":
        return "causal=False has no recurrent form: use chunk_mixed_attn or parallel_mixed_attn"
    return None


SPEC = OpSpec(
    name="mixed_attn",
    recurrence=(
        "o_t = Σ_{c(s)=c(t), s≤t} relu(quad_scale · q_quad_t·k_quad_s + bias)² v_s"
        " + lin_scale · q_lin_t Σ_{c(s)<c(t)} k_lin_sᵀ v_s;  c(t) = t // C"
    ),
    args=(
        Arg("q_quad", "B T H K"),
        Arg("k_quad", "B T H K"),
        Arg("q_lin", "B T H L"),
        Arg("k_lin", "B T H L"),
        Arg("v", "B T H V"),
    ),
    keyword_args=(Arg("bias", "H C C", "float", optional=True),),
    options=(
        Option("quad_scale", (float, int)),
        Option("lin_scale", (float, int)),
        OUTPUT_FINAL_STATE,
        Option("chunk_size", (int,), 256),
        Option("causal", (bool,), True),
    ),
    state=lambda options: STATE,
    state_type=MixedState,
    mapped=("q_lin", "k_lin"),
    resolve=resolve,
    check=check,
)


@family(SPEC)
def _mixed_attn(
    q_quad: Array,
    k_quad: Array,
    q_lin: Array,
    k_lin: Array,
    v: Array,
    *,
    bias: Array | None = None,
    quad_scale: float | None = None,
    lin_scale: float | None = None,
    causal: bool = True,
    initial_state: MixedState[Array] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int = 256,
    feature_map: str | FeatureMap | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, MixedState[Array] | None]:
    """Mixed chunk attention (FLASH, Hua et al. 2022, eqs. 7 and 8). With ``c(t) = t // C`` and ``C = chunk_size``:

    ``o_t = Σ_{c(s)=c(t), s≤t} relu(quad_scale · q_quad_t·k_quad_s + bias)² v_s
    + lin_scale · q_lin_t Σ_{c(s)<c(t)} k_lin_sᵀ v_s``

    Args:
        q_quad: Queries inside a chunk ``[B, T, H, K]``.
        k_quad: Keys inside a chunk ``[B, T, H, K]``.
        q_lin: Queries across chunks ``[B, T, H, L]``; usually ``L = K``. A feature map applies to these and ``k_lin``.
        k_lin: Keys across chunks ``[B, T, H, L]``.
        v: Values ``[B, T, H, V]``.
        bias: Added inside the squared ReLU, by position in the chunk ``[H, C, C]``.
        quad_scale: Default ``1 / C``.
        lin_scale: Default ``1 / C``.
        causal: ``False``: the first sum loses ``s ≤ t``, the second runs over all ``s``.
        chunk_size: ``C``, part of the meaning. ``C ≥ T`` is FLASH-Quad.
    """
    ...


mixed_attn, chunk_mixed_attn, recurrent_mixed_attn, parallel_mixed_attn = _mixed_attn
