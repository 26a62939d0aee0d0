"""Runs one call on the backend and on the oracle, forward and backward, and compares."""

from __future__ import annotations

import numpy as np
import torch
from linattn_backends.numpy import oracle
from linattn_backends.triton import TritonBackend
from linattn_backends.triton.runtime import device

BACKEND = TritonBackend()
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the interpreter truncates to bfloat16

GATES = {
    "zero": lambda g: 0 * g,
    "weak": lambda g: g / 16,
    "plain": lambda g: g,
    "strong": lambda g: 30 * g,
    "-1e4": lambda g: 0 * g - 1e4,
    "-inf": lambda g: torch.full_like(g, -torch.inf),
}


def pretend(monkeypatch, **facts):
    """Let kernels and tiles be chosen as for a device with these ``Properties``."""
    found = device.measured(torch.device("cpu"))._replace(**facts)
    monkeypatch.setattr(device, "measured", lambda where: found)


def place_of(kernel):
    """Where a kernel stands, and its name: ``diagonal/resident.py:diagonal_scan``."""
    return f"{kernel.fn.__module__.partition('.triton.')[2].replace('.', '/')}.py:{kernel.__name__}"


def gate(shape, kind):
    """Log decays; ``mixed`` draws every kind in turn."""
    g = torch.nn.functional.logsigmoid(torch.randn(shape))
    if kind != "mixed":
        return GATES[kind](g)
    pick = torch.randint(0, len(GATES), shape)
    return sum_of([torch.where(pick == i, make(g), torch.zeros(())) for i, make in enumerate(GATES.values())])


def sum_of(parts):
    result = parts[0]
    for part in parts[1:]:
        result = torch.where(part == 0, result, part)
    return result


def arrays(
    family, B=1, T=21, H=1, HV=1, K=5, V=7, dtype=torch.float32, kind="plain", shape=None, gv=None, state=True, cu=None, seed=0,
    per_value=False,
):  # fmt: skip
    """Seeded arguments by name, in the family's order. ``gv``: kind of a value gate. Delta families: keys are unit vectors."""
    torch.manual_seed(seed)
    result = dict(q=torch.randn(B, T, H, K), k=torch.randn(B, T, H, K), v=torch.randn(B, T, HV, V))
    result = {name: x.to(dtype) for name, x in result.items()}
    if family in ("simple_gla", "gated_delta_rule"):
        result["g"] = gate(shape or (B, T, HV), kind)
    if family in ("gla", "rwkv6", "kda", "dplr"):
        result["g"] = gate(shape or (B, T, HV, K), kind)
    if gv:
        result["gv"] = gate((B, T, HV, V), gv)
    if family == "rwkv6":
        result["u"] = torch.randn(HV, K)
    if "delta" in family or family == "kda":
        result["k"] = unit(result["k"])
        result["beta"] = torch.rand((B, T, HV, V) if per_value else (B, T, HV)) * 1.9
    if family == "dplr":
        result["a"] = -unit(torch.randn(B, T, HV, K)).to(dtype)
        result["b"] = -result["a"] * torch.rand(B, T, HV, 1).to(dtype)
    N = B if cu is None else len(cu) - 1
    if state:
        result["initial_state"] = torch.randn(N, HV, K, V)
    if cu is not None:
        result["cu_seqlens"] = torch.tensor(cu)
    return result


def fill_with_least(monkeypatch):
    """Let what is allocated hold the least number of its kind until it is written."""
    empty = torch.empty

    def least(*size, **options):
        x = empty(*size, **options)
        return x.fill_((torch.finfo if x.is_floating_point() else torch.iinfo)(x.dtype).min)

    monkeypatch.setattr(torch, "empty", least)


def positive(given):
    """The same with weights that do not come close to zero, and a state of a normalised call in the place of any other."""
    (B, _, HV, V), K = given["v"].shape, given["q"].shape[3]
    N = len(given["cu_seqlens"]) - 1 if "cu_seqlens" in given else B
    for name in ("q", "k"):
        given[name] = given[name].abs() + 0.1
    given["initial_state"] = torch.rand(N, HV, K, V + 1) + 0.1
    return given


