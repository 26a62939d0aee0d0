"""flash-linear-attention (0.6) as a backend: its names for our arguments, and the limits that it states.

Its conventions are ours: ``[B, T, H, K]``, gates as natural-log decays, states ``[N, HV, K, V]``, packed sequences by
``cu_seqlens``. What it asserts, raises or documents is declared in ``supports``; where its numbers are wrong, conformance
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fla.ops.common.chunk_o import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule
from fla.ops.gla import chunk_gla, fused_recurrent_gla
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.linear_attn import chunk_linear_attn, fused_recurrent_linear_attn
from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
from linattn.plugin import Call, Unsupported, form_methods
from torch import Tensor

from .. import Fla

__all__ = ["FlaBackend"]

FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "linear_attn": {"chunk": chunk_linear_attn, "recurrent": fused_recurrent_linear_attn},
    "simple_gla": {"chunk": chunk_simple_gla, "recurrent": fused_recurrent_simple_gla},
    "gla": {"chunk": chunk_gla, "recurrent": fused_recurrent_gla},
    "rwkv6": {"chunk": chunk_rwkv6, "recurrent": fused_recurrent_rwkv6},
    "delta_rule": {"chunk": chunk_delta_rule, "recurrent": fused_recurrent_delta_rule},
    "gated_delta_rule": {"chunk": chunk_gated_delta_rule, "recurrent": fused_recurrent_gated_delta_rule},
    "kda": {"chunk": chunk_kda, "recurrent": fused_recurrent_kda},
    "dplr": {"chunk": chunk_dplr_delta_rule, "recurrent": fused_recurrent_dplr_delta_rule},
}
NAMES = {
    ("gla", "recurrent"): {"g": "gk"},
    ("rwkv6", "chunk"): {"q": "r", "g": "w"},
    ("rwkv6", "recurrent"): {"q": "r", "g": "w"},
    ("dplr", "chunk"): {"g": "gk"},
    ("dplr", "recurrent"): {"g": "gk"},
}
"""Its names, where they are not ours."""

GROUPED = ("gated_delta_rule", "kda")
WITHOUT_BACKWARD = ("gated_delta_rule", "kda", "dplr")
"""Families whose recurrent form raises in its backward."""
DELTA = ("delta_rule", "gated_delta_rule", "kda")
WIDEST_DELTA = 256
REFUSED_BACKWARD = ("simple_gla", "gated_delta_rule")
REFUSES_BACKWARD = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
"""Whether it refuses the chunked backward of scalar gates, which such a Triton compiles wrongly for Hopper."""


def _run(
    family: str,
    form: str,
    arrays: dict[str, Tensor | None],
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """One call of the library, which chooses the size of its chunks itself."""
    names = NAMES.get((family, form), {})
    given = {names.get(name, name): _narrow(x) for name, x in arrays.items() if x is not None}
    if family == "simple_gla" and given["g"].dim() == 1:
        given["g"] = given["g"].expand(arrays["v"].shape[:3])  # its own fixed decay has no gradient
    if family == "linear_attn":
        given["normalize"] = False  # its own has another state and another rule for a denominator of zero
    if family == "dplr":  # it multiplies them with each other as they come, so not in fewer digits than q, k and v have
        given |= {name: given[name].to(torch.promote_types(given[name].dtype, given["v"].dtype)) for name in ("a", "b")}
    o, final = FUNCTIONS[family][form](
        **given,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    return o, final if output_final_state else None


def _narrow(x: Tensor) -> Tensor:
    """Gates in float64 are more than its kernels load."""
    return x.float() if x.dtype == torch.float64 else x


@form_methods({name: partial(_run, name) for name in FUNCTIONS}, forms=("chunk", "recurrent"))
class FlaBackend(Fla):
    """The chunk and recurrent operators of flash-linear-attention, on NVIDIA GPUs."""

    def supports(self, call: Call) -> Unsupported | None:
        """What the library states that it cannot do."""
        complaint = _complaint(call)
        return None if complaint is None else Unsupported(complaint)

    def missing_device(self) -> str | None:
        return None if torch.cuda.is_available() else "CUDA devices"


def _complaint(call: Call) -> str | None:
    family, form = call.op, call.form
    if call.device.partition(":")[0] != "cuda":
        return f"runs on CUDA devices, not {call.device}"
    if call.dtype == "float64":
        return "has no float64"
    if call.HV != call.H and family not in GROUPED:
        return f"takes no grouped value heads in {family}"
    if family in DELTA and call.K > WIDEST_DELTA:
        return f"K must be at most {WIDEST_DELTA}, got {call.K}"
    if call.needs_grad and form == "recurrent" and family in WITHOUT_BACKWARD:
        return f"has no backward of recurrent_{family}"
    if form == "recurrent":
        return None
    if family == "gla" and call.has("gv"):
        return "takes gv in the recurrent form only"
    if call.beta == "vector":
        return "takes a beta for each value channel in the recurrent form only"
    if family == "delta_rule" and call.dtype == "float32":
        return "takes float16 and bfloat16 in the chunk form of delta_rule, not float32"
    if call.needs_grad and family in REFUSED_BACKWARD and REFUSES_BACKWARD:
        return f"refuses the backward of chunk_{family} on Hopper with Triton from 3.4 to 3.7.0, which compiles it wrongly"
    return None
