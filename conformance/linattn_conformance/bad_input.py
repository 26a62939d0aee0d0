"""Wrong calls: every rule of the API broken once, with the exact error expected.

A rule changes the arguments of a valid ``chunk_*`` or ``decode_*`` call of small sizes, ``B=2 T=5 H=2 HV=4 K=3 V=6``
(``HV=2`` where the family has no value heads of its own), or of a companion's, ``D=6 W=4``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linattn import errors, gates
from linattn.feature_maps import MAPS

__all__ = ["RULES", "SIZES", "Rule"]

SIZES = {"B": 2, "T": 5, "H": 2, "HV": 4, "K": 3, "L": 3, "V": 6, "C": 4, "N": 2, "P": 3, "D": 6, "W": 4}

Change = Callable[[Any, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """One way to be wrong.

    Attributes:
        name: Last part of the case's id.
        op: Family that is called.
        change: ``change(make, arguments)`` returns the arguments to change; ``make(shape, dtype)`` makes an array.
        error: The exception's type, exactly.
        text: Its text, exactly.
        reads: About values, which are read only where that waits for no device.
        form: ``chunk``, ``decode``, or ``direct`` for a companion.
    """

    name: str
    op: str
    change: Change
    error: type[Exception]
    text: str
    reads: bool = False
    form: str = "chunk"


def shape(name: str, *size: int, dtype: str = "float32") -> Change:
    """One array of another shape or dtype."""
    return lambda make, given: {name: make(size, dtype)}


def option(**values: Any) -> Change:
    """Options of other values."""
    return lambda make, given: values


def packed(offsets: Any, dtype: str = "int32", B: int = 1) -> Change:
    """Packed sequences with these offsets."""

    def change(make: Any, given: dict[str, Any]) -> dict[str, Any]:
        rows = {name: x[:B] for name, x in given.items() if len(getattr(x, "shape", ())) > 2}
        return {**rows, "cu_seqlens": make(offsets, dtype)}

    return change


def slots(values: Any, dtype: str = "int32") -> Change:
    """These ``state_indices``."""
    return lambda make, given: {"state_indices": make(values, dtype)}


def gated(kind: str, **parameters: Any) -> Change:
    """A gate object; a tuple is the shape of a parameter."""

    def change(make: Any, given: dict[str, Any]) -> dict[str, Any]:
        made = {name: make(x, "float32") if isinstance(x, tuple) else x for name, x in parameters.items()}
        return {"gate": getattr(gates, kind)(**made)}

    return change


S, D, O, F = errors.ShapeError, errors.DtypeError, errors.OptionError, errors.FrameworkError
ANY = "float16, bfloat16, float32 or float64"

RULES = (
    Rule("q-rank", "gla", shape("q", 2, 5, 6), S, "chunk_gla: q must be [B, T, H, K], got [2, 5, 6]"),
    Rule("k-batch", "gla", shape("k", 3, 5, 2, 3), S, "chunk_gla: k must be [B, T, H, K] = [2, 5, 2, 3], got [3, 5, 2, 3]"),
    Rule("k-length", "gla", shape("k", 2, 4, 2, 3), S, "chunk_gla: k must be [B, T, H, K] = [2, 5, 2, 3], got [2, 4, 2, 3]"),
    Rule("k-heads", "gla", shape("k", 2, 5, 4, 3), S, "chunk_gla: k must be [B, T, H, K] = [2, 5, 2, 3], got [2, 5, 4, 3]"),
    Rule("k-width", "gla", shape("k", 2, 5, 2, 4), S, "chunk_gla: k must be [B, T, H, K] = [2, 5, 2, 3], got [2, 5, 2, 4]"),
    Rule(
        "v-length", "gla", shape("v", 2, 6, 4, 6), S,
        "chunk_gla: v must be [B, T, HV, V] = [2, 5, HV, V], got [2, 6, 4, 6]",
    ),
    Rule(
        "value-heads", "linear_attn", shape("v", 2, 5, 3, 6), S,
        "chunk_linear_attn: the value heads HV must be a multiple of the query/key heads H = 2, got HV = 3",
    ),
    Rule(
        "fewer-value-heads", "linear_attn", shape("v", 2, 5, 1, 6), S,
        "chunk_linear_attn: the value heads HV must be a multiple of the query/key heads H = 2, got HV = 1",
    ),
    Rule("no-width", "linear_attn", shape("v", 2, 5, 4, 0), S, "chunk_linear_attn: V must be at least 1, got 0"),
    Rule(
        "g-heads", "gla", shape("g", 2, 5, 3, 3), S,
        "chunk_gla: g must be [B, T, HV, K] = [2, 5, 4, 3] or [B, T, H, K] = [2, 5, 2, 3], got [2, 5, 3, 3]",
    ),
    Rule("g-scalar", "kda", shape("g", 2, 5, 4), S, "chunk_kda: g must be [B, T, HV, K] = [2, 5, 4, 3], got [2, 5, 4]"),
    Rule(
        "g-fixed", "simple_gla", shape("g", 2), S,
        "chunk_simple_gla: g must be [B, T, HV] = [2, 5, 4] or [HV] = [4], got [2]",
    ),
    Rule(
        "g-vector", "gated_delta_rule", shape("g", 2, 5, 4, 3), S,
        "chunk_gated_delta_rule: g must be [B, T, HV] = [2, 5, 4], got [2, 5, 4, 3]",
    ),
    Rule(
        "gv-width", "gla", shape("gv", 2, 5, 4, 3), S,
        "chunk_gla: gv must be [B, T, HV, V] = [2, 5, 4, 6], got [2, 5, 4, 3]",
    ),
    Rule("u-heads", "rwkv6", shape("u", 2, 3), S, "chunk_rwkv6: u must be [HV, K] = [4, 3], got [2, 3]"),
    Rule(
        "beta-heads", "delta_rule", shape("beta", 2, 5, 2), S,
        "chunk_delta_rule: beta must be [B, T, HV] = [2, 5, 4] or [B, T, HV, V] = [2, 5, 4, 6], got [2, 5, 2]",
    ),
    Rule(
        "a-width", "dplr", shape("a", 2, 5, 4, 6), S,
        "chunk_dplr: a must be [B, T, HV, K] = [2, 5, 4, 3], got [2, 5, 4, 6]",
    ),
    Rule(
        "state-transposed", "gla", shape("initial_state", 2, 4, 6, 3), S,
        "chunk_gla: initial_state must be [N, HV, K, V] = [2, 4, 3, 6], got [2, 4, 6, 3]",
    ),
    Rule(
        "state-without-normaliser", "linear_attn",
        lambda make, given: {"initial_state": make((2, 4, 3, 6), "float32"), "normalize": True}, S,
        "chunk_linear_attn: initial_state must be [N, HV, K, V+1] = [2, 4, 3, 7], got [2, 4, 3, 6]",
    ),
    Rule(
        "bias-size", "mixed_attn", shape("bias", 2, 5, 5), S,
        "chunk_mixed_attn: bias must be [H, C, C] = [2, 4, 4], got [2, 5, 5]",
    ),
    Rule(
        "packed-batch", "gla", packed([0, 5], B=2), S,
        "chunk_gla: cu_seqlens packs sequences along T and needs B = 1, got B = 2",
    ),
    Rule("packed-start", "gla", packed([1, 5]), S, "chunk_gla: cu_seqlens must start at 0, got 1", reads=True),
    Rule(
        "packed-order", "gla", packed([0, 4, 2, 5]), S,
        "chunk_gla: cu_seqlens must not decrease, got 4 then 2 at index 2", reads=True,
    ),
    Rule(
        "packed-end", "gla", packed([0, 7]), S, "chunk_gla: cu_seqlens must not pass T = 5, got 7 at the end", reads=True,
    ),
    Rule("packed-dtype", "gla", packed([0, 5], "float32"), D, "chunk_gla: cu_seqlens must be int32 or int64, got float32"),
    Rule(
        "k-dtype", "gla", shape("k", 2, 5, 2, 3, dtype="float16"), D,
        "chunk_gla: k must have the dtype of q, float32, got float16",
    ),
    Rule(
        "v-dtype", "gla", shape("v", 2, 5, 4, 6, dtype="float64"), D,
        "chunk_gla: v must have the dtype of q, float32, got float64",
    ),
    Rule("q-integer", "gla", shape("q", 2, 5, 2, 3, dtype="int32"), D, f"chunk_gla: q must be {ANY}, got int32"),
    Rule("g-integer", "gla", shape("g", 2, 5, 4, 3, dtype="int64"), D, f"chunk_gla: g must be {ANY}, got int64"),
    Rule(
        "not-an-array", "gla", option(k=[[1.0]]), F,
        "chunk_gla: k: expected an array of numpy, torch, jax or mlx, got list",
    ),
    Rule("missing-array", "gla", option(v=None), F, "chunk_gla: v is required, got None"),
    Rule(
        "scale-text", "gla", option(scale="1"), O,
        "chunk_gla: scale must be float or int or None, a static Python value, got '1'",
    ),
    Rule(
        "flag-integer", "gla", option(output_final_state=1), O,
        "chunk_gla: output_final_state must be bool, a static Python value, got 1",
    ),
    Rule("chunk-size-zero", "gla", option(chunk_size=0), O, "chunk_gla: chunk_size must be at least 1, got 0"),
    Rule(
        "noncausal-state", "linear_attn", option(causal=False, output_final_state=True), O,
        "chunk_linear_attn: causal=False reads the whole sequence and has no state: drop initial_state and output_final_state",
    ),
    Rule(
        "chunk-size-none", "mixed_attn", option(chunk_size=None), O,
        "chunk_mixed_attn: chunk_size must be int, a static Python value, got None",
    ),
    Rule(
        "feature-map-name", "gla", option(feature_map="elu11"), O,
        f"unknown feature map 'elu11': did you mean 'elu1'? known are {', '.join(MAPS)}",
    ),
    Rule(
        "feature-map-incomplete", "gla", option(feature_map="cosformer"), O,
        "feature map 'cosformer' needs M: pass the object linattn.feature_maps.Cosformer(M)",
    ),
    Rule(
        "unknown-argument", "gla", option(causal=False), TypeError,
        "chunk_gla() got an unexpected keyword argument 'causal'",
    ),
    Rule(
        "state-transposed", "gla", shape("state", 3, 4, 6, 3), S,
        "decode_gla: state must be [P, HV, K, V] = [P, 4, 3, 6], got [3, 4, 6, 3]", form="decode",
    ),
    Rule(
        "state-too-small", "gla", shape("state", 1, 4, 3, 6), S,
        "decode_gla: state must have a slot for each of N = 2 sequences without state_indices, got P = 1", form="decode",
    ),
    Rule("state-missing", "gla", option(state=None), F, "decode_gla: state is required, got None", form="decode"),
    Rule(
        "state-without-normaliser", "linear_attn", option(normalize=True), S,
        "decode_linear_attn: state must be [P, HV, K, V+1] = [P, 4, 3, 7], got [3, 4, 3, 6]", form="decode",
    ),
    Rule(
        "slots-float", "gla", slots([0.0, 1.0], "float32"), D,
        "decode_gla: state_indices must be int32 or int64, got float32", form="decode",
    ),
    Rule(
        "slots-count", "gla", slots([0, 1, 2]), S, "decode_gla: state_indices must be [N] = [2], got [3]", form="decode",
    ),
    Rule(
        "slots-range", "gla", slots([0, 3]), S,
        "decode_gla: state_indices must be slots below P = 3, or -1, got 3 at index 1", reads=True, form="decode",
    ),
    Rule(
        "slots-negative", "gla", slots([-2, 0]), S,
        "decode_gla: state_indices must be slots below P = 3, or -1, got -2 at index 0", reads=True, form="decode",
    ),
    Rule(
        "slots-twice", "gla", slots([2, 2]), S,
        "decode_gla: state_indices must be distinct, got 2 at index 0 and at index 1", reads=True, form="decode",
    ),
    Rule(
        "decode-initial-state", "gla", option(initial_state=None), TypeError,
        "decode_gla() got an unexpected keyword argument 'initial_state'", form="decode",
    ),
    Rule(
        "gate-heads", "kda", gated("Softplus", A_log=(3,)), S,
        "chunk_kda: gate.A_log must be [G] = [4] or [], got [3]",
    ),
    Rule(
        "gate-bias", "gated_delta_rule", gated("Softplus", A_log=(4,), dt_bias=(4, 2)), S,
        "chunk_gated_delta_rule: gate.dt_bias must be [G] = [4], got [4, 2]",
    ),
    Rule(
        "gate-name", "gla", option(gate="softplus"), O,
        "chunk_gla: gate must be an object of linattn.gates or None, got 'softplus'",
    ),
    Rule(
        "gate-ungated", "delta_rule", gated("LogSigmoid"), TypeError,
        "chunk_delta_rule() got an unexpected keyword argument 'gate'",
    ),
    Rule(
        "gate-fixed", "simple_gla",
        lambda make, given: {"g": make((4,), "float32"), **gated("LogSigmoid")(make, given)}, O,
        "chunk_simple_gla: gate maps a projection g of every token, and g is a fixed decay [4]: call the gate object yourself, "
        "or drop it",
    ),
    Rule(
        "qk-norm-name", "gla", option(qk_norm="l1"), O,
        "chunk_gla: qk_norm must be 'l2' or None, a static Python value, got 'l1'",
    ),
    Rule(
        "qk-norm-and-map", "gla", option(qk_norm="l2", feature_map="relu"), O,
        "chunk_gla: qk_norm and feature_map both map q and k: pass one of them",
    ),
    Rule(
        "beta-map-name", "kda", option(beta_map="tanh"), O,
        "chunk_kda: beta_map must be 'sigmoid' or '2sigmoid' or None, a static Python value, got 'tanh'",
    ),
    Rule(
        "z-shape", "ssd", shape("z", 2, 5, 4, 5), S,
        "chunk_ssd: z must be [B, T, HV, V] = [2, 5, 4, 6], got [2, 5, 4, 5]",
    ),
    Rule("A-width", "ssd", shape("A", 4, 3), S, "chunk_ssd: A must be [HV] = [4], got [4, 3]"),
    Rule(
        "B-width", "ssd", shape("C", 2, 5, 2, 4), S,
        "chunk_ssd: C (output projection) must be [B, T, H, K] = [2, 5, 2, 3], got [2, 5, 2, 4]",
    ),
    Rule("B-missing", "ssd", option(B=None), F, "chunk_ssd: B (input projection) is required, got None"),
    Rule("D-shape", "ssd", shape("D", 2), S, "chunk_ssd: D (skip) must be [HV] = [4] or [HV, V] = [4, 6], got [2]"),
    Rule(
        "limits", "ssd", option(dt_limit=(2.0, 1.0)), O,
        "chunk_ssd: dt_limit must be two numbers, the smaller first, got (2.0, 1.0)",
    ),
    Rule(
        "filter-width", "short_conv", shape("weight", 6, 9), S,
        "short_conv: W, the width of a filter, must be 1 … 8, got 9", form="direct",
    ),
    Rule(
        "filter-channels", "short_conv", shape("weight", 5, 4), S,
        "short_conv: weight must be [D, W] = [6, W], got [5, 4]", form="direct",
    ),
    Rule("bias-channels", "short_conv", shape("bias", 4), S, "short_conv: bias must be [D] = [6], got [4]", form="direct"),
    Rule(
        "state-length", "short_conv", shape("initial_state", 2, 6, 4), S,
        "short_conv: initial_state must be [N, D, W-1] = [2, 6, 3], got [2, 6, 4]", form="direct",
    ),
    Rule(
        "activation-name", "short_conv", option(activation="relu"), O,
        "short_conv: activation must be 'silu' or None, a static Python value, got 'relu'", form="direct",
    ),
    Rule(
        "window-length", "short_conv", shape("state", 3, 6, 2), S,
        "decode_short_conv: L must be at least W-1 = 3, got 2", form="decode",
    ),
    Rule(
        "z-shape", "gated_rms_norm", shape("z", 2, 4, 6), S,
        "gated_rms_norm: z must be [..., D] = [2, 5, 6], got [2, 4, 6]", form="direct",
    ),
    Rule(
        "z-dtype", "gated_rms_norm", shape("z", 2, 5, 6, dtype="float16"), D,
        "gated_rms_norm: z must have the dtype of x, float32, got float16", form="direct",
    ),
    Rule(
        "group-size", "gated_rms_norm", option(group_size=4), O,
        "gated_rms_norm: group_size must divide D = 6, got 4", form="direct",
    ),
)  # fmt: skip
