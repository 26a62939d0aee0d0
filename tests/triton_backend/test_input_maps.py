"""Raw projections in, by the kernels, against the oracle: forward, backward to projections and parameters, and decoding."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
import torch
from linattn.gates import BoundedSigmoid, LogSigmoid, NegExp, Softplus
from linattn_backends.numpy import oracle
from linattn_backends.triton.delta.config import DeltaVariant
from triton_cases import BACKEND, arrays, as_numpy, distance, pretend

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}  # the interpreter truncates to bfloat16

GATES = {
    "softplus": lambda A, b: Softplus(A, b),
    "softplus, no bias, one A": lambda A, b: Softplus(A[0]),
    "bounded": lambda A, b: BoundedSigmoid(A, b, -5.0),
    "log sigmoid": lambda A, b: LogSigmoid(4.0),
    "negative exp": lambda A, b: NegExp(b),
}


def raw(family, gate=None, **sizes):
    """Seeded arguments by name with raw ``g`` and ``beta``, and a gate object with a name of :data:`GATES`, or ``None``."""
    given = arrays(family, **dict(HV=2) | sizes)
    for name in ("g", "beta"):
        if name in given:
            given[name] = 2 * torch.randn(given[name].shape)
    if gate is None:
        return given, None
    heads = given["g"].shape[2:]
    return given, GATES[gate](torch.randn(heads[0]) / 2, torch.randn(heads))


def leaves_of(given, gate):
    """Every float array of a call by name; the gate's have its own."""
    found = {name: x for name, x in given.items() if x.is_floating_point()}
    return found | ({} if gate is None else {f"gate.{name}": getattr(gate, name) for name in gate.parameters})


def truth(family, given, gate, options):
    """The oracle's arrays and options."""
    exact = as_numpy(given | leaves_of(given, gate))
    return exact, options | ({} if gate is None else dict(gate=gate.kind)) | dict(output_final_state=True)


def check(family, given, gate=None, form="chunk", **options):
    """Outputs, final state and every gradient, parameters' included, agree with the oracle; the backend itself made them."""
    tolerance = TOLERANCE[given["v"].dtype]
    leaves = {name: x.requires_grad_() for name, x in leaves_of(given, gate).items()}
    keywords = {name: given.get(name) for name in ("initial_state", "cu_seqlens")} | options
    if gate is not None:
        keywords["gate"] = gate
    positional = [x for name, x in given.items() if name not in keywords]
    function = getattr(linattn, f"{form}_{family}")
    o, final = function(*positional, **keywords, output_final_state=True, backend="triton")
    plan = linattn.explain(function, *positional, **keywords, output_final_state=True, backend="triton")
    assert "linattn applies" not in str(plan)
    exact, asked = truth(family, given, gate, options)
    wanted_o, wanted_final = oracle.forward(family, exact, asked)
    d_o, d_final = torch.randn(o.shape).to(o.dtype), torch.randn(final.shape)
    found = torch.autograd.grad([o, final], list(leaves.values()), [d_o, d_final])
    wanted = oracle.vjp(family, exact, asked, d_o.double().numpy(), d_final.double().numpy())
    errors = dict(o=distance(o, wanted_o), final=distance(final, wanted_final))
    for name, x in zip(leaves, found, strict=True):
        assert x.dtype == leaves[name].dtype
        errors[f"d{name}"] = distance(x, wanted[name])
    assert all(error < tolerance for error in errors.values()), {name: float(error) for name, error in errors.items()}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_gates(family, gate):
    check(family, *raw(family, gate), beta_map="2sigmoid")


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_simple_gla(gate):
    check("simple_gla", *raw("simple_gla", gate, T=9, cu=[0, 4, 8]))


