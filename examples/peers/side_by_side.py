"""Whose fault is it? The oracle (float64), our PyTorch path in float64, and each library, on the same inputs.

``python examples/peers/side_by_side.py OUT.json [CHECK ...]``, with linattn and the libraries installed; what is missing is not
run. Set ``TRITON_F32_DEFAULT=ieee`` on a GPU; without one, ``TRITON_INTERPRET=1`` runs the kernels of flash-linear-attention in
Triton's interpreter, whose products are exact. Either way in the first configuration of each, as in first_configuration.py.
Each figure is ``|x - oracle| / |oracle|``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import linattn
import numpy as np
import torch
from linattn_backends.numpy import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"scale": None, "output_final_state": True, "chunk_size": None}
PACKAGES = ("torch", "triton", "flash-linear-attention", "flash-qla", "jax", "jax-linear-attention", "mlx")

Arrays = dict[str, torch.Tensor]
Rows = dict[str, float | str]


def draw(*names: str, T: int = 64, K: int = 64, V: int = 64) -> Arrays:
    """float32 arrays of one row and two heads."""
    rng = np.random.default_rng(0)
    shapes = {"g": (1, T, 2), "beta": (1, T, 2), "u": (2, K), "v": (1, T, 2, V), "channels": (1, T, 2, V)}
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


def figure(call: Callable[[], torch.Tensor], wanted: np.ndarray) -> float | str:
    """The error of what a call returns, or the name of what it raises."""
    try:
        return error(call(), wanted)
    except Exception as failure:  # it is what the library does
        return type(failure).__name__


def outputs(family: str, x: Arrays, peers: dict[str, Callable[[Arrays], torch.Tensor]]) -> Iterator[tuple[str, float | str]]:
    """``o`` of ours in float64 and of the peer's operators."""
    truth = oracle.forward(family, {name: y.double().numpy() for name, y in x.items()}, OPTIONS)[0]
    ours = getattr(linattn, f"chunk_{family}")(**{name: y.double().to(DEVICE) for name, y in x.items()}, backend="torch")[0]
    yield "linattn torch float64", error(ours, truth)
    for name, call in peers.items():
        yield name, figure(lambda call=call: call(x), truth)


# -- flash-linear-attention ------------------------------------------------------------------------------------------


def fla_outputs(family: str, x: Arrays, *operators: Callable[..., object]) -> Iterator[tuple[str, float | str]]:
    """``o`` of its operators in float32."""

    def peer(operator: Callable[..., object]) -> Callable[[Arrays], torch.Tensor]:
        return lambda x: operator(**{name: y.to(DEVICE) for name, y in x.items()})[0]

    return outputs(family, x, {f"fla {operator.__name__} float32": peer(operator) for operator in operators})


