"""mlx-lm's (0.32) gated delta rule as a backend: token by token, with a gate for each head or for each key channel.

Its decays are linear, so it gets ``exp(g)``; its states are ``[B, HV, V, K]``; it has no scale, so queries are multiplied, in
float32: of float16 little is left, or of its gradient, where the scale is small. Which of its two functions runs is decided as
its own models decide it: the Metal kernel where that takes the width, else MLX operations. The kernel has no gradient; MLX
raises when one is asked for, which no ``Call`` can tell beforehand.
"""

from __future__ import annotations

import mlx.core as mx
from linattn.plugin import Call, Unsupported, form_methods
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from .. import MlxLm
from ..mlx_gated_delta import complaint

__all__ = ["MlxLmBackend"]

LANES = 32
"""The kernel spreads the keys over the lanes of a simdgroup, evenly."""


def _run(
    form: str,
    arrays: dict[str, mx.array],
    *,
    scale: float,
    initial_state: mx.array | None,
    output_final_state: bool,
) -> tuple[mx.array, mx.array | None]:
    q, k, v, g, beta = (arrays[name] for name in ("q", "k", "v", "g", "beta"))
    (B, _, HV, V), K = v.shape, k.shape[-1]
    state = mx.zeros((B, HV, K, V)) if initial_state is None else initial_state.astype(mx.float32)
    function = gated_delta_kernel if _on_metal() and K % LANES == 0 else gated_delta_ops
    decay = mx.exp(g.astype(mx.float32))
    o, final = function(q.astype(mx.float32) * scale, k, v, decay, beta.astype(mx.float32), state.swapaxes(-1, -2))
    return o.astype(v.dtype), final.swapaxes(-1, -2) if output_final_state else None


def _on_metal() -> bool:
    return mx.default_device() == mx.gpu and mx.metal.is_available()


@form_methods({"gated_delta_rule": _run, "kda": _run}, forms=("recurrent",))
class MlxLmBackend(MlxLm):
    """The recurrence that mlx-lm's Qwen3-Next and Kimi Linear models run, on any device of MLX."""

    def supports(self, call: Call) -> Unsupported | None:
        """What the functions have no argument for, or raise at."""
        complaint = _complaint(call)
        return None if complaint is None else Unsupported(complaint)

    def details(self, call: Call) -> str:
        """Which of the two functions."""
        return "Metal kernel" if call.device == "metal" and call.K % LANES == 0 else "MLX operations"


def _complaint(call: Call) -> str | None:
    if call.dtype == "float64":
        return "computes in float32, so takes no float64"
    return complaint(call)