SIZES = [
    dict(B=2, T=5),
    dict(H=2, HV=4, T=8, cu=[0, 3, 3, 7]),
    dict(T=0),
    dict(dtype=torch.bfloat16, T=20, HV=1),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_every_map_at_once(family, sizes):
    gate = None if family == "delta_rule" else "softplus"
    check(family, *raw(family, gate, **sizes), beta_map="sigmoid", qk_norm="l2")


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_one_map_alone(family):
    given, _ = raw(family)
    check(family, given | ({"g": -given["g"].abs()} if "g" in given else {}), beta_map="2sigmoid")
    given = arrays(family, HV=2)
    check(family, given | dict(k=5 * given["k"]), qk_norm="l2")


def test_a_beta_of_value_channels_and_unit_rows():
    check("delta_rule", arrays("delta_rule", HV=2, per_value=True), qk_norm="l2")
    check("kda", arrays("kda", HV=2, per_value=True), qk_norm="l2")


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_token_by_token(family):
    check(family, *raw(family, "bounded"), "recurrent", qk_norm="l2", beta_map="sigmoid")


def test_gates_that_are_strong():
    """Chunks of every strength, some of which take the levels."""
    given, _ = raw("kda", T=40, K=16)
    check("kda", given, Softplus(torch.tensor([-3.0, 4.0]), torch.randn(2)), qk_norm="l2", beta_map="sigmoid")


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule"])
def test_sequences_in_segments(family, monkeypatch):
    pretend(monkeypatch, num_sms=64)
    monkeypatch.setattr(DeltaVariant, "segment", lambda *_: 3)
    monkeypatch.setattr(DeltaVariant, "whole", lambda self, length: 0)
    gate = None if family == "delta_rule" else "log sigmoid"
    check(family, *raw(family, gate, T=300, K=2, V=2, HV=1), qk_norm="l2", beta_map="sigmoid")


def test_rows_of_zeros():
    given, gate = raw("gated_delta_rule", "softplus")
    given["q"][:, 3:5], given["k"][:, 4] = 0, 0
    check("gated_delta_rule", given, gate, qk_norm="l2", beta_map="sigmoid")


def test_many_tokens_and_heads():
    """More than one program's, and arrays that are strided."""
    given, gate = raw("gated_delta_rule", "softplus", T=33, H=3, HV=33, K=2, V=1)
    for name in ("q", "k", "g"):
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    check("gated_delta_rule", given, gate, qk_norm="l2", beta_map="sigmoid")


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_what_lies_behind_packed_sequences_counts_for_nothing(family):
    given, gate = raw(family, "bounded", cu=[0, 5, 12])
    for name in ("q", "k", "g", "beta"):
        given[name][:, 12:] = torch.nan
    leaves = {name: x.requires_grad_() for name, x in leaves_of(given, gate).items()}
    keywords = {name: given.pop(name) for name in ("initial_state", "cu_seqlens")}
    o, _ = getattr(BACKEND, f"chunk_{family}")(*given.values(), **keywords, gate=gate, beta_map="sigmoid", qk_norm="l2")
    for name, d in zip(leaves, torch.autograd.grad(o.sum(), leaves.values()), strict=True):
        assert d.isfinite().all(), name
        assert name not in given or not d[:, 12:].any(), name


def test_under_vmap():
    """Parameters that calls share, and ones of their own."""
    given, gate = raw("gated_delta_rule", "softplus", T=5, state=False)
    q, k, v, g, beta = (torch.stack([x, x.flip(1)]) for x in given.values())
    A, bias = gate.A_log, torch.stack([gate.dt_bias, -gate.dt_bias])

    def one(q, k, v, g, beta, bias, A):
        return linattn.chunk_gated_delta_rule(q, k, v, g, beta, gate=Softplus(A, bias), beta_map="sigmoid", backend="triton")[0]

    found = torch.func.vmap(torch.func.grad(lambda *x: one(*x).sum(), argnums=(3, 5)), in_dims=(0,) * 6 + (None,))(
        q, k, v, g, beta, bias, A
    )
    for i in range(2):
        alone = torch.func.grad(lambda *x: one(*x).sum(), argnums=(3, 5))(*(x[i] for x in (q, k, v, g, beta, bias)), A)
        for x, y in zip(found, alone, strict=True):
            assert torch.allclose(x[i], y, atol=1e-6)


@pytest.mark.parametrize("per_value", [False, True])
@pytest.mark.parametrize(
    "family", ["linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr"]
)
def test_decoding(family, per_value):
    """Every map at once, whatever the family; by one launch."""
    if per_value and ("delta" not in family and family != "kda"):
        pytest.skip("has no beta")
    for name in GATES if "g" in raw(family)[0] and not per_value else [None]:
        given, gate = raw(family, name, B=2, T=2, H=1, per_value=per_value)
        options = dict(qk_norm="l2") | (dict(beta_map="2sigmoid") if "beta" in given else {})
        exact, asked = truth(family, given, gate, options)
        state = given.pop("initial_state")
        options |= {} if gate is None else dict(gate=gate)
        o = getattr(linattn, f"decode_{family}")(*given.values(), state=state, **options, backend="triton")
        wanted, end = oracle.forward(family, exact, asked)
        assert max(distance(o, wanted), distance(state, end)) < TOLERANCE[torch.float32]


def test_softplus_keeps_small_decays():
    """``log(1 + e^x)`` is right where adding one would lose ``e^x``."""
    g = torch.linspace(-30, 30, 61)[None, :, None]
    ones = torch.ones(1, 61, 1, 1)
    start = torch.ones(1, 1, 1, 1)
    gate = Softplus(torch.zeros(1))
    o, _ = BACKEND.recurrent_gated_delta_rule(ones, 0 * ones, 0 * ones, g, g, initial_state=start, scale=1.0, gate=gate)
    wanted = -np.logaddexp(0.0, g.flatten().double().numpy()).cumsum()
    assert np.allclose(o.flatten().log().numpy()[:40], wanted[:40], rtol=1e-5, atol=3e-7)


def test_what_is_not_mapped_in_kernels_is_mapped_first():
    given, gate = raw("kda", "softplus", per_value=True, state=False)
    plan = linattn.explain(linattn.chunk_kda, *given.values(), gate=gate, beta_map="sigmoid", backend="triton")
    assert "linattn applies gate, beta_map" in str(plan)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("options", [dict(qk_norm="l2"), dict(gate=LogSigmoid(4.0))])
def test_maps_of_dplr_are_made_first(options, form):
    """Its kernels for Hopper would take raw projections for log decays and unit rows."""
    given, _ = raw("dplr", T=9)
    *_, state = given.values()
    positional = [x for name, x in given.items() if name != "initial_state"]
    function = getattr(linattn, f"{form}_dplr")
    plan = linattn.explain(function, *positional, initial_state=state, **options, backend="triton")
    assert f"linattn applies {next(iter(options))}" in str(plan)
    o, _ = function(*positional, initial_state=state, **options, backend="triton")
    wanted, _ = function(*positional, initial_state=state, **options, backend="torch")
    torch.testing.assert_close(o, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_nothing_as_large_as_the_keys_is_made_for_a_map(family, monkeypatch):
    """Of floats, beside what the bare call makes: numbers a token and head, forward; and a sum a chunk, backward."""

    def made(raw_call):
        given, gate = raw(family, "softplus", T=64, K=64, V=64, H=2, dtype=torch.bfloat16)
        sizes, new = [], torch.empty
        monkeypatch.setattr(torch, "empty", lambda *a, **o: sizes.append(new(*a, **o)) or sizes[-1])
        maps = dict(gate=gate, qk_norm="l2", beta_map="sigmoid") if raw_call else {}
        given = given if raw_call else arrays(family, T=64, K=64, V=64, H=2, HV=2, dtype=torch.bfloat16)
        given = {name: x.requires_grad_() for name, x in given.items()}
        state = given.pop("initial_state")
        o, _ = getattr(BACKEND, f"chunk_{family}")(*given.values(), initial_state=state, **maps)
        o.sum().backward()
        monkeypatch.setattr(torch, "empty", new)
        return sum(x.numel() >= given["q"].numel() for x in sizes)

    assert made(True) == made(False)
