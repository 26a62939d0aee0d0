"""Every family, flag and kind of gate, forward and backward, against the float64 oracle."""

from __future__ import annotations

import math

import linattn
import pytest
import torch
from linattn_backends.triton.diagonal import backward
from linattn_backends.triton.diagonal.config import DiagonalVariant
from triton_cases import arrays, call, check, near_the_end, pretend, vast

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6")
PARTS = [0, 3, 3, 88, 90]
"""Offsets of packed sequences, of which one is long enough to be split."""
KINDS = ("zero", "weak", "strong", "-1e4", "-inf", "mixed")
"""Of gates; plain ones are those of the other tests."""
PATHS = ("weak", "strong", "-inf", "mixed")
"""Of gates: one for each way that a chunk can take, and all of them at once."""


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, form):
    check(family, arrays(family, T=37, HV=2, K=20, V=18), form, chunk_size=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_gates(family, kind):
    check(family, arrays(family, T=37, kind=kind), chunk_size=16)


@pytest.mark.parametrize("kind", ["weak", "mixed"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_gates_in_the_default_chunk(family, kind):
    check(family, arrays(family, T=70, kind=kind))


@pytest.mark.parametrize(("family", "tiny"), [("simple_gla", {"v": 2.0**-80}), ("gla", {"k": 2.0**-52})])
def test_tiny_numbers_keep_their_bits_beside_strong_gates(family, tiny):
    """Gates of a chunk that add up to ``2^-160``: half of that, either way, would leave nothing of such numbers."""
    torch.manual_seed(3)
    given = {name: torch.randn(1, 64, 1, 20).bfloat16() * tiny.get(name, 1.0) for name in "qkv"}
    g = torch.full((1, 64, 1) if family == "simple_gla" else (1, 64, 1, 20), -160 / 64 * math.log(2))
    chunk = getattr(linattn, f"chunk_{family}")
    found = chunk(**given, g=g, chunk_size=64, backend="triton")[0].double()
    wanted = chunk(**{name: x.double() for name, x in given.items()}, g=g.double(), backend="torch")[0]
    rows = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert rows.max() < 0.02


@pytest.mark.parametrize("kind", ["-inf", "mixed"])
def test_gates_token_by_token(kind):
    check("gla", arrays("gla", T=9, kind=kind), "recurrent")


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed(family, form):
    cu = [0, 0, 5, 5, 25, 30]
    check(family, arrays(family, T=30, H=1, HV=2, cu=cu), form, chunk_size=16)


def test_packed_as_int32_without_a_state():
    given = arrays("gla", T=30, cu=[0, 17, 30], state=False)
    given["cu_seqlens"] = given["cu_seqlens"].int()
    check("gla", given, chunk_size=16)


@pytest.fixture
def split(monkeypatch):
    """Sequences are cut into segments of two chunks, that are walked at once, as where heads are few."""
    monkeypatch.setattr(DiagonalVariant, "segment", lambda *sizes: 2)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("family", FAMILIES[:3])
@pytest.mark.parametrize("cu", [None, PARTS])
def test_split_sequences(family, cu):
    check(family, arrays(family, T=90, cu=cu), chunk_size=16)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 3), (17, 33), (40, 70)])
@pytest.mark.parametrize("family", ["simple_gla", "gla"])
def test_widths(family, K, V):
    check(family, arrays(family, T=19, K=K, V=V, kind="mixed"), chunk_size=16)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_a_gate_shared_by_value_heads(form):
    check("gla", arrays("gla", T=19, H=2, HV=4, shape=(1, 19, 2, 5)), form, chunk_size=16)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("kind", ["weak", "plain", "-inf"])
