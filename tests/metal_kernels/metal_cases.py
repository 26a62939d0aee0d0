"""Calls of every family for the kernels, and how far what they find is from the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from linattn_backends.mlx import metal
from linattn_backends.numpy import forward, vjp

VARIANTS = {  # family, what its gate and its beta belong to, and what else it has
    "linear_attn": ("linear_attn", "", "", ()),
    "simple_gla": ("simple_gla", "head", "", ()),
    "gla": ("gla", "key", "", ()),
    "gla_gv": ("gla", "key", "", ("gv",)),
    "gla_shared": ("gla", "shared", "", ()),
    "rwkv6": ("rwkv6", "key", "", ("u",)),
    "delta_rule": ("delta_rule", "", "head", ()),
    "gated_delta_rule": ("gated_delta_rule", "head", "head", ()),
    "kda": ("kda", "key", "head", ()),
    "kda_by_value": ("kda", "key", "value", ()),
    "dplr": ("dplr", "key", "", ("a", "b")),
}
GATES = ("ordinary", "weak", "harsh")


@dataclass(frozen=True)
class Options:
    scale: float = 0.3
    keep: bool = True
    form: str = "recurrent"
    chunk_size: int | None = None


@dataclass
class Case:
    op: str
    arrays: dict[str, mx.array]
    d_o: mx.array
    d_final: mx.array

    def gradients(self, options: Options) -> dict[str, mx.array]:
        return metal.backward(self.arrays, {"o": self.d_o, "final": self.d_final}, {}, options)

    def errors(self, options: Options, backward: bool = True) -> dict[str, float]:
        """The largest error of each output and gradient, relative to its largest value, and to rounding in its dtype."""
        plain = {name: as_numpy(x) for name, x in self.arrays.items()}
        given = dict(scale=options.scale, output_final_state=True)
        found = metal.forward(self.arrays, options)
        o, final = forward(self.op, plain, given)
        errors = {"o": error(found["o"], o), "final": error(found["final"], final)}
        if backward:
            found = self.gradients(options)
            for name, wanted in vjp(self.op, plain, given, as_numpy(self.d_o), as_numpy(self.d_final)).items():
                errors["d_" + name] = error(found[name], wanted)
        return errors


def draw(
    variant, T=19, *, B=2, H=2, HV=4, K=12, V=10, kind="ordinary", lengths=None, tail=0, state=True, dtype=mx.float32, seed=0
):
    """A case with new numbers; ``lengths`` packs sequences, ``T`` is then their sum and a ``tail`` behind them."""
    op, gate_of, beta_of, others = VARIANTS[variant]
    rng = np.random.default_rng([seed, *variant.encode()])
    N = B
    if lengths is not None:
        B, T, N = 1, sum(lengths) + tail, len(lengths)
    shapes: dict[str, Any] = {"head": (B, T, HV), "key": (B, T, HV, K), "shared": (B, T, H, K), "value": (B, T, HV, V)}
    normal = rng.standard_normal
    arrays = {"q": normal((B, T, H, K)), "k": normal((B, T, H, K)) / K**0.5, "v": normal((B, T, HV, V))}
    if gate_of:
        arrays["g"] = gate(rng, kind, shapes[gate_of])
    if "gv" in others:
        arrays["gv"] = gate(rng, kind, shapes["value"])
    if beta_of:
        arrays["beta"] = 1 / (1 + np.exp(-normal(shapes[beta_of])))
    if "u" in others:
        arrays["u"] = normal((HV, K))
    if "a" in others:
        arrays["q"], arrays["k"] = normal((B, T, HV, K)), normal((B, T, HV, K)) / K**0.5
        arrays["a"], arrays["b"] = normal((B, T, HV, K)) / K**0.5, normal((B, T, HV, K)) / K**0.5
    if state:
        arrays["initial_state"] = normal((N, HV, K, V))
    given = {name: mx.array(x.astype(np.float32)).astype(dtype if name in "qkv" else mx.float32) for name, x in arrays.items()}
    if lengths is not None:
        given["cu_seqlens"] = mx.array(np.cumsum([0, *lengths], dtype=np.int32))
    d_o, d_final = (mx.array(normal(shape).astype(np.float32)) for shape in ((B, T, HV, V), (N, HV, K, V)))
    return Case(op, given, d_o.astype(dtype), d_final)


def gate(rng, kind, shape):
    """Log decays. ``harsh`` mixes weak gates with ``-1e4`` and hard resets."""
    g = -np.logaddexp(0, rng.standard_normal(shape))
    if kind == "ordinary":
        return g
    g = g / 32
    which = rng.random(shape)
    return np.where(which < 0.08, -1e4, np.where(which > 0.92, -np.inf, g)) if kind == "harsh" else g


def as_numpy(x: mx.array) -> np.ndarray:
    return np.array(x if x.dtype in (mx.int32, mx.int64) else x.astype(mx.float32))


ROUNDING = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}


def error(found: mx.array, wanted: np.ndarray) -> float:
    """The largest difference, in units of the largest value and of what rounding to the dtype of ``found`` may do."""
    assert found.shape == wanted.shape
    difference = np.abs(as_numpy(found) - wanted).max()
    return float(difference / max(np.abs(wanted).max(), 1e-30) / ROUNDING[found.dtype])
