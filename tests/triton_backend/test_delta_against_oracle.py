"""The chunk form of the delta families and ``dplr``, forward and backward, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from linattn_backends.triton.delta import gradients_launch, scores_launch
from linattn_backends.triton.delta.call import ChunkedCall, DeltaCall
from linattn_backends.triton.delta.config import DeltaVariant, forward_variant
from linattn_backends.triton.delta.gradients_launch import turns_of
from linattn_backends.triton.host.variant import Facts
from linattn_backends.triton.runtime.device import Properties
from linattn_conformance.cases import named
from linattn_conformance.runner import Runner
from triton_cases import arrays, call, check, near_the_end, pretend, vast

FAMILIES = ("delta_rule", "gated_delta_rule", "kda", "dplr")
GATED = FAMILIES[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    check(family, arrays(family, T=37, HV=2, K=20, V=18), chunk_size=16)


@pytest.mark.parametrize("family", ["gated_delta_rule", "dplr"])
def test_gradients_of_the_recurrent_form(family):
    check(family, arrays(family, T=9, HV=2), "recurrent")


@pytest.mark.parametrize("family", FAMILIES)
def test_value_heads_that_take_turns(family):
    """Weak and strong chunks of a group add to one sum of ``dq, dk``; with few programs, a group has two sums."""
    check(family, arrays(family, T=24, HV=3, kind="mixed", cu=[0, 0, 5, 24]), chunk_size=16)
    check(family, arrays(family, T=20, HV=4, kind="mixed"), chunk_size=16)


@pytest.mark.parametrize(("num_sms", "turns"), [(1, 12), (16, 12), (17, 6), (32, 6), (100, 1), (200, 1)])
def test_as_many_turns_as_leave_enough_programs(num_sms, turns, monkeypatch):
    pretend(monkeypatch, num_sms=num_sms)
    given = arrays("kda", T=16 * 16, HV=24, H=2, K=16, V=16, dtype=torch.bfloat16, state=False)
    call = DeltaCall.of(*given.values(), None, None, None, None, 1.0, 16)
    assert turns_of(ChunkedCall.cut(call, call.forward_variant(1)), 2) == turns


@pytest.mark.parametrize("kind", ["zero", "strong", "-1e4", "-inf", "mixed"])
@pytest.mark.parametrize("family", GATED)
def test_gates(family, kind):
    check(family, arrays(family, T=21, kind=kind), chunk_size=16)


@pytest.mark.parametrize("kind", ["weak", "mixed"])
@pytest.mark.parametrize("family", GATED)
def test_gates_in_the_default_chunk(family, kind):
    check(family, arrays(family, T=37, kind=kind))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_beta_per_value_channel(family):
    check(family, arrays(family, T=21, per_value=True), chunk_size=16)


@pytest.mark.parametrize("per_value", [False, True])
def test_nothing_is_written_where_beta_is_zero(per_value):
    given = arrays("gated_delta_rule", T=21, per_value=per_value)
    given["beta"][:, 3:9] = 0
    check("gated_delta_rule", given, chunk_size=16)


def test_keys_that_are_not_normalised():
    given = arrays("gated_delta_rule", T=37, kind="strong")
    given["k"] *= 3
    check("gated_delta_rule", given)


@pytest.mark.parametrize("length", [1000, 10000])
@pytest.mark.parametrize("family", FAMILIES[:3])
def test_long_keys_in_float16(family, length):
    """Scores are beyond its range; errors, times ``beta``, below it."""
    given = arrays(family, T=40, K=16, V=16, dtype=torch.float16, kind="weak", state=False)
    scaled = dict(q=1000 * given["q"], k=length * given["k"], beta=given["beta"] / length**2)
    check(family, given | scaled, d_o=length / 100)


def test_scores_beyond_the_range_of_float16():
    given = arrays("dplr", T=40, K=16, V=16, dtype=torch.float16, kind="weak", state=False)
    check("dplr", given | dict(q=1000 * given["q"], k=1000 * given["k"], v=given["v"] / 1000), d_o=1e-3)


@pytest.mark.parametrize("decay", [18, 36])
@pytest.mark.parametrize("family", ["kda", "dplr"])
def test_queries_near_the_end_of_the_range_of_float16(family, decay):
    given = near_the_end(family, "q", decay)
    check(family, given | dict(k=4000 * given["k"]))


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("family", ["kda", "dplr"])
def test_vast_values_beside_a_decay_that_is_made_of_two_factors(family, others):
    check(family, vast(family, 90, others), chunk_size=32)


@pytest.mark.parametrize("family", ["kda", "dplr"])
def test_large_queries_and_gradients_beside_a_decay_that_is_made_of_two_factors(family):
    """Each is held by float32 beside half of the decay, and not both."""
    given = arrays(family, T=32, K=16, V=16, dtype=torch.bfloat16, kind="weak", state=False)
    given["g"][:, 31] = -108
    check(family, given | dict(q=2.0**32 * given["q"]), chunk_size=32, d_o=2.0**17)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed(family):
    check(family, arrays(family, T=40, H=1, HV=2, cu=[0, 0, 5, 5, 22, 40]), chunk_size=16)


@pytest.mark.parametrize(
    ("family", "cu", "whole"),
    [
        ("gated_delta_rule", None, 0),
        *((family, [0, 3, 3, 88, 90], whole) for family in ("kda", "delta_rule") for whole in (0, 84, 85)),
    ],
)
def test_split_sequences(family, cu, whole, monkeypatch):
    """Few heads: sequences are cut into segments, here of two chunks, that are walked at once; packed ones if one is long."""
    monkeypatch.setattr(DeltaVariant, "segment", lambda *sizes: 2)
    monkeypatch.setattr(DeltaVariant, "whole", lambda self, length: whole)
    check(family, arrays(family, T=90, cu=cu, kind="weak"), chunk_size=16)


def plain_variant(K):
    """The variant of plain kernels on a device of 132 multiprocessors."""
    facts = Facts("gated_delta_rule", torch.bfloat16, K, 128, 64)
    return forward_variant(facts, Properties(132, True, "the device is another"))


@pytest.mark.parametrize(("T", "heads", "length"), [(32768, 4, 16), (4096, 4, 8), (2048, 4, 0), (4096, 64, 0), (0, 1, 0)])
def test_sequences_are_split_if_that_fills_the_device(T, heads, length):
    assert plain_variant(K=128).segment(T, 2 * heads) == length


def test_packed_sequences_are_split_if_one_may_be_long():
    """Of two with 32,768 tokens together the host knows no more; one with most of them is worth it, two equal ones are not."""
    variant = plain_variant(K=128)
    assert variant.segment(16384, 112) == 0
    assert variant.segment(16384, 112, 32768) == 109
    assert variant.whole(109) == 21888
    assert variant.segment(12288, 112, 24576) == 82
    assert variant.segment(4096, 112, 8192) == 0  # which gains too little
    assert variant.segment(1024, 64, 8192) == 0  # which takes no time


@pytest.mark.parametrize("cu", [None, [0, 3, 3, 60]])
def test_split_sequences_of_wide_keys(cu, monkeypatch):
    """What a segment does to the state, ``[K, K]``, is multiplied part by part, forwards and backwards."""
    monkeypatch.setattr(DeltaVariant, "segment", lambda *sizes: 1)
    monkeypatch.setattr(DeltaVariant, "whole", lambda self, length: 0)
    check("gated_delta_rule", arrays("gated_delta_rule", T=60, H=1, HV=1, K=130, V=18, cu=cu, kind="weak"), chunk_size=16)


@pytest.mark.parametrize("K", [65, 192])
@pytest.mark.parametrize("family", ["kda", "dplr"])
def test_a_vector_gate_reaches_every_part_of_the_state(family, K):
    check(family, arrays(family, T=19, H=1, HV=1, K=K, V=18, cu=[0, 5, 5, 19], kind="weak"))


def test_sequences_of_wide_keys_are_split_too():
    assert plain_variant(K=256).segment(32768, 8) > 0


@pytest.mark.parametrize(
    ("dtype", "K", "how"),
    [
        (torch.float32, 15, "ieee"), (torch.float32, 16, "tf32x3"),
        (torch.float16, 15, "ieee"), (torch.float16, 16, "nearest"), (torch.bfloat16, 1, "tf32"),
    ],
)  # fmt: skip
def test_the_rounding_of_one_of_few_terms_does_not_show(dtype, K, how):
    """The tensor cores' 11 bits are fewer than what float16 is held to where nothing averages them."""
    facts = Facts("gated_delta_rule", dtype, K, 8, 32)
    assert forward_variant(facts, Properties(132, True, "the device is another")).precision == how


