"""Bounds that allow for what rounding does to few channels, small rows and sums leave no room for a fault."""

import numpy as np
import pytest
from linattn_backends.numpy import oracle
from linattn_conformance.adapters import adapter_for
from linattn_conformance.bounds import distance
from linattn_conformance.calls import drawn, truth
from linattn_conformance.cases import named
from linattn_conformance.data import outline
from linattn_conformance.judge import bfloat16
from linattn_conformance.runner import Runner

ADAPTER = adapter_for("numpy", "cpu")
ONE_KEY = "delta_rule/chunk/fp32/state/T128-K1-V4/gradient"
TWO_KEYS = "delta_rule/chunk/fp32/strong-state/T128-K2-V4/gradient"
LINEAR = "linear_attn/chunk/fp32/normalize-state/T128-K24-V40/gradient"
DEEP = ("gated_delta_rule/chunk/fp32/deep-state/T65-K24-V40/gradient", "kda/chunk/fp32/deep-state/T65-K24-V40/gradient")
LEFT = "delta_rule/parallel/fp32/beta.BTHVV-beta_map.sigmoid-blank.v-state-tiny.q-seed.98516/T129-K2-V256-B1-H3/forward"
PACKED = "gated_delta_rule/chunk/fp32/state-varlen/T130-K1-V4/gradient"


class Held:
    """The data of a case and its truth, against which results can be held."""

    def __init__(self, name):
        case = named(name)
        self.op, self.problem, self.values = case.op, outline(case), drawn(case, ADAPTER)
        self.truth = truth(case, ADAPTER)
        self.options = case.spec.resolve(self.problem.options, self.problem.sizes)

    def outputs(self, **changed):
        """The largest error of what comes of some ``changed`` inputs, as a fraction of its bound."""
        o, state = oracle.forward(self.op, {**self.values, **changed}, self.options)
        return max(distance(o, self.truth.outputs["o"]), distance(state, self.truth.outputs["final_state"]))

    def gradients(self, **changed):
        """That of the gradients."""
        fed = self.truth.cotangents
        found = oracle.vjp(self.op, {**self.values, **changed}, self.options, fed["o"], fed["final_state"])
        return max(distance(found[name], want) for name, want in self.truth.gradients.items())

    def in_parts(self, at, between):
        """The error of two calls, the second of which goes on from a state that ``between`` has had in hand."""
        tokens = {name: x for name, x in self.values.items() if "T" in self.problem.symbols[name]}
        first, second = ({name: x[:, part] for name, x in tokens.items()} for part in (slice(at), slice(at, None)))
        begun, state = oracle.forward(self.op, {**self.values, **first}, self.options)
        rest, final = oracle.forward(self.op, {**self.values, **second, "initial_state": between(state)}, self.options)
        o = np.concatenate([begun, rest], 1)
        return max(distance(o, self.truth.outputs["o"]), distance(final, self.truth.outputs["final_state"]))


@pytest.mark.parametrize("name", [ONE_KEY, TWO_KEYS, LINEAR])
def test_without_a_fault_nothing_is_off(name):
    held = Held(name)
    assert held.outputs() < 1e-6
    assert held.gradients() < 1e-6
    assert held.in_parts(64, lambda state: state) < 1e-3


@pytest.mark.parametrize("name", [ONE_KEY, TWO_KEYS, LINEAR])
def test_a_state_carried_in_bfloat16(name):
    assert Held(name).in_parts(64, bfloat16) > 2


@pytest.mark.parametrize("name", [ONE_KEY, TWO_KEYS, LINEAR])
def test_keys_with_the_bits_of_float16(name):
    held = Held(name)
    rounded = held.values["k"].astype(np.float16).astype(np.float64)
    moved = np.where(rounded == held.values["k"], rounded * (1 + 2.0**-11), rounded)  # of one channel they are all 1
    assert held.outputs(k=moved) > 2
    assert held.gradients(k=moved) > 2


@pytest.mark.parametrize("name", [ONE_KEY, TWO_KEYS, LINEAR])
def test_one_token_of_128_is_lost(name):
    held = Held(name)
    k = held.values["k"].copy()
    k[:, 63] = 0
    assert held.outputs(k=k) > 10


@pytest.mark.parametrize("name", DEEP)
def test_what_a_gate_leaves_of_a_vast_state(name):
    """As if ``e^-30`` were nothing, whatever it multiplies: of the final state there is as little room as of any other."""
    held = Held(name)
    assert held.outputs(g=np.maximum(held.values["g"], -30.0)) > 10
    state = held.truth.outputs["final_state"]
    assert distance(state.value * (1 + 2.0**-10), state) > 1
    d_state = held.truth.gradients["initial_state"]
    assert distance(d_state.value * (1 + 2.0**-10), d_state) > 1


def test_what_is_left_of_a_state_is_read_as_far_off_as_what_was_taken():
    """Where no values are written, of many tokens of two channels: a chunk's system takes from a state what it solves for."""
    runner = Runner("torch")
    with runner.watching():
        assert runner.run_one(named(LEFT)).status == "passed"
    held = Held(LEFT)
    assert held.outputs() < 1e-6
    assert held.outputs(initial_state=bfloat16(held.values["initial_state"])) > 2
    k = held.values["k"].copy()
    k[:, 3] = 0
    assert held.outputs(k=k) > 10


def test_a_gradient_of_a_sequence_has_the_bounds_of_that_sequence():
    held = Held(PACKED)
    ends = held.values["cu_seqlens"]
    first = held.truth.gradients["k"]
    assert ends[2] > ends[1]
    lost = first.value.copy()
    lost[:, ends[1] : ends[2]] *= 1 + 2.0**-10
    assert distance(lost, first) > 1


@pytest.mark.parametrize("name", [ONE_KEY, TWO_KEYS])
def test_no_row_of_a_gradient_is_left_out(name):
    held = Held(name)
    for name in ("q", "k", "v", "beta"):
        want = held.truth.gradients[name]
        rows = np.square(want.value).reshape(*want.value.shape[:2], -1).sum((0, 2))
        lost = want.value.copy()
        lost[:, np.argsort(rows)[len(rows) // 8]] = 0
        assert distance(lost, want) > 2, name


def test_values_beside_the_sums_of_keys_in_a_pool_of_states():
    """The sums are of size one, the values 2⁻⁸⁰: what is lost of these is no rounding of those."""
    case = named("simple_gla/decode/fp64/fp32.state-normalize-slots-tiny/T1-K16-V16-B5-H1/forward")
    want = truth(case, ADAPTER).outputs["state"]
    assert np.abs(want.value[..., :-1]).max() < 2.0**-70
    lost = want.value.copy()
    lost[..., :-1] *= 1 + 2.0**-16
    lost = np.where(want.noise > 0, lost, want.value)  # states of no sequence stay bit for bit
    assert distance(lost, want) > 1
    rounded = np.where(want.noise > 0, np.float32(want.value), want.value)
    assert 0 < distance(rounded, want) < 1
