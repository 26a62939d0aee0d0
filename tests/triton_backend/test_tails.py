"""Tokens behind the last packed sequence: zeros in outputs and gradients, and nobody else's numbers are touched."""

from __future__ import annotations

from collections.abc import Iterator

import linattn
import pytest
import torch
from linattn.plugin import MixedState
from triton_cases import BACKEND, arrays, call, check, fill_with_least, pretend

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
OFFSETS, END, T = [0, 5, 5, 33], 33, 52


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """What is allocated holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def compare(given, run, T=T, END=END):
    """``run`` on arrays of ``T`` tokens, that go on behind the last sequence, and on arrays that end with it, at ``END``."""
    results = []
    for length in (T, END):
        some = {name: x[:, :length] if x.dim() > 2 and x.shape[1] == T else x for name, x in given.items()}
        leaves = {name: x.clone().requires_grad_() for name, x in some.items() if x.is_floating_point()}
        o, *states = run(some | leaves)
        torch.manual_seed(1)
        weights = torch.randn(given["v"].shape)[:, :length]
        loss = (o.float() * weights).sum() + sum(x.sum() for x in states if x is not None and x.is_floating_point())
        results.append({"o": o, **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))})
        results[-1] |= {f"state {i}": x for i, x in enumerate(states) if x is not None}
    for name, x in results[0].items():
        longer = x.dim() > 2 and x.shape[1] == T
        whole = results[1][name]
        assert torch.equal(x[:, :END] if longer else x, whole), name
        assert not longer or not x[:, END:].any(), name


def check_chunk(family, dtype):
    given = arrays(family, T=T, HV=2, K=10, V=12, dtype=dtype, cu=OFFSETS)
    compare(given, lambda x: call(family, x, output_final_state=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunk(family):
    check_chunk(family, torch.float32)


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla"])
def test_chunk_with_the_state_in_registers(family):
    check_chunk(family, torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_recurrent(family):
    given = arrays(family, T=12, HV=2, cu=[0, 2, 2, 9])
    compare(given, lambda x: call(family, x, "recurrent", output_final_state=True), 12, 9)


@pytest.mark.parametrize("options", [dict(dtype=torch.float16), dict(gv="plain")], ids=["float16", "gv"])
def test_through_memory(options):
    compare(arrays("gla", T=T, K=16, V=18, cu=OFFSETS, **options), lambda x: call("gla", x, output_final_state=True))


def test_fixed_decay():
    given = arrays("simple_gla", T=T, HV=2, shape=(2,), cu=OFFSETS)
    compare(given, lambda x: call("simple_gla", x, output_final_state=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_not_causal(normalize):
    given = {name: x.abs() if name in "qk" else x for name, x in arrays("linear_attn", T=T, state=False, cu=OFFSETS).items()}
    compare(given, lambda x: call("linear_attn", x, causal=False, normalize=normalize)[:1])


def test_mixed():
    torch.manual_seed(0)
    names = ("q_quad", "k_quad", "q_lin", "k_lin", "v")
    given = {name: torch.randn(1, T, 1, 8) for name in names} | dict(bias=torch.randn(1, 16, 16))
    state = MixedState(torch.randn(3, 1, 8, 8), *torch.randn(3, 3, 16, 1, 8), torch.tensor([3, 0, 15], dtype=torch.int32))

    def run(x):
        options = dict(bias=x["bias"], initial_state=state, cu_seqlens=torch.tensor(OFFSETS), chunk_size=16)
        o, final = BACKEND.chunk_mixed_attn(*map(x.get, names), **options, output_final_state=True)
        return o, *final

    compare(given, run)


def test_ssd():
    torch.manual_seed(0)
    x, z = torch.randn(2, 1, T, 2, 8)
    given = dict(v=x, dt=torch.randn(1, T, 2), A=-torch.rand(2), B=torch.randn(1, T, 1, 8), C=torch.randn(1, T, 1, 8))
    more = dict(D=torch.randn(2), z=z, dt_bias=torch.randn(2))

    def run(x):
        options = dict(cu_seqlens=torch.tensor(OFFSETS), output_final_state=True, backend="triton")
        return linattn.ssd(*(x[name] for name in given), **{name: x[name] for name in more}, **options)

    compare(given | more, run)


def test_no_sequence_at_all():
    o, _ = call("gla", arrays("gla", T=7, state=False, cu=[0, 0]))
    assert not o.any()


@pytest.mark.parametrize("family", ["simple_gla", "gla", "gated_delta_rule"])
def test_what_nobody_wrote_may_overflow(family, monkeypatch):
    """Sums over a group's value heads take rows behind the last sequence, too, which become zeros."""
    empty = torch.empty

    def largest(*size, **options):
        x = empty(*size, **options)
        return x.fill_(torch.finfo(x.dtype).max) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", largest)
    pretend(monkeypatch, num_sms=1000)  # so few programs that no heads take turns
    check(family, arrays(family, T=T, HV=2, cu=OFFSETS))


@pytest.mark.parametrize("family", ["gla", "rwkv6", "kda", "dplr"])
def test_chunks_that_no_sequence_has_are_not_looked_for(family, monkeypatch):
    """There is room for them, and what stands where others have their marks says of each that its gates are strong."""
    fill_with_least(monkeypatch)
    check(family, arrays(family, T=T, HV=2, cu=[0, 5, *[5] * 20, 33], kind="mixed"))
