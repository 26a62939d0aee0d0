"""The backend: which calls it takes, and its methods."""

from __future__ import annotations

import os
from typing import Any

import jax
from linattn.plugin import Call, Unsupported, form_methods

from .. import Pallas

WIDEST = 256
FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda")


INTERPRETED = os.environ.get("LINATTN_PALLAS_INTERPRET", "0") not in ("", "0")
"""Whether kernels run in Pallas's interpreter, and so on the CPU; decided when the backend is imported."""


def run(
    form: str,
    arrays: dict[str, Any],
    *,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Any,
    chunk_size: int | None,
) -> Any:
    """Any of the families. Pallas takes a while to import, and who is not on a TPU never needs it."""
    from . import calls

    given = {name: x for name, x in arrays.items() if x is not None}
    state = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    return calls.run(form, given, scale=scale, chunk_size=chunk_size, interpret=INTERPRETED, **state)


@form_methods(dict.fromkeys(FAMILIES, run), forms=("chunk", "recurrent"))
class PallasBackend(Pallas):
    """Pallas kernels for TPUs: the families with a diagonal gate and the delta families, by chunks and for one token."""

    def supports(self, call: Call) -> Unsupported | None:
        """Whether the kernels take this call."""
        complaint = device_complaint(call) or type_complaint(call) or size_complaint(call)
        return None if complaint is None else Unsupported(complaint)

    def missing_device(self) -> str | None:
        return None if INTERPRETED or jax.default_backend() == "tpu" else "TPUs"


def device_complaint(call: Call) -> str | None:
    """Kernels are compiled for TPUs, and interpreted elsewhere if asked."""
    device = call.device.partition(":")[0]
    if device == "tpu" or (device == "cpu" and INTERPRETED):
        return None
    if device == "cpu":
        return "runs on TPUs (on cpu only in Pallas's interpreter: LINATTN_PALLAS_INTERPRET=1)"
    return f"runs on TPUs, not {device}"


def type_complaint(call: Call) -> str | None:
    """A TPU has no float16 and no float64: float16 gates, beta and states are converted, float64 ones would lose digits."""
    if call.dtype not in ("bfloat16", "float32"):
        return f"takes bfloat16 and float32, not {call.dtype}"
    return "has no float64" if "float64" in call.dtypes.values() else None


def size_complaint(call: Call) -> str | None:
    """What the kernels have no form for."""
    if None in call.sizes.values():
        return "takes no symbolic sizes"
    for symbol, size in (("K", call.K), ("V", call.V)):
        if not 1 <= size <= WIDEST:
            return f"{symbol} must be at most {WIDEST}, got {size}"
    if call.form == "recurrent" and (call.T != 1 or call.varlen):
        return "takes the recurrent form for one token only; the chunk form for more"
    if call.has("gv"):
        return "has no value gate gv"
    if call.beta == "vector":
        return "has no beta per value channel"
    return None
