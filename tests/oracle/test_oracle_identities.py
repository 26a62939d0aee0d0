"""What must hold between calls: special cases, splitting, packing, empty sequences, causality."""

from itertools import pairwise

import numpy as np
import pytest
from linattn import MixedState
from linattn_backends.numpy import forward, vjp
from oracle_cases import FAMILIES, GRADIENTS, MATRIX, Case, draw, floats

CAUSAL = [case for case in GRADIENTS if case.options.get("causal", True) and not case.lengths and case.T == 7]


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def same(actual, expected):
    """Equal to rounding, every array."""
    actual, expected = floats(dict(enumerate(actual))), floats(dict(enumerate(expected)))
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group", [1, 2])
def test_ladder_of_the_gated_families(rng, group):
    arrays, options = draw(Case("linear_attn", group=group), rng)
    zero = np.zeros(arrays["v"].shape[:3])
    vector = np.zeros((*zero.shape, arrays["k"].shape[-1]))
    expected = forward("linear_attn", arrays, options)
    same(forward("simple_gla", {**arrays, "g": zero}, options), expected)
    same(forward("gla", {**arrays, "g": vector}, options), expected)
    same(forward("gla", {**arrays, "g": vector, "gv": np.zeros_like(arrays["v"])}, options), expected)
    same(forward("dplr", {**arrays, "g": vector, "a": vector, "b": vector + 1}, options), expected)

    g = -rng.random(zero.shape)
    expected = forward("simple_gla", {**arrays, "g": g}, options)
    same(forward("gla", {**arrays, "g": g[..., None] + vector}, options), expected)
    same(forward("gla", {**arrays, "g": vector, "gv": g[..., None] + np.zeros_like(arrays["v"])}, options), expected)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("beta", ["head", "channel"])
def test_ladder_of_the_delta_families(rng, group, beta):
    arrays, options = draw(Case("delta_rule", group=group, beta=beta), rng)
    zero = np.zeros(arrays["v"].shape[:3])
    same(
        forward("gated_delta_rule", {**arrays, "g": zero}, options),
        forward("delta_rule", arrays, options),
    )
    g = -rng.random(zero.shape)
    vector = np.repeat(g[..., None], arrays["k"].shape[-1], -1)
    same(
        forward("kda", {**arrays, "g": vector}, options),
        forward("gated_delta_rule", {**arrays, "g": g}, options),
    )


def test_kda_is_dplr(rng):
    arrays, options = draw(Case("kda", group=2), rng)
    keys, beta = np.repeat(arrays["k"], 2, axis=2), arrays["beta"][..., None]
    general = {**arrays, "a": -np.exp(arrays["g"]) * keys, "b": beta * keys, "v": beta * arrays["v"]}
    del general["beta"]
    same(forward("dplr", general, options), forward("kda", arrays, options))


def test_rwkv6_is_gla_a_token_late(rng):
    # With u = 1 and g = 0 the bonus is the token's own weight in gla; with u = 0 the output lags by one token.
    arrays, options = draw(Case("rwkv6", group=2), rng)
    late = forward("rwkv6", {**arrays, "u": 0 * arrays["u"]}, options)[0]
    plain = {name: array for name, array in arrays.items() if name != "u"}
    for t in range(1, 7):
        before = {name: array if name == "initial_state" else array[:, :t] for name, array in plain.items()}
        before["q"] = arrays["q"][:, 1 : t + 1]
        np.testing.assert_allclose(late[:, t], forward("gla", before, options)[0][:, -1], rtol=1e-12, atol=1e-12)
    plain["g"] = np.zeros_like(plain["g"])
    same(forward("rwkv6", {**plain, "u": 1 + 0 * arrays["u"]}, options), forward("gla", plain, options))


