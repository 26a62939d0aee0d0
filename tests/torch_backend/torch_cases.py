"""Inputs for every family, and the oracle's answer to them."""

from __future__ import annotations

from typing import Any

import linattn
import torch
from linattn_backends.numpy import forward, vjp
from linattn_backends.torch import TorchBackend
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

backend = TorchBackend()

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr", "mixed_attn")
VARIANTS = {  # family and what is unusual about it
    **{family: (family, ()) for family in FAMILIES},
    "fixed_decay": ("simple_gla", ("fixed",)),
    "gla_shared_gate": ("gla", ("shared",)),
    "gla_value_gate": ("gla", ("gv",)),
    "delta_rule_vector_beta": ("delta_rule", ("beta_v",)),
    "kda_vector_beta": ("kda", ("beta_v",)),
    "normalized": ("linear_attn", ("normalize",)),
    "normalized_scalar_gate": ("simple_gla", ("normalize",)),
    "normalized_value_gate": ("gla", ("gv", "normalize")),
    "bidirectional": ("linear_attn", ("everywhere",)),
    "mixed_bias": ("mixed_attn", ("bias",)),
    "mixed_bidirectional": ("mixed_attn", ("bias", "everywhere")),
}
GATES = ("zero", "weak", "ordinary", "harsh")


