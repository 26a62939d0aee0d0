"""Forward-mode and second derivatives are held against outputs and gradients."""

from types import SimpleNamespace

import numpy as np
import pytest
from linattn_backends.numpy import oracle
from linattn_conformance.adapters import adapter_for
from linattn_conformance.calls import Differs, Failure, Run
from linattn_conformance.cases import named
from linattn_conformance.checks.derivatives import compare_second, compare_tangents, direction, directions, values_of

NAME = "simple_gla/chunk/fp32/loss.o-normalize-state/T9-K4-V3/second"


def run_of(forward_mode=True, name=NAME):
    backend = SimpleNamespace(name="numpy", forward_mode=forward_mode)
    return Run(named(name), adapter_for("numpy", "cpu"), backend, None)


def results(quantities, scale=1.0):
    return {name: np.float32(scale * x.value) for name, x in quantities.items()}


def refusing():
    raise RuntimeError("no gradient of a gradient")


def test_the_direction_is_that_of_values_and_states_without_sums_of_keys():
    run = run_of()
    found = direction(run, values_of(run))
    assert not any(found[name].any() for name in ("q", "k", "g"))
    assert np.array_equal(found["v"], run.values["v"])
    assert np.array_equal(found["initial_state"][..., :-1], run.values["initial_state"][..., :-1])
    assert not found["initial_state"][..., -1].any()


@pytest.mark.parametrize(
    ("call", "known"),
    [
        ("gla/chunk/fp32/state/T9-K4-V3", [("v", "initial_state"), ("k", "initial_state")]),
        ("gla/chunk/fp32/initial/T9-K4-V3", [("v", "initial_state"), ("q",), ("k", "initial_state")]),
        ("gla/chunk/fp32/loss.o-state/T9-K4-V3", [("v", "initial_state"), ("q",), ("k", "initial_state")]),
        ("gla/chunk/fp32/plain/T9-K4-V3", [("v",), ("q",), ("k",)]),
        ("kda/chunk/fp32/plain/T9-K4-V3", [("v",), ("q",)]),
        ("ssd/chunk/fp32/plain/T9-K4-V3", [("x",), ("C",), ("B",)]),
        ("ssd/chunk/fp32/D/T9-K4-V3", [("x",)]),
        ("gla/chunk/fp32/qk_norm.l2/T9-K4-V3", [("v",)]),
        ("short_conv/direct/fp32/plain/T9-D4-W4", [("x",)]),
    ],
)
def test_the_directions_whose_truth_is_known(call, known):
    assert directions(run_of(name=f"{call}/second")) == known


@pytest.mark.parametrize("call", ["gla/chunk/fp64/initial/T9-K4-V3", "kda/chunk/fp64/plain/T9-K4-V3"])
def test_along_them_the_oracle_changes_as_its_own_gradients_say(call):
    run = run_of(name=f"{call}/second")
    for along in directions(run):
        step = direction(run, along)
        change = {
            name: (gradients_at(run, step, 1e-3)[name] - gradients_at(run, step, -1e-3)[name]) / 2e-3
            for name in run.problem.floats
            if name not in along
        }
        for name, found in change.items():
            np.testing.assert_allclose(found, run.truth.gradients[name].value, rtol=1e-8, atol=1e-10)


def gradients_at(run, step, length):
    values = {name: run.values[name] + length * step[name] for name in run.problem.floats}
    return oracle.vjp(run.case.op, values, run.problem.options, run.cotangents()["o"])


def test_outputs_are_their_own_tangents():
    run = run_of()
    compare_tangents(run, lambda: results(run.truth.outputs))
    with pytest.raises(Differs, match="the tangent of o is off by"):
        compare_tangents(run, lambda: results(run.truth.outputs, 1.001))


def test_gradients_are_their_own_derivatives():
    run = run_of()
    for forward in (True, False):
        compare_second(run, values_of(run), lambda: results(run.truth.gradients), forward)
        with pytest.raises(Differs, match=r"the derivative along v and initial_state of the gradient of .* is off by"):
            compare_second(run, values_of(run), lambda: results(run.truth.gradients, 0.0), forward)


def test_what_may_be_refused():
    run = run_of()
    compare_second(run, values_of(run), refusing, forward=False)
    with pytest.raises(RuntimeError, match="no gradient of a gradient"):
        compare_second(run, values_of(run), refusing, forward=True)
    with pytest.raises(RuntimeError, match="no gradient of a gradient"):
        compare_tangents(run, refusing)
    without = run_of(forward_mode=False)
    compare_tangents(without, refusing)
    with pytest.raises(Failure, match="declares that it has no forward-mode derivatives, and returns some"):
        compare_tangents(without, lambda: results(without.truth.outputs))