def test_a_fixed_decay(form, kind):
    check("simple_gla", arrays("simple_gla", B=2, T=19, HV=2, shape=(2,), kind=kind), form, chunk_size=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits(family, dtype):
    check(family, arrays(family, T=37, dtype=dtype, K=16, V=16), chunk_size=16)


def test_a_sixteen_bit_gate():
    given = arrays("gla", T=37, dtype=torch.float16, kind="weak")
    given["g"] = given["g"].half()
    check("gla", given, chunk_size=16)


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_one_pass(family):
    """Sixteen-bit operands: the state never leaves registers."""
    check(family, arrays(family, B=2, T=130, dtype=torch.float16, K=16, V=16, kind="weak"))
    check(family, arrays(family, T=60, HV=2, dtype=torch.float16, cu=[0, 0, 7, 60]))


@pytest.mark.parametrize("scale", [0.0, -1e-40])
@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_one_pass_without_a_scale_to_divide_by(family, scale):
    check(family, arrays(family, T=60, K=20, V=70, dtype=torch.float16, kind="weak"), scale=scale)


def beyond_float16(family, **sizes):
    """float16 arrays whose scores, ``scale q·k``, reach a million, where outputs and gradients have room."""
    given = arrays(family, T=70, K=16, V=16, dtype=torch.float16, kind="weak", state=False, **sizes)
    return given | {name: x * dict(q=1000, k=1000, v=1e-3, u=1e-3).get(name, 1) for name, x in given.items()}


@pytest.mark.parametrize("gv", [None, "weak"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_beyond_the_range_of_float16(family, gv):
    if gv is None or family == "gla":
        check(family, beyond_float16(family, gv=gv), d_o=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_beyond_the_range_of_float16_with_states_in_memory(family, monkeypatch):
    pretend(monkeypatch, large_smem=False)
    check(family, beyond_float16(family), d_o=1e-3)


@pytest.mark.parametrize(("v", "d_o"), [(4000.0, 1.0), (1.0, 4000.0)])
def test_one_pass_near_the_end_of_the_range_of_float16(v, d_o):
    """Where chunks decay by ``2^9``, large values and gradients stay finite."""
    given = arrays("simple_gla", T=130, K=16, V=16, dtype=torch.float16, state=False)
    given |= dict(q=given["q"] / 100, k=given["k"] / 100, v=v * given["v"], g=torch.full((1, 130, 1), -0.1))
    check("simple_gla", given, d_o=d_o)


@pytest.mark.parametrize("decay", [9, 36])
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("family", ["gla", "rwkv6"])
def test_a_vector_gate_near_the_end_of_the_range_of_float16(family, name, decay):
    check(family, near_the_end(family, name, decay))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_value_gate_near_the_end_of_the_range_of_float16(name):
    check("gla", near_the_end("gla", name, 36, gv="plain"))


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("family", "gv"), [("gla", None), ("gla", "weak"), ("rwkv6", None)])
def test_vast_values_beside_a_decay_that_is_made_of_two_factors(family, gv, others):
    check(family, vast(family, 67, others, gv=gv), chunk_size=32)


@pytest.mark.parametrize("kind", PATHS)
def test_one_pass_under_any_gate(kind):
    check("simple_gla", arrays("simple_gla", T=70, dtype=torch.bfloat16, kind=kind))


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_one_pass_over_split_sequences(family):
    check(family, arrays(family, T=90, cu=PARTS, dtype=torch.float16, kind="weak"), chunk_size=16)


@pytest.mark.parametrize("kind", PATHS)
def test_a_vector_gate_in_sixteen_bits(kind):
    check("gla", arrays("gla", T=70, dtype=torch.bfloat16, kind=kind))


def test_a_bonus_in_sixteen_bits():
    check("rwkv6", arrays("rwkv6", T=70, dtype=torch.float16, kind="mixed"))


def test_more_channels_than_fit_into_registers():
    check("gla", arrays("gla", T=20, K=136, V=9, dtype=torch.float16, kind="mixed"))


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla"])
def test_little_shared_memory(family, monkeypatch):
    """States go through memory where a walk would not fit."""
    pretend(monkeypatch, large_smem=False)
    check(family, arrays(family, T=40, dtype=torch.float16, kind="weak"), chunk_size=16)


def test_scale():
    check("gla", arrays("gla"), scale=0.3)


@pytest.mark.parametrize(("kind", "form"), [*((kind, "chunk") for kind in PATHS), ("mixed", "recurrent")])
def test_a_value_gate(kind, form):
    check("gla", arrays("gla", T=21, kind="mixed", gv=kind), form, chunk_size=16)


def test_a_value_gate_in_every_setting():
    check("gla", arrays("gla", T=40, HV=2, K=20, V=18, kind="mixed", gv="mixed"))
    check("gla", arrays("gla", T=30, HV=2, gv="plain", cu=[0, 0, 5, 5, 25, 30]), chunk_size=16)
    check("gla", arrays("gla", T=19, H=2, HV=4, shape=(1, 19, 2, 5), gv="plain"), chunk_size=16)
    check("gla", arrays("gla", T=37, K=16, V=16, dtype=torch.float16, gv="weak"), chunk_size=16)
    check("gla", arrays("gla", T=19, K=40, V=70, gv="mixed", state=False), chunk_size=16)


@pytest.mark.usefixtures("split")
def test_a_value_gate_in_split_sequences():
    check("gla", arrays("gla", T=90, gv="plain"), chunk_size=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "cu"), [(0, None), (0, [0, 0, 0]), (20, [0, 0, 20])])
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_no_tokens(family, T, cu, dtype):
    """Their gradient is the final state's; nothing is read before or past the arrays."""
    check(family, arrays(family, T=T, H=1, HV=1, dtype=dtype, K=16, V=16, cu=cu))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_tokens(family, form):
    given = arrays(family, T=0)
    for name in given:
        given[name].requires_grad_()
    o, final = call(family, given, form, output_final_state=True)
    assert o.shape == (1, 0, 1, 7)
    assert torch.equal(final, given["initial_state"])
    (found,) = torch.autograd.grad(final.sum(), [given["initial_state"]])
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_strided_inputs(form):
    given = arrays("gla", B=2, T=19, H=2, HV=2, K=5, V=7)
    for name in ("q", "k", "v", "g"):
        wide = torch.stack((given[name], given[name] + 1), -1 if name == "k" else 2)
        given[name] = (wide[..., 0] if name == "k" else wide[:, :, 0]).detach()
        assert not given[name].is_contiguous()
    given["initial_state"] = given["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    check("gla", given, form, chunk_size=16)


def test_gradient_of_the_final_state_alone():
    given = arrays("gla", T=19)
    for x in given.values():
        x.requires_grad_()
    _, final = call("gla", given, output_final_state=True)
    found = torch.autograd.grad(final.sum(), [given["k"], given["g"], given["initial_state"]])
    assert all(torch.isfinite(x).all() for x in found)
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize("family", ["simple_gla", "gla"])
def test_equal_calls_give_equal_bits(family):
    results = []
    for _ in range(2):
        given = arrays(family, T=37, HV=2)
        for x in given.values():
            x.requires_grad_()
        o, final = call(family, given, output_final_state=True)
        results.append([o, final, *torch.autograd.grad(o.sum() + final.sum(), list(given.values()))])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("dtype", "num_sms", "turns"),
    [
        (torch.float32, 1, [2]),
        (torch.float32, 1000, [1]),
        *((x, n, [1] if n > 1 else []) for x in (torch.bfloat16, torch.float16) for n in (1, 1000)),
    ],
)
def test_gradients_of_a_group_are_summed_while_they_are_made(dtype, num_sms, turns, monkeypatch):
    """Value heads take turns, as many as leave the sums no larger than the values; unless too few programs would run.

    Of 16-bit operands a program has several, and if it has all, there are no sums but the gradients.
    """
    pretend(monkeypatch, num_sms=num_sms)
    given, shapes, empty = arrays("simple_gla", B=2, T=20, H=1, HV=4, K=32, V=16, dtype=dtype), [], backward.empty_sums
    monkeypatch.setattr(backward, "empty_sums", lambda call, n, room: shapes.append(n) or empty(call, n, room))
    check("simple_gla", given, chunk_size=16)
    assert shapes == turns
