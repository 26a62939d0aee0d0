"""Whose fault is it? The oracle (float64), our PyTorch path in float64, and flash-linear-attention, on the same inputs.

``python examples/peers/side_by_side.py OUT.json``, with linattn and the library installed. On a GPU, set
``TRITON_F32_DEFAULT=ieee``; without one, ``TRITON_INTERPRET=1`` runs its kernels in Triton's interpreter, whose products are
exact. Each row is the relative error against the oracle, ``|x - oracle| / |oracle|``.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import linattn
import numpy as np
import torch
from linattn_backends.numpy import oracle
from triton.runtime.autotuner import Autotuner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"scale": None, "output_final_state": True, "chunk_size": None}


def first_configuration(self: Autotuner, *args: object, **keywords: object) -> object:
    """The interpreter has no clock to tune by."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    return self.fn.run(*args, **keywords, **self.configs[0].kwargs)


def draw(*names: str, T: int = 64, K: int = 64) -> dict[str, torch.Tensor]:
    """float32 arrays of one row and two heads."""
    rng = np.random.default_rng(0)
    shapes = {"g": (1, T, 2), "beta": (1, T, 2), "u": (2, K)}
    x = {name: rng.standard_normal(shapes.get(name, (1, T, 2, K))).astype(np.float32) for name in names}
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    for name in {"g", "w"} & set(names):
        x[name] = -abs(x[name]) / 8
    for name in {"beta", "channels"} & set(names):
        x[name] = 1 / (1 + np.exp(-x[name]))
    return {{"w": "g", "channels": "beta"}.get(name, name): torch.from_numpy(value) for name, value in x.items()}


def error(got: torch.Tensor, wanted: np.ndarray) -> float | str:
    found = got.detach().cpu().double().numpy()
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)) if np.isfinite(found).all() else "not finite"


def outputs(family: str, x: dict[str, torch.Tensor], *peers: Callable[..., object]) -> dict[str, float | str]:
    """``o`` of ours in float64 and of the peer's operators in float32."""
    truth = oracle.forward(family, {name: y.double().numpy() for name, y in x.items()}, OPTIONS)[0]
    ours = getattr(linattn, f"chunk_{family}")(**{name: y.double().to(DEVICE) for name, y in x.items()}, backend="torch")[0]
    rows = {"linattn torch float64": error(ours, truth)}
    return rows | {f"fla {op.__name__} float32": error(op(**{n: y.to(DEVICE) for n, y in x.items()})[0], truth) for op in peers}


def gradients(
    family: str, leaf: str, x: dict[str, torch.Tensor], of_state: bool, peers: dict[str, Callable[..., object]]
) -> dict[str, float | str]:
    """The gradient of one array from the sum of squares of the final state, or of ``o``."""
    wide = {name: y.double().numpy() for name, y in x.items()}
    o, state = oracle.forward(family, wide, OPTIONS)
    cotangents = (None, 2 * state) if of_state else (2 * o, None)
    truth = oracle.vjp(family, wide, OPTIONS, *cotangents)[leaf]

    def gradient(call: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        given = {name: y.to(DEVICE, dtype) for name, y in x.items()}
        given[leaf].requires_grad_()
        return torch.autograd.grad(call(given)[int(of_state)].square().sum(), given[leaf])[0]

    def ours(y: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(linattn, f"recurrent_{family}")(**y, output_final_state=True, backend="torch")

    rows = {"linattn torch float64": error(gradient(ours, torch.float64), truth)}
    return rows | {f"fla {name} float32": error(gradient(call, torch.float32), truth) for name, call in peers.items()}


def fla_delta_tf32() -> dict[str, float | str]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    peers = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
    return outputs("gated_delta_rule", draw("q", "k", "v", "g", "beta"), *peers)


def fla_rwkv6_final_state() -> dict[str, float | str]:
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

    def peer(op: Callable[..., object]) -> Callable[..., object]:
        return lambda y: op(y["q"], y["k"], y["v"], y["g"], y["u"], output_final_state=True)

    peers = {op.__name__: peer(op) for op in (chunk_rwkv6, fused_recurrent_rwkv6)}
    return gradients("rwkv6", "k", draw("q", "k", "v", "w", "u"), True, peers)


def fla_delta_beta_gradient() -> dict[str, float | str]:
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    x = draw("q", "k", "v", "channels", T=16)
    peers = {"fused_recurrent_delta_rule": lambda y: fused_recurrent_delta_rule(**y)}
    return gradients("delta_rule", "beta", x, False, peers)


def gated(value: float) -> dict[str, float | str]:
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    x = draw("q", "k", "v", "g")
    x["g"][:, 20] = value
    return outputs("simple_gla", x, chunk_simple_gla, fused_recurrent_simple_gla)


CHECKS: dict[str, Callable[[], dict[str, float | str]]] = {
    "fla_delta_tf32": fla_delta_tf32,
    "fla_rwkv6_final_state": fla_rwkv6_final_state,
    "fla_delta_beta_gradient": fla_delta_beta_gradient,
    "fla_gate_reset": lambda: gated(float("-inf")),
    "fla_gate_large": lambda: gated(-1e4),
}


def main(path: str) -> None:
    if DEVICE == "cpu":
        Autotuner.run = first_configuration
    rows: dict[str, dict[str, float | str]] = {}
    for name, check in CHECKS.items():
        try:
            rows[name] = check()
        except Exception as failure:  # the next check says something too
            rows[name] = {"not run": f"{type(failure).__name__}: {failure}"[:200]}
        print(name, rows[name], flush=True)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()}, Triton's interpreter"
    made = {"where": where, "versions": {name: version(name) for name in ("torch", "triton")}, "errors": rows}
    Path(path).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
