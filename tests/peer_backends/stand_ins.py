"""Packages with the names and signatures of the peers' that compute what linattn does.

They show that our arguments arrive under the peers' names, and nothing about the peers' numbers: that takes the libraries
themselves, and conformance.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import linattn
import numpy as np

STATES = "scale initial_state output_final_state cu_seqlens"

# Parameters of flash-linear-attention 0.6.0 that a call may name, by module and function.
FLA = {
    ("linear_attn", "chunk_linear_attn"): f"q k v normalize {STATES}",
    ("linear_attn", "fused_recurrent_linear_attn"): f"q k v reverse normalize {STATES}",
    ("simple_gla", "chunk_simple_gla"): f"q k v g g_gamma {STATES} state_v_first cu_seqlens_cpu",
    ("simple_gla", "fused_recurrent_simple_gla"): f"q k v g g_gamma reverse {STATES} state_v_first",
    ("gla", "chunk_gla"): f"q k v g {STATES} state_v_first cu_seqlens_cpu",
    ("gla", "fused_recurrent_gla"): f"q k v gk gv reverse {STATES} state_v_first",
    ("rwkv6", "chunk_rwkv6"): f"r k v w u {STATES} cu_seqlens_cpu",
    ("rwkv6", "fused_recurrent_rwkv6"): f"r k v w u reverse {STATES}",
    ("delta_rule", "chunk_delta_rule"): f"q k v beta {STATES} use_qk_l2norm_in_kernel cu_seqlens_cpu",
    ("delta_rule", "fused_recurrent_delta_rule"): f"q k v beta {STATES} use_qk_l2norm_in_kernel",
    ("gated_delta_rule", "chunk_gated_delta_rule"): f"q k v g beta {STATES} use_qk_l2norm_in_kernel state_v_first",
    ("gated_delta_rule", "fused_recurrent_gated_delta_rule"): f"q k v g gk gv beta {STATES} use_qk_l2norm_in_kernel",
    ("kda", "chunk_kda"): f"q k v g beta {STATES} use_qk_l2norm_in_kernel safe_gate",
    ("kda", "fused_recurrent_kda"): f"q k v g beta A_log dt_bias {STATES} use_qk_l2norm_in_kernel",
    ("generalized_delta_rule", "chunk_dplr_delta_rule"): f"q k v a b gk {STATES} safe_gate chunk_size",
    ("generalized_delta_rule", "fused_recurrent_dplr_delta_rule"): f"q k v a b gk reverse {STATES}",
}
FLASH_QLA = f"q k v g beta {STATES} use_qk_l2norm_in_kernel head_first state_v_first auto_cp"
OURS = {"r": "q", "w": "g", "gk": "g"}
KINDS = {"deltanet": "delta_rule", "gated_deltanet": "gated_delta_rule", "rwkv7": "dplr"}


def family_of(function: str) -> str:
    family = function.removeprefix("chunk_").removeprefix("fused_recurrent_")
    return "dplr" if family == "dplr_delta_rule" else family


def by_definition(family: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """The oracle, on arrays of any framework."""
    return getattr(linattn, family)(**{name: np.asarray(x) if hasattr(x, "shape") else x for name, x in given.items()})


def stand_in(family: str, parameters: str) -> Callable[..., Any]:
    """A function with these parameters that computes what linattn does."""
    names = parameters.split()
    signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in names])

    def function(*args: Any, **kwargs: Any) -> Any:
        given = {OURS.get(n, n): x for n, x in signature.bind(*args, **kwargs).arguments.items()}
        assert given.pop("normalize", None) in (None, False)
        return by_definition(family, given)

    return function


def linear_attention(kind: str, q: Any, k: Any, v: Any, *, impl: str = "auto", **inputs: Any) -> Any:
    """The one entry of jax-linear-attention."""
    assert impl in ("auto", "reference")
    family = KINDS.get(kind, kind)
    if "w" in inputs:
        inputs["g"] = inputs.pop("w")
    segments = inputs.pop("segment_ids", None)
    if segments is not None:
        assert inputs["initial_state"] is None
        segments = np.asarray(segments)[0]
        starts = np.flatnonzero(np.diff(segments)) + 1
        inputs["cu_seqlens"] = np.array([0, *starts, len(segments)], np.int32)
    return by_definition(family, dict(q=q, k=k, v=v, **inputs))


def mlx_gated_delta(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any = None, mask: Any = None) -> Any:
    """The functions of mlx-lm, and MLX's own: decays are linear, states ``[B, HV, V, K]``, and there is no scale."""
    import mlx.core as mx

    family = "gated_delta_rule" if decay.ndim == 3 else "kda"
    wide = {name: x if x.dtype == mx.float64 else x.astype(mx.float32) for name, x in dict(q=q, k=k, v=v).items()}
    given = dict(wide, g=mx.log(decay), beta=beta, scale=1.0, output_final_state=True)
    o, final = by_definition(family, given | {"initial_state": None if state is None else state.swapaxes(-1, -2)})
    return mx.array(o).astype(q.dtype), mx.array(final).swapaxes(-1, -2)


def module(name: str, **members: Any) -> dict[str, types.ModuleType]:
    made = types.ModuleType(name)
    vars(made).update(members)
    made.__path__ = []  # type: ignore[attr-defined]
    return {name: made}


def install(monkeypatch: Any, library: str) -> None:
    """Put a stand-in in the place of a library, and forget the adapter, which imports it."""
    made: dict[str, types.ModuleType] = {}
    if library == "fla":
        facts = dict(IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=False)
        for name in ("fla", "fla.ops", "fla.ops.common"):
            made |= module(name)
        made |= module("fla.ops.common.chunk_o", **facts)
        for package in {package for package, _ in FLA}:
            functions = {f: stand_in(family_of(f), parameters) for (p, f), parameters in FLA.items() if p == package}
            made |= module(f"fla.ops.{package}", **functions)
    elif library == "flash_qla":
        made = module("flash_qla", chunk_gated_delta_rule=stand_in("gated_delta_rule", FLASH_QLA))
    elif library == "mlx_lm":
        made = module("mlx_lm") | module("mlx_lm.models")
        made |= module("mlx_lm.models.gated_delta", gated_delta_ops=mlx_gated_delta, gated_delta_kernel=None)
    elif library == "jla":
        made = module("jla") | module("jla.ops", linear_attention=linear_attention)
    for name, one in made.items():
        monkeypatch.setitem(sys.modules, name, one)
    for name in [name for name in sys.modules if name.startswith(f"linattn_backends.{library}")]:
        monkeypatch.delitem(sys.modules, name)
