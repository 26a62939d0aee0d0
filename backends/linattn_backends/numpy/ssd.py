"""``ssd`` in float64 as ``simple_gla`` with its surroundings, and the pull-backs of those.

``Δ = clip(softplus?(dt + dt_bias))``; ``q = C``, ``k = B``, ``v = Δ x``, ``g = Δ A``; ``o ← (o + D∘x) ∘ silu(z)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .companions import activated
from .maps import sigmoid
from .recurrence import Array

__all__ = ["after", "inner", "pull_back", "pull_back_output"]

INNER = {"scale": 1.0}


def steps(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Array, Array]:
    """``Δ [B, T, HV]``, and its derivative by ``dt``: none where it is clipped."""
    dt = arrays["dt"] + arrays.get("dt_bias", 0.0)
    slope = np.ones_like(dt)
    if options.get("dt_softplus"):
        dt, slope = np.logaddexp(0.0, dt), sigmoid(dt)
    least, most = options.get("dt_limit", (0.0, np.inf))
    return np.clip(dt, least, most), np.where((dt < least) | (dt > most), 0.0, slope)


def inner(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays and options of the ``simple_gla`` inside."""
    dt, _ = steps(arrays, options)
    given = dict(q=arrays["C"], k=arrays["B"], v=dt[..., None] * arrays["x"], g=dt * arrays["A"])
    given |= {name: arrays[name] for name in ("initial_state", "cu_seqlens") if name in arrays}
    return given, {"output_final_state": options.get("output_final_state", False), **INNER}


def of_sequences(arrays: Mapping[str, Any]) -> Array:
    """``x``, zero behind the last packed sequence."""
    x = arrays["x"].copy()
    if "cu_seqlens" in arrays:
        x[:, arrays["cu_seqlens"][-1] :] = 0.0
    return x


def skipped(arrays: Mapping[str, Any], o: Array) -> Array:
    """``o + D∘x``."""
    D = arrays.get("D")
    return o if D is None else o + (D[:, None] if D.ndim == 1 else D) * of_sequences(arrays)


def after(arrays: Mapping[str, Any], o: Array) -> Array:
    """``(o + D∘x) ∘ silu(z)``."""
    o = skipped(arrays, o)
    return o * activated(arrays["z"], "silu")[0] if "z" in arrays else o


def pull_back_output(arrays: Mapping[str, Any], do: Array) -> Array:
    """The gradient of ``simple_gla``'s output."""
    return do * activated(arrays["z"], "silu")[0] if "z" in arrays else do


def pull_back(
    arrays: Mapping[str, Any], options: Mapping[str, Any], o: Array, do: Array, gradients: Mapping[str, Array]
) -> dict[str, Array]:
    """Gradients of the arrays given: from that of the output ``do``, ``simple_gla``'s output ``o``, and its gradients."""
    x, A = arrays["x"], arrays["A"]
    dt, slope = steps(arrays, options)
    dv, dg, d_in = gradients["v"], gradients["g"], pull_back_output(arrays, do)
    d_dt = ((dv * x).sum(-1) + dg * A) * slope
    found = dict(x=dt[..., None] * dv, dt=d_dt, A=(dg * dt).sum((0, 1)), B=gradients["k"], C=gradients["q"])
    if "D" in arrays:
        D = arrays["D"]
        through = of_sequences({**arrays, "x": d_in})
        found["x"] = found["x"] + (D[:, None] if D.ndim == 1 else D) * through
        dD = (through * x).sum((0, 1))
        found["D"] = dD.sum(-1) if D.ndim == 1 else dD
    if "z" in arrays:
        found["z"] = do * skipped(arrays, o) * activated(arrays["z"], "silu")[1]
    if "dt_bias" in arrays:
        found["dt_bias"] = d_dt.sum((0, 1))
    return found | {name: gradients[name] for name in ("initial_state",) if name in gradients}