def gradients(
    family: str, leaf: str, x: Arrays, of_state: bool, peers: dict[str, Callable[..., object]]
) -> Iterator[tuple[str, float | str]]:
    """The gradient of one array from the sum of squares of the final state, or of ``o``."""
    wide = {name: y.double().numpy() for name, y in x.items()}
    o, state = oracle.forward(family, wide, OPTIONS)
    cotangents = (None, 2 * state) if of_state else (2 * o, None)
    truth = oracle.vjp(family, wide, OPTIONS, *cotangents)[leaf]

    def gradient(call: Callable[..., tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        given = {name: y.to(DEVICE, dtype) for name, y in x.items()}
        given[leaf].requires_grad_()
        return torch.autograd.grad(call(given)[int(of_state)].square().sum(), given[leaf])[0]

    def ours(y: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(linattn, f"recurrent_{family}")(**y, output_final_state=True, backend="torch")

    yield "linattn torch float64", error(gradient(ours, torch.float64), truth)
    for name, call in peers.items():
        yield f"fla {name} float32", figure(lambda call=call: gradient(call, torch.float32), truth)


def fla_delta_tf32() -> Iterator[tuple[str, float | str]]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    peers = (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule)
    return fla_outputs("gated_delta_rule", draw("q", "k", "v", "g", "beta"), *peers)


def fla_rwkv6_final_state() -> Iterator[tuple[str, float | str]]:
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

    def peer(op: Callable[..., object]) -> Callable[..., object]:
        return lambda y: op(y["q"], y["k"], y["v"], y["g"], y["u"], output_final_state=True)

    peers = {op.__name__: peer(op) for op in (chunk_rwkv6, fused_recurrent_rwkv6)}
    return gradients("rwkv6", "k", draw("q", "k", "v", "w", "u"), True, peers)


def fla_delta_beta_gradient() -> Iterator[tuple[str, float | str]]:
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    x = draw("q", "k", "v", "channels", T=16)
    return gradients("delta_rule", "beta", x, False, {"fused_recurrent_delta_rule": lambda y: fused_recurrent_delta_rule(**y)})


def fla_delta_state_gradient() -> Iterator[tuple[str, float | str]]:
    """The gradient of ``q`` beside a state that needs none."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule

    x = draw("q", "k", "v", "beta", T=16) | {"initial_state": torch.ones(1, 2, 64, 64)}
    return gradients("delta_rule", "q", x, False, {"fused_recurrent_delta_rule": lambda y: fused_recurrent_delta_rule(**y)})


def fla_narrow_values() -> Iterator[tuple[str, float | str]]:
    """The gradient of ``q`` with eight value channels."""
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    def recurrent(y: Arrays) -> object:
        return fused_recurrent_gla(**{{"g": "gk"}.get(name, name): z for name, z in y.items()})

    peers = {"chunk_gla": lambda y: chunk_gla(**y), "fused_recurrent_gla": recurrent}
    return gradients("gla", "q", draw("q", "k", "v", "w", V=8), False, peers)


def fla_compiled_gradient() -> Iterator[tuple[str, float | str]]:
    from fla.ops.simple_gla import fused_recurrent_simple_gla as op

    peers = {"fused_recurrent_simple_gla": op}
    if DEVICE == "cuda":  # a graph has no interpreter
        peers["fused_recurrent_simple_gla, compiled,"] = torch.compile(op, backend="aot_eager", fullgraph=True)
    return gradients(
        "simple_gla", "q", draw("q", "k", "v", "g", T=16), False, {n: lambda y, f=f: f(**y) for n, f in peers.items()}
    )


def with_gate(value: float) -> Arrays:
    x = draw("q", "k", "v", "g")
    x["g"][:, 20] = value
    return x


def fla_gate(value: float) -> Iterator[tuple[str, float | str]]:
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    return fla_outputs("simple_gla", with_gate(value), chunk_simple_gla, fused_recurrent_simple_gla)


# -- FlashQLA --------------------------------------------------------------------------------------------------------


def flash_qla(**changes: torch.Tensor) -> Iterator[tuple[str, float | str]]:
    """``o`` in bfloat16; its bound is that of bfloat16, 0.4 %."""
    from flash_qla import chunk_gated_delta_rule

    x = draw("q", "k", "v", "g", "beta", K=128, V=128) | changes
    x |= {name: x[name].bfloat16() for name in ("q", "k", "v")}

    def peer(x: Arrays) -> torch.Tensor:
        return chunk_gated_delta_rule(**{name: y.to(DEVICE) for name, y in x.items()})[0]

    return outputs("gated_delta_rule", x, {f"flash_qla, gates in {str(x['g'].dtype)[6:]}": peer})


def flash_qla_gate_dtype() -> Iterator[tuple[str, float | str]]:
    """The same gates in two dtypes."""
    gates = -torch.rand(1, 64, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    return itertools.chain(flash_qla(g=gates), list(flash_qla(g=gates.float()))[1:])


# -- the others ------------------------------------------------------------------------------------------------------


def jla_gate(value: float) -> Iterator[tuple[str, float | str]]:
    import jax.numpy as jnp
    from jla.ops import linear_attention

    def peer(implementation: str) -> Callable[[Arrays], torch.Tensor]:
        def call(x: Arrays) -> torch.Tensor:
            o, _ = linear_attention("simple_gla", **{n: jnp.asarray(y.numpy()) for n, y in x.items()}, impl=implementation)
            return torch.from_numpy(np.array(o))

        return call

    return outputs("simple_gla", with_gate(value), {f"jla {name} float32": peer(name) for name in ("chunked", "reference")})


def mlx_fast_gate_rounding() -> Iterator[tuple[str, float | str]]:
    import mlx.core as mx

    def peer(dtype: mx.Dtype) -> Callable[[Arrays], torch.Tensor]:
        def call(x: Arrays) -> torch.Tensor:
            y = {name: mx.array(z.numpy()) for name, z in x.items()}
            operands = [y[name].astype(dtype) for name in ("q", "k", "v")]
            o, _ = mx.fast.gated_delta_update(*operands, mx.exp(y["g"]), y["beta"])
            return torch.from_numpy(np.array(o.astype(mx.float32))) * x["q"].shape[-1] ** -0.5

        return call

    x = draw("q", "k", "v", "g", "beta", T=256)
    x |= {name: x[name].bfloat16().float() for name in ("q", "k", "v")}  # the same numbers in both dtypes
    x["g"], x["beta"] = x["g"].clamp(min=-0.1) / 64, x["beta"] / 16
    return outputs("gated_delta_rule", x, {f"mx.fast {str(d)[9:]}": peer(d) for d in (mx.float32, mx.bfloat16)})


CHECKS: dict[str, Callable[[], Iterator[tuple[str, float | str]]]] = {
    "fla_delta_tf32": fla_delta_tf32,
    "fla_rwkv6_final_state": fla_rwkv6_final_state,
    "fla_delta_beta_gradient": fla_delta_beta_gradient,
    "fla_delta_state_gradient": fla_delta_state_gradient,
    "fla_narrow_values": fla_narrow_values,
    "fla_compiled_gradient": fla_compiled_gradient,
    "fla_gate_reset": lambda: fla_gate(float("-inf")),
    "fla_gate_large": lambda: fla_gate(-1e4),
    "flash_qla_gate_reset": lambda: flash_qla(g=with_gate(float("-inf"))["g"]),
    "flash_qla_gate_dtype": flash_qla_gate_dtype,
    "jla_gate_reset": lambda: jla_gate(float("-inf")),
    "jla_gate_large": lambda: jla_gate(-1e4),
    "mlx_fast_gate_rounding": mlx_fast_gate_rounding,
}


def installed() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def main(path: str, *chosen: str) -> None:
    with contextlib.suppress(ImportError):
        import first_configuration  # noqa: F401 - instead of tuning, which takes minutes, and which no interpreter can
    rows: dict[str, Rows] = {}
    for name in chosen or CHECKS:
        try:
            rows[name] = dict(CHECKS[name]())
        except Exception as failure:  # the next check says something too
            rows[name] = {"not run": f"{type(failure).__name__}: {failure}"[:200]}
        print(name, rows[name], flush=True)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()}, Triton's interpreter"
    made = {"where": where, "versions": dict(installed()), "errors": rows}
    Path(path).write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
