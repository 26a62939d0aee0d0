"""FlashQLA (0.1) as a backend: one operator, the gated delta rule in chunks, for heads of width 128.

Its conventions are ours. ``delta_rule`` is lowered to it with gates of zero.
"""

from __future__ import annotations

import os

import torch

# TileLang announces on standard output what it compiles, which belongs to the caller. Its variable, if set, says otherwise.
os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")

from flash_qla import chunk_gated_delta_rule
from linattn.plugin import Call, Unsupported, form_methods
from torch import Tensor

from .. import FlashQla

__all__ = ["FlashQlaBackend"]

WIDTH = 128
DTYPES = ("bfloat16", "float16")


def _gated_delta_rule(
    form: str,
    arrays: dict[str, Tensor],
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    o, final = chunk_gated_delta_rule(
        **{name: x.float() if x.dtype == torch.float64 else x for name, x in arrays.items()},
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    return o, final if output_final_state else None


@form_methods({"gated_delta_rule": _gated_delta_rule}, forms=("chunk",))
class FlashQlaBackend(FlashQla):
    """TileLang kernels for the gated delta rule, on Hopper and Blackwell GPUs."""

    def supports(self, call: Call) -> Unsupported | None:
        """What the library asserts."""
        complaint = _complaint(call)
        return None if complaint is None else Unsupported(complaint)

    def missing_device(self) -> str | None:
        return None if torch.cuda.is_available() else "CUDA devices"


def _complaint(call: Call) -> str | None:
    if call.device.partition(":")[0] != "cuda":
        return f"runs on CUDA devices, not {call.device}"
    if call.dtype not in DTYPES:
        return f"takes {' and '.join(DTYPES)}, not {call.dtype}"
    if (call.K, call.V) != (WIDTH, WIDTH):
        return f"K and V must be {WIDTH}, got {call.K} and {call.V}"
    if call.beta != "scalar":
        return "takes one beta for a token and head"
    return "takes one token at least" if call.sizes["T"] == 0 else None