def near_the_end(family, name, decay, **sizes):
    """float16 arrays under decays of ``2^decay`` in 64 tokens, where half of that takes ``name`` out of the range, upwards.

    A chunk may decay by ``2^10`` for plain products, and else a block of 16 tokens.
    """
    given = arrays(family, T=70, K=16, V=16, dtype=torch.float16, state=False, **sizes)
    scales = dict(q=0.01, k=0.01, v=4000) if name == "v" else dict(q=1 / 4000, k=1 / 4000, v=0.1) | {name: 4000}
    gates = dict.fromkeys(("g", "gv"), -decay / 64 * 0.6931)
    given |= {array: given[array] * factor for array, factor in scales.items()}
    return given | {gate: torch.full_like(given[gate], value) for gate, value in gates.items() if gate in given}


def vast(family, decay, others, **sizes):
    """bfloat16 arrays with values of ``2^80``, of which float32 holds no products with half of what one token decays by.

    The token is the last, alone in its chunk of 32, or among ``others`` where another one decays by more than plain products
    take.
    """
    given = arrays(family, T=33, dtype=torch.bfloat16, kind="weak", state=False, **sizes)
    for name in {"g", "gv"} & given.keys():
        given[name][:, 5 if others else 32] = -decay
        given[name][:, 20] = -110 if others else 0
    return given | dict(v=2.0**80 * given["v"])


def unit(x):
    return torch.nn.functional.normalize(x, dim=-1)


def call(family, given, form="chunk", **options):
    """The backend's method on arguments by name."""
    given = dict(given)
    keywords = {name: given.pop(name, None) for name in ("initial_state", "cu_seqlens")}
    return getattr(BACKEND, f"{form}_{family}")(*given.values(), **keywords, **options)


def as_numpy(given):
    return {name: x.detach().to(torch.float64 if x.is_floating_point() else x.dtype).numpy() for name, x in given.items()}


def distance(found, wanted):
    """Relative error; absolute where the truth is zero."""
    found, wanted = np.asarray(found.detach().double()), np.asarray(wanted)
    assert found.shape == wanted.shape
    assert np.isfinite(found).all()
    norm = np.linalg.norm(wanted)
    return np.linalg.norm(found - wanted) / (norm if norm > 1e-6 else 1.0)


def check(family, given, form="chunk", d_o=1.0, **options):
    """Outputs, final state and every gradient agree with the oracle. ``d_o``: size of the gradient of the outputs."""
    tolerance = TOLERANCE[given["v"].dtype]
    floats = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    before = {name: x.detach().clone() for name, x in given.items()}
    o, final = call(family, given, form, output_final_state=True, **options)
    exact = as_numpy(given)
    wanted_o, wanted_final = oracle.forward(family, exact, dict(options, output_final_state=True))
    assert o.dtype == given["v"].dtype
    assert final.dtype == torch.float32
    d_o, d_final = (d_o * torch.randn(o.shape)).to(o.dtype), torch.randn(final.shape)
    found = torch.autograd.grad([o, final], list(floats.values()), [d_o, d_final])
    wanted = oracle.vjp(family, exact, dict(options, output_final_state=True), d_o.double().numpy(), d_final.double().numpy())
    errors = dict(o=distance(o, wanted_o), final=distance(final, wanted_final))
    for name, x in zip(floats, found, strict=True):
        assert x.dtype == given[name].dtype
        errors[f"d{name}"] = distance(x, wanted[name])
    assert all(error < tolerance for error in errors.values()), errors
    for name, x in before.items():
        assert torch.equal(x, given[name].detach())


def check_forward(family, given, form="recurrent", **options):
    """Outputs and final state agree with the oracle; inputs stay as they were."""
    tolerance = TOLERANCE[given["v"].dtype]
    before = {name: x.clone() for name, x in given.items()}
    with torch.no_grad():
        o, final = call(family, given, form, output_final_state=True, **options)
    wanted_o, wanted_final = oracle.forward(family, as_numpy(given), dict(options, output_final_state=True))
    assert o.dtype == given["v"].dtype
    assert final.dtype == torch.float32
    assert distance(o, wanted_o) < tolerance
    assert distance(final, wanted_final) < tolerance
    assert all(torch.equal(x, given[name]) for name, x in before.items())


def with_states(said):
    """What ``explain`` says of kernels, with what it says of the diagonal core's states in each pass."""
    kernels, aside, reason = said.partition(" (")
    passes = kernels.split("; gradients ")
    for i, of in enumerate(passes):
        if "diagonal_" in of:
            passes[i] += ", states materialised" if "diagonal_states" in of else ", states not materialised"
    return "; gradients ".join(passes) + aside + reason
