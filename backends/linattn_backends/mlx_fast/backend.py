"""``mx.fast.gated_delta_update`` (MLX 0.32) as a backend: one operator, the gated delta rule, with gradients.

Its decays are linear, so it gets ``exp(g)``; its states are ``[B, HV, V, K]``; it has no scale, so queries are multiplied, in
float32: of float16 little is left, or of its gradient, where the scale is small, and it rounds decays to the dtype of queries.
``delta_rule`` is lowered to it with gates of zero. Its Metal kernels take no decay below 1e-6 for what it is, as their source
says: an adapter sees no data and cannot decline, so on such gates conformance decides.
"""

from __future__ import annotations

import math

import mlx.core as mx
from linattn.plugin import Call, Unsupported, form_methods

from .. import MlxFast
from ..mlx_gated_delta import complaint

__all__ = ["MlxFastBackend"]


def _gated_delta_rule(
    form: str,
    arrays: dict[str, mx.array],
    *,
    scale: float,
    initial_state: mx.array | None,
    output_final_state: bool,
) -> tuple[mx.array, mx.array | None]:
    wide = mx.float64 if arrays["v"].dtype == mx.float64 else mx.float32
    o, final = mx.fast.gated_delta_update(
        arrays["q"].astype(wide) * scale,
        arrays["k"],
        arrays["v"],
        _exp(arrays["g"].astype(wide)),
        arrays["beta"].astype(wide),
        None if initial_state is None else initial_state.astype(wide).swapaxes(-1, -2),
    )
    return o.astype(arrays["v"].dtype), final.swapaxes(-1, -2) if output_final_state else None


def _exp(g: mx.array) -> mx.array:
    """``mx.exp`` of float64 is right to single precision only."""
    return mx.power(mx.array(math.e, g.dtype), g) if g.dtype == mx.float64 else mx.exp(g)


@form_methods({"gated_delta_rule": _gated_delta_rule}, forms=("chunk",))
class MlxFastBackend(MlxFast):
    """The gated delta rule that MLX ships, on any of its devices."""

    def supports(self, call: Call) -> Unsupported | None:
        """What the operation has no argument for, or raises at."""
        complaint = _complaint(call)
        return None if complaint is None else Unsupported(complaint)


def _complaint(call: Call) -> str | None:
    if call.dtype == "float64" and call.device != "cpu":
        return f"has float64 on the CPU only, not on {call.device}"
    if call.dtype == "float64" and call.has("initial_state"):
        return "rounds a state that comes in to float32, so takes none beside float64"
    return complaint(call)
