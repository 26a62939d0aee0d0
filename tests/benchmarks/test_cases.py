"""Shapes, and the arrays that are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from linattn.errors import OptionError
from linattn_benchmarks.cases import Case, cases, draw, parse_shape


def test_shape_lists():
    found = parse_shape("B=2,T=16/32,H=4,HV=8,K=8,V=4")
    assert [sizes["T"] for sizes in found] == [16, 32]
    assert found[0] == {"B": 2, "T": 16, "H": 4, "HV": 8, "K": 8, "V": 4, "L": 8, "C": 256}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("T", "expected SYMBOL=SIZE, got 'T'"),
        ("T=0", "T must be a positive whole number, got '0'"),
        ("T=1k", "T must be a positive whole number, got '1k'"),
        ("N=2", "unknown symbol 'N': known are B, T, H, HV, K, V, L, C"),
    ],
)
def test_wrong_shapes(text, said):
    with pytest.raises(OptionError, match=said):
        parse_shape(text)


@pytest.mark.parametrize("name", ["chunk_ssd", "decode_ssd", "short_conv"])
def test_operators_without_queries_keys_and_values_are_refused(name):
    known = "delta_rule, dplr, gated_delta_rule, gla, kda, linear_attn, mixed_attn, rwkv6, simple_gla"
    with pytest.raises(OptionError, match=f"^{name} is not timed: expected an operator of {known}$"):
        cases([name], ["fwd"], parse_shape("T=16"))


def test_a_decoding_step_is_one_whatever_form_was_named():
    found = cases(["chunk_gla", "recurrent_gla"], ["decode"], parse_shape("T=16/32"))
    assert [(one.operator, one.size["T"]) for one in found] == [("decode_gla", 1)]
    found = cases(["decode_gla"], ["fwd", "fwdbwd"], parse_shape("T=4"))
    assert [(one.operator, one.what, one.size["T"]) for one in found] == [("decode_gla", "decode", 4)]


def test_json_round_trip(case):
    one = case("chunk_kda", "fwdbwd", gates="strong")
    assert Case.from_json(one.as_json()) == one


@pytest.mark.parametrize("operator", ["chunk_gla", "chunk_gated_delta_rule", "chunk_rwkv6", "chunk_dplr"])
def test_gates_are_never_zero_and_ordered(case, operator):
    weak, model, strong = (draw(case(operator, gates=gates)).arrays["g"] for gates in ("weak", "model", "strong"))
    assert (weak < 0).all()
    assert -0.1 < np.median(weak) < 0
    assert np.median(strong) < 4 * np.median(model) < 0


def test_arrays_are_fresh_by_seed_and_keys_of_the_delta_rule_have_unit_length(case):
    first, again = (draw(case("chunk_delta_rule")).arrays for _ in range(2))
    np.testing.assert_array_equal(first["k"], again["k"])
    np.testing.assert_allclose(np.linalg.norm(first["k"], axis=-1), 1, rtol=1e-5)
    other = draw(Case("chunk_delta_rule", "fwd", case("chunk_delta_rule").sizes, seed=8)).arrays
    assert not np.array_equal(first["k"], other["k"])


def test_state_of_mixed_attention_is_in_the_middle_of_a_chunk(case):
    kv, k_quad, k_lin, v, length = draw(case("chunk_mixed_attn", "decode", C=16)).state
    assert length.tolist() == [8]
    assert k_quad[:, :8].all()
    assert not k_quad[:, 8:].any()
    assert kv.shape == (1, 2, 8, 6)
    assert (k_lin.shape, v.shape) == ((1, 16, 2, 8), (1, 16, 2, 6))