def gate(*shape: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Log decays. ``harsh`` mixes weak gates with ``-1e4`` and hard resets."""
    g = logsigmoid(torch.randn(shape, dtype=torch.float64))
    if kind == "zero":
        g = torch.zeros_like(g)
    if kind in ("weak", "harsh"):
        g = g / 32
    if kind == "harsh":
        which = torch.rand(shape)
        g = g.masked_fill(which < 0.08, -1e4).masked_fill(which > 0.92, -torch.inf)
    return g.to(dtype)


def draw(variant: str, T: int, *, B=2, H=2, HV=4, K=5, V=7, kind="ordinary", lengths=None, state=True, dtype=torch.float64):
    """``(family, arrays, options)``; ``lengths`` packs sequences of those lengths, ``T`` is then ignored."""
    family, flags = VARIANTS[variant]
    N = B
    arrays: dict[str, Any] = {}
    if lengths is not None:
        B, T, N = 1, sum(lengths), len(lengths)
    rand = lambda *shape: torch.randn(shape, dtype=torch.float64).to(dtype)  # noqa: E731
    if family == "mixed_attn":
        return family, *_mixed(B, T, N, H, flags, lengths, state, rand)
    arrays |= {"q": rand(B, T, H, K), "k": rand(B, T, H, K), "v": rand(B, T, HV, V)}
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        arrays["k"] = normalize(arrays["k"].double(), dim=-1).to(dtype)
    shapes = {
        "simple_gla": (HV,) if "fixed" in flags else (B, T, HV),
        "gated_delta_rule": (B, T, HV),
        "gla": (B, T, H if "shared" in flags else HV, K),
        **dict.fromkeys(("rwkv6", "kda", "dplr"), (B, T, HV, K)),
    }
    if family in shapes:
        arrays["g"] = gate(*shapes[family], kind=kind, dtype=dtype)
    if "gv" in flags:
        arrays["gv"] = gate(B, T, HV, V, kind=kind, dtype=dtype)
    if family == "rwkv6":
        arrays["u"] = rand(HV, K)
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        arrays["beta"] = 2 * torch.sigmoid(rand(B, T, HV, V) if "beta_v" in flags else rand(B, T, HV))
    if family == "dplr":
        direction = normalize(torch.randn(B, T, HV, K, dtype=torch.float64), dim=-1)
        arrays["a"] = (-direction).to(dtype)
        arrays["b"] = (direction * torch.rand(B, T, HV, 1)).to(dtype)
    options: dict[str, Any] = {"output_final_state": "everywhere" not in flags}
    if "normalize" in flags:
        options["normalize"] = True
        arrays["q"], arrays["k"] = arrays["q"].abs() + 0.1, arrays["k"].abs() + 0.1
    if "everywhere" in flags:
        options["causal"] = False
    elif state:
        arrays["initial_state"] = rand(N, HV, K, V).float().to(torch.promote_types(dtype, torch.float32))
        if "normalize" in flags:
            arrays["initial_state"] = torch.cat((arrays["initial_state"], rand(N, HV, K, 1).abs().to(torch.float64)), -1)
    if lengths is not None:
        arrays["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return family, arrays, options


def _mixed(B, T, N, H, flags, lengths, state, rand, C=16, K=5, L=4, V=6):
    from linattn import MixedState

    arrays = {"q_quad": rand(B, T, H, K), "k_quad": rand(B, T, H, K), "q_lin": rand(B, T, H, L), "k_lin": rand(B, T, H, L)}
    arrays["v"] = rand(B, T, H, V)
    options = {"chunk_size": C, "quad_scale": 0.3, "lin_scale": 0.2, "causal": "everywhere" not in flags}
    options["output_final_state"] = options["causal"]
    if "bias" in flags:
        arrays["bias"] = rand(H, C, C)
    if state and options["causal"]:
        length = torch.arange(N, dtype=torch.int32) * 5 % C
        held = (torch.arange(C) < length[:, None])[..., None, None]
        arrays["initial_state"] = MixedState(rand(N, H, L, V), *(rand(N, C, H, W) * held for W in (K, L, V)), length)
    if lengths is not None:
        arrays["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    return arrays, options


def forms(variant: str) -> tuple[str, ...]:
    return ("chunk", "parallel") if "everywhere" in VARIANTS[variant][1] else ("recurrent", "chunk", "parallel")


def run(form: str, family: str, arrays: dict[str, Any], options: dict[str, Any]):
    """The operator, on this backend."""
    return getattr(linattn, f"{form}_{family}")(**arrays, **options, backend="torch")


def run_method(form: str, family: str, arrays: dict[str, Any], options: dict[str, Any]):
    """The backend's method itself, past what linattn does to the arguments of a public call."""
    return getattr(backend, f"{form}_{family}")(**arrays, **options)


def leaves(arrays: dict[str, Any]) -> dict[str, Tensor]:
    """Every float tensor by name."""
    flat: dict[str, Tensor] = {}
    for name, x in arrays.items():
        if isinstance(x, tuple):
            flat |= {f"{name}.{field}": y for field, y in zip(x._fields, x, strict=True)}
        else:
            flat[name] = x
    return {name: x for name, x in flat.items() if isinstance(x, Tensor) and x.is_floating_point()}


def outputs(result: tuple[Any, Any]) -> dict[str, Tensor]:
    o, state = result
    return leaves({"o": o, "final_state": state} if state is not None else {"o": o})


def gradients(form, family, arrays, options, weights, autocast=False, run=run):
    """Gradients of every float array for the given gradients of the outputs; ``autocast`` covers the forward pass only."""
    wrt = leaves(arrays)
    for x in wrt.values():
        x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = outputs(run(form, family, arrays, options))
    loss = sum((found[name].double() * weights[name]).sum() for name in found)
    grads = torch.autograd.grad(loss, list(wrt.values()), allow_unused=True)
    return found, {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(wrt.items(), grads, strict=True)}


def _numpy(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*map(_numpy, x))
    return x.detach().to(torch.float64).numpy() if isinstance(x, Tensor) and x.is_floating_point() else _index(x)


def _index(x: Any) -> Any:
    return x.numpy() if isinstance(x, Tensor) else x


def truth(family, arrays, options):
    """The oracle's outputs, random gradients for them, and the oracle's gradients of the inputs."""
    values = {name: _numpy(x) for name, x in arrays.items()}
    o, state = forward(family, values, options)
    expected = _tensors({"o": o, "final_state": state} if state is not None else {"o": o})
    weights = {name: torch.randn(x.shape, dtype=torch.float64) for name, x in expected.items()}
    d_state = None
    if isinstance(state, tuple):
        d_state = type(state)(*(weights[f"final_state.{name}"].numpy() for name in state._fields[:4]), None)
    elif state is not None:
        d_state = weights["final_state"].numpy()
    grads = vjp(family, values, options, weights["o"].numpy(), d_state)
    return expected, weights, _tensors(grads)


def _tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    flat = {}
    for name, x in arrays.items():
        if isinstance(x, tuple):
            flat |= {f"{name}.{f}": y for f, y in zip(x._fields, x, strict=True) if f != "length"}
        elif x is not None:
            flat[name] = x
    return {name: torch.from_numpy(x) for name, x in flat.items() if x.dtype.kind == "f"}


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; NaN counts as infinite."""
    if expected.numel() == 0:
        return 0.0 if found.shape == expected.shape else float("inf")
    difference = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    return float("inf") if difference.isnan() else difference.item()


def row_error(found: Tensor, expected: Tensor, floor: float = 1e-3) -> float:
    """Worst token row (``[B, T, ...]``): its error relative to its own norm, or a little of the typical row's."""
    expected, found = expected.flatten(2), found.detach().double().flatten(2)
    size = expected.norm(dim=2)
    return ((found - expected).norm(dim=2) / (size + floor * size.median())).max().item()