def test_linear_attn_is_masked_attention(rng):
    # The definition as one T×T matrix, written a second time.
    arrays, options = draw(Case("linear_attn", state=False), rng)
    weights = np.tril(np.einsum("bthk,bshk->bhts", arrays["q"], arrays["k"])) * 2**-0.5
    o = np.einsum("bhts,bshv->bthv", weights, arrays["v"])
    np.testing.assert_allclose(forward("linear_attn", arrays, options)[0], o, rtol=1e-12, atol=1e-12)
    weights /= weights.sum(-1, keepdims=True)
    o = np.einsum("bhts,bshv->bthv", weights, arrays["v"])
    np.testing.assert_allclose(forward("linear_attn", arrays, {"normalize": True})[0], o, rtol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_mixed_attn_is_its_equation(rng, causal, bias):
    arrays, options = draw(Case("mixed_attn", {"causal": causal}, state=False, bias=bias, T=11), rng)
    t, s = np.ogrid[:11, :11]
    C = options["chunk_size"]
    scores = 0.8 * np.einsum("bthk,bshk->bhts", arrays["q_quad"], arrays["k_quad"])
    if bias:
        scores = scores + arrays["bias"][:, t % C, s % C]
    near = (t // C == s // C) & ((s <= t) | (not causal))
    far = (s // C < t // C) | (not causal)
    linear = 0.3 * np.einsum("bthk,bshk->bhts", arrays["q_lin"], arrays["k_lin"])
    o = np.einsum("bhts,bshv->bthv", np.maximum(scores, 0) ** 2 * near + linear * far, arrays["v"])
    np.testing.assert_allclose(forward("mixed_attn", arrays, options)[0], o, rtol=1e-11, atol=1e-12)


def cut(arrays, tokens):
    """The call on some of the tokens."""
    fixed = ("initial_state", "bias", "u")
    return {name: a if name in fixed or a.ndim < 3 else a[:, tokens] for name, a in arrays.items()}


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_splitting_a_sequence_changes_nothing(rng, case, at):
    arrays, options = draw(case, rng)
    o, final = forward(case.op, arrays, options)
    first, middle = forward(case.op, cut(arrays, slice(0, at)), options)
    second, last = forward(case.op, {**cut(arrays, slice(at, None)), "initial_state": middle}, options)
    same((np.concatenate([first, second], 1), last), (o, final))


@pytest.mark.parametrize("case", [case for case in GRADIENTS if case.lengths], ids=str)
def test_packed_is_one_at_a_time(rng, case):
    arrays, options = draw(case, rng)
    o, final = forward(case.op, arrays, options)
    ends = arrays.pop("cu_seqlens")
    for n, (start, end) in enumerate(pairwise(ends)):
        own = cut(arrays, slice(start, end))
        if case.state:
            own["initial_state"] = sequence(arrays["initial_state"], n)
        alone, last = forward(case.op, own, options)
        np.testing.assert_array_equal(alone, o[:, start:end])
        if final is not None:
            same((last,), (sequence(final, n),))


def sequence(state, n):
    """The state of one sequence."""
    return MixedState(*(array[n : n + 1] for array in state)) if isinstance(state, tuple) else state[n : n + 1]


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("op", FAMILIES)
def test_no_tokens(rng, op, state):
    arrays, options = draw(Case(op, T=0, state=state, group=1), rng)
    o, final = forward(op, arrays, options)
    assert o.shape == arrays["v"].shape
    if state:
        same((final,), (arrays["initial_state"],))
    else:
        assert not any(array.any() for array in floats({"": final}).values())
    gradients = floats(vjp(op, arrays, options, o, final))
    assert {name: array.shape for name, array in gradients.items()} == {
        name: array.shape for name, array in floats(arrays).items()
    }
    if state and op != "mixed_attn":
        np.testing.assert_array_equal(gradients["initial_state"], final)


@pytest.mark.parametrize("options", [{"causal": False}, {"causal": False, "normalize": True}, {"normalize": True}], ids=str)
def test_no_tokens_linear_attn(rng, options):
    arrays, options = draw(Case("linear_attn", options, T=0, state=False), rng)
    o, _ = forward("linear_attn", arrays, options)
    assert o.shape == arrays["v"].shape
    assert vjp("linear_attn", arrays, options, o)["q"].shape == arrays["q"].shape


@pytest.mark.parametrize("case", [Case(op) for op in FAMILIES] + [Case("mixed_attn", bias=True)], ids=str)
def test_a_nan_goes_forward_in_time_only(rng, case):
    arrays, options = draw(case, rng)
    expected = forward(case.op, arrays, options)[0]
    for name in arrays.keys() - {"initial_state", "u", "bias"}:
        poisoned = {**arrays, name: arrays[name].copy()}
        poisoned[name][:, 4] = np.nan
        o, _ = forward(case.op, poisoned, options)
        np.testing.assert_array_equal(o[:, :4], expected[:, :4])
        assert np.isnan(o[:, 4:]).any() or name == "k_lin"


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_two_calls_are_bitwise_equal_and_leave_inputs_alone(rng, case):
    arrays, options = draw(case, rng)
    for array in floats(arrays).values():
        array.setflags(write=False)
    results = []
    for _ in range(2):
        outputs = forward(case.op, arrays, options)
        results.append(floats({**dict(enumerate(outputs)), **vjp(case.op, arrays, options, *outputs)}))
    first, second = results
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        assert not any(np.shares_memory(first[name], array) for array in floats(arrays).values())


@pytest.mark.parametrize("op", MATRIX)
def test_sequences_of_a_batch_do_not_meet(rng, op):
    arrays, options = draw(Case(op, group=2), rng)
    o, final = forward(op, arrays, options)
    for b in range(2):
        own = {name: array if name == "u" else array[b : b + 1] for name, array in arrays.items()}
        alone, last = forward(op, own, options)
        np.testing.assert_array_equal(alone[0], o[b])
        np.testing.assert_array_equal(last[0], final[b])