@pytest.mark.parametrize(("K", "V"), [(1, 3), (40, 70)])
@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_widths(family, K, V):
    check(family, arrays(family, T=19, K=K, V=V, kind="mixed"), chunk_size=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits(family, dtype):
    check(family, arrays(family, T=37, dtype=dtype, K=16, V=16), chunk_size=16)


@pytest.mark.parametrize("seed", [3, 14])
def test_decayed_rows_of_float16_keep_their_digits(seed):
    """Rows that decay are below float16's normal numbers while the state that they read is all there is."""
    (result,) = Runner("triton").run([named(f"dplr/chunk/fp16/blank.k-small-state-seed.{seed}/T64-K1-V8-C16-B1-H1/forward")])
    assert result.status == "passed", result.message
    assert result.error < 0.2


def test_in_sixteen_bits_gates_through_both_paths():
    check("kda", arrays("kda", T=70, dtype=torch.bfloat16, kind="mixed"))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tokens(family):
    given = arrays(family, T=0)
    for name in given:
        given[name].requires_grad_()
    o, final = call(family, given, output_final_state=True)
    assert o.shape == (1, 0, 1, 7)
    assert torch.equal(final, given["initial_state"])
    (found,) = torch.autograd.grad(final.sum(), [given["initial_state"]])
    assert torch.equal(found, torch.ones_like(found))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_of_no_rows_kernels_have_lengths_all_the_same(family, monkeypatch):
    """An interpreter does not mind if they have none; a compiler does."""
    given = arrays(family, T=0, cu=[0, 0, 0])
    there = []

    def look(kernel, count, where, *args, **config):
        there.extend(args[kernel.arg_names.index(name)] is not None for name in ("uq", "uk") if config.get("UNIT"))

    for module in (scores_launch, gradients_launch):
        monkeypatch.setattr(module, "launch", look)
    for name in given.keys() - {"cu_seqlens"}:
        given[name].requires_grad_()
    _, final = call(family, given, output_final_state=True, qk_norm="l2")
    final.sum().backward()
    assert there
    assert all(there)


@pytest.mark.parametrize("family", ["gated_delta_rule", "dplr"])
def test_strided_inputs(family):
    given = arrays(family, B=2, T=19, H=2, HV=2, K=5, V=7)
    for name in given:
        if given[name].dim() == 4 and name != "initial_state":
            wide = torch.stack((given[name], given[name] + 1), -1 if name == "k" else 2)
            given[name] = (wide[..., 0] if name == "k" else wide[:, :, 0]).detach()
            assert not given[name].is_contiguous()
    given["initial_state"] = given["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    check(family, given, chunk_size=16)


def test_without_a_state_and_with_a_scale():
    given = arrays("kda", T=19, state=False)
    check("kda", given, chunk_size=16, scale=0.3)


def test_gradient_of_the_final_state_alone():
    given = arrays("kda", T=19)
    for x in given.values():
        x.requires_grad_()
    _, final = call("kda", given, output_final_state=True)
    found = torch.autograd.grad(final.sum(), [given["k"], given["g"], given["initial_state"]])
    assert all(torch.isfinite(x).all() for x in found)
    assert found[0].abs().sum() > 0


@pytest.mark.parametrize("family", ["gated_delta_rule", "dplr"])
def test_equal_calls_give_equal_bits(family):
    results = []
    for _ in range(2):
        given = arrays(family, T=19, HV=2)
        for x in given.values():
            x.requires_grad_()
        o, final = call(family, given, output_final_state=True)
        results.append([o, final, *torch.autograd.grad(o.sum() + final.sum(), list(given.values()))])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
