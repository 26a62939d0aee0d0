"""Whose fault is it? The oracle (float64), our PyTorch path in float64, and the peer, on the same inputs.

``python examples/peers/side_by_side.py OUT.json`` on a Hopper GPU, with linattn and the peers installed and
``TRITON_F32_DEFAULT=ieee``. Each row is the relative error against the oracle, ``|x - oracle| / |oracle|``.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import linattn
import numpy as np
import torch
from linattn_backends.numpy import oracle

HERE = Path(__file__).parent


def draw(*names: str, T: int = 65, K: int = 64) -> dict[str, torch.Tensor]:
    """float32 arrays of one row and two heads."""
    rng = np.random.default_rng(0)
    shapes = {"g": (1, T, 2), "beta": (1, T, 2), "u": (2, K), "w": (1, T, 2, K)}
    x = {name: rng.standard_normal(shapes.get(name, (1, T, 2, K))).astype(np.float32) for name in names}
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    for name in ("g", "w"):
        x |= {name: -abs(x[name]) / 8} if name in x else {}
    x |= {"beta": 1 / (1 + np.exp(-x["beta"]))} if "beta" in x else {}
    return {name: torch.from_numpy(value) for name, value in x.items()}


def error(got: torch.Tensor, wanted: np.ndarray) -> float:
    found = got.detach().cpu().double().numpy()
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def fla_delta_tf32() -> dict[str, float]:
    """``o`` of chunk_gated_delta_rule in float32."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    x = draw("q", "k", "v", "g", "beta")
    truth = linattn.chunk_gated_delta_rule(**{n: y.double().numpy() for n, y in x.items()})[0]
    ours = linattn.chunk_gated_delta_rule(**{n: y.double().cuda() for n, y in x.items()}, backend="torch")[0]
    ours32 = linattn.chunk_gated_delta_rule(**{n: y.cuda() for n, y in x.items()}, backend="torch")[0]
    device = {n: y.cuda() for n, y in x.items()}
    return {
        "linattn torch float64": error(ours, truth),
        "linattn torch float32": error(ours32, truth),
        "fla chunk_gated_delta_rule float32": error(chunk_gated_delta_rule(**device)[0], truth),
        "fla fused_recurrent_gated_delta_rule float32": error(fused_recurrent_gated_delta_rule(**device)[0], truth),
    }


def fla_rwkv6_final_state() -> dict[str, float]:
    """The gradient of ``k`` from the sum of squares of the final state."""
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

    x = draw("q", "k", "v", "w", "u")
    x["g"] = x.pop("w")
    wide = {n: y.double().numpy() for n, y in x.items()}
    options = {"scale": None, "output_final_state": True, "chunk_size": None}
    state = oracle.forward("rwkv6", wide, options)[1]
    truth = oracle.vjp("rwkv6", wide, options, None, 2 * state)["k"]

    def gradient(call, dtype: torch.dtype) -> torch.Tensor:
        given = {n: y.to("cuda", dtype) for n, y in x.items()}
        given["k"].requires_grad_()
        return torch.autograd.grad(call(given)[1].square().sum(), given["k"])[0]

    def peer(op):
        return lambda y: op(y["q"], y["k"], y["v"], y["g"], y["u"], output_final_state=True)

    def ours(y):
        return linattn.recurrent_rwkv6(**y, output_final_state=True, backend="torch")

    return {
        "linattn torch float64": error(gradient(ours, torch.float64), truth),
        "fla chunk_rwkv6 float32": error(gradient(peer(chunk_rwkv6), torch.float32), truth),
        "fla fused_recurrent_rwkv6 float32": error(gradient(peer(fused_recurrent_rwkv6), torch.float32), truth),
    }


def jla_x64() -> dict[str, float | str]:
    """``o`` of simple_gla in bfloat16 with 64-bit types off, and what happens with them on."""
    jax, jnp = importlib.import_module("jax"), importlib.import_module("jax.numpy")
    from jla.ops import linear_attention

    x = {n: y.bfloat16() if n in "qkv" else y for n, y in draw("q", "k", "v", "g", K=128).items()}
    truth = linattn.chunk_simple_gla(**{n: y.double().numpy() for n, y in x.items()})[0]
    ours = linattn.chunk_simple_gla(**{n: y.double().cuda() for n, y in x.items()}, backend="torch")[0]
    given = {n: jnp.asarray(y.float().numpy(), jnp.bfloat16 if n in "qkv" else jnp.float32) for n, y in x.items()}
    q, k, v, g = (given[n] for n in "qkvg")
    found: dict[str, float | str] = {"linattn torch float64": error(ours, truth)}
    o = linear_attention("simple_gla", q, k, v, g=g)[0]
    found["jla simple_gla bfloat16, 64-bit types off"] = error(torch.from_numpy(np.array(o, np.float32)), truth)
    with jax.enable_x64(True):
        try:
            linear_attention("simple_gla", q, k, v, g=g)
            found["jla simple_gla bfloat16, 64-bit types on"] = "runs"
        except TypeError as failure:
            found["jla simple_gla bfloat16, 64-bit types on"] = f"TypeError: {failure}".split("(")[0].strip()
    return found


CHECKS = {check.__name__: check for check in (fla_delta_tf32, fla_rwkv6_final_state, jla_x64)}


def main(path: str) -> None:
    """Every check, and what the reproduction beside it prints."""
    rows = {}
    for name, check in CHECKS.items():
        done = subprocess.run([sys.executable, HERE / f"{name}.py"], capture_output=True, text=True, check=False)
        printed = [line for line in (done.stdout + done.stderr).splitlines() if "Warning" not in line]
        rows[name] = {"errors": check(), "reproduction": printed[-2:]}
    Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
