"""Summaries, and gradients of entering states alone, beside what the oracle's operators give; and what is left to others."""

from __future__ import annotations

import linattn
import pytest
import torch
from linattn_backends.triton.runtime import replay
from triton_cases import BACKEND

FAMILIES = ("linear_attn", "simple_gla", "gla", "gla gv", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
T, H, HV, K, V = 40, 1, 2, 16, 8


def drawn(name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The family, and its arrays; one head's gates reset the state in the middle."""
    family, _, gv = name.partition(" ")
    x = {"q": torch.randn(2, T, H, K), "k": torch.nn.functional.normalize(torch.randn(2, T, H, K), dim=-1)}
    x["v"] = torch.randn(2, T, HV, V)
    if family not in ("linear_attn", "delta_rule"):
        scalar = family in ("simple_gla", "gated_delta_rule")
        x["g"] = -0.3 * torch.rand(2, T, HV) if scalar else -0.3 * torch.rand(2, T, HV, K)
        x["g"][0, T // 2] = -torch.inf
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        x["beta"] = torch.rand(2, T, HV)
    if family == "rwkv6":
        x["u"] = torch.randn(HV, K)
    if family == "dplr":
        unit = x["k"].repeat_interleave(HV // H, 2)
        x |= {"a": -unit, "b": 0.4 * unit}
    if gv:
        x["gv"] = -0.3 * torch.rand(2, T, HV, V)
    return family, x


@pytest.mark.parametrize("name", FAMILIES)
def test_a_summary_is_that_of_the_wider_call(name):
    family, x = drawn(name)
    operator = getattr(linattn, f"summary_{family}")
    given = {name: y for name, y in x.items() if name not in ("q", "u")}
    assert "read off" not in str(operator.explain(**given, backend="triton"))
    for found, expected in zip(operator(**given, backend="triton"), operator(**given, backend="torch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adjoint_is_the_gradient_of_the_states_before(name):
    family, x = drawn(name)
    start = torch.randn(2, HV, K, V, requires_grad=True)
    o, final = getattr(linattn, f"chunk_{family}")(**x, initial_state=start, output_final_state=True, backend="torch")
    do, dfinal = torch.randn_like(o), torch.randn_like(final)
    for given in (dfinal, None):
        outputs = ((o, final), (do, dfinal)) if given is not None else ((o,), (do,))
        (expected,) = torch.autograd.grad(outputs[0], start, outputs[1], retain_graph=True)
        found = BACKEND.adjoint(family, x, do, given, scale=None, chunk_size=None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_tokens_change_nothing():
    for name in FAMILIES:
        family, x = drawn(name)
        given = {name: y[:, :0] for name, y in x.items() if name not in ("q", "u")}
        operator = getattr(linattn, f"summary_{family}")
        for found, expected in zip(operator(**given, backend="triton"), operator(**given, backend="torch"), strict=True):
            assert found.shape == expected.shape
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cu_seqlens": torch.tensor([0, 10, T])}, "makes summaries of whole batches, not of packed sequences"),
        ({"beta": torch.rand(1, T, HV, V)}, "makes summaries of delta families with K up to 128 and one beta a token"),
        ({"v": torch.randn(1, T, HV, V, requires_grad=True)}, "makes summaries without gradients"),
    ],
)
def test_other_summaries_are_read_off_a_wider_call(changed, reason):
    _, x = drawn("kda")
    given = {name: y[:1] for name, y in x.items() if name != "q"} | changed
    said = linattn.summary_kda.explain(**given, backend="triton")
    assert "read off the state of a wider call" in str(said), reason


@pytest.mark.parametrize("name", FAMILIES)
def test_later_calls_are_replayed(name):
    family, x = drawn(name)
    operator = getattr(linattn, f"summary_{family}")
    given = {name: y for name, y in x.items() if name not in ("q", "u")}
    do = torch.randn(2, T, HV, V)

    def both():
        return *operator(**given, backend="triton"), BACKEND.adjoint(family, x, do, None, scale=None, chunk_size=None)

    replay.PROGRAMS.clear()
    first = both()
    for _ in range(replay.OFTEN):
        for found, expected in zip(both(), first, strict=True):
            assert torch.equal(found, expected)
    assert [type(program) for program in replay.PROGRAMS.values()] == [replay.Program, replay.Program]
