"""Forward-mode and second derivatives are held against outputs and gradients."""

from types import SimpleNamespace

import numpy as np
import pytest
from linattn_conformance.adapters import adapter_for
from linattn_conformance.calls import Differs, Failure, Run
from linattn_conformance.cases import named
from linattn_conformance.checks.derivatives import compare_second, compare_tangents, direction

NAME = "simple_gla/chunk/fp32/loss.o-normalize-state/T9-K4-V3/second"


def run_of(forward_mode=True):
    backend = SimpleNamespace(name="numpy", forward_mode=forward_mode)
    return Run(named(NAME), adapter_for("numpy", "cpu"), backend, None)


def results(quantities, scale=1.0):
    return {name: np.float32(scale * x.value) for name, x in quantities.items()}


def refusing():
    raise RuntimeError("no gradient of a gradient")


def test_the_direction_is_that_of_values_and_states_without_sums_of_keys():
    run = run_of()
    found = direction(run)
    assert not any(found[name].any() for name in ("q", "k", "g"))
    assert np.array_equal(found["v"], run.values["v"])
    assert np.array_equal(found["initial_state"][..., :-1], run.values["initial_state"][..., :-1])
    assert not found["initial_state"][..., -1].any()


def test_outputs_are_their_own_tangents():
    run = run_of()
    compare_tangents(run, lambda: results(run.truth.outputs))
    with pytest.raises(Differs, match="the tangent of o is off by"):
        compare_tangents(run, lambda: results(run.truth.outputs, 1.001))


def test_gradients_are_their_own_derivatives():
    run = run_of()
    for forward in (True, False):
        compare_second(run, lambda: results(run.truth.gradients), forward)
        with pytest.raises(Differs, match=r"the derivative of the gradient of .* is off by"):
            compare_second(run, lambda: results(run.truth.gradients, 0.0), forward)


def test_what_may_be_refused():
    run = run_of()
    compare_second(run, refusing, forward=False)
    with pytest.raises(RuntimeError, match="no gradient of a gradient"):
        compare_second(run, refusing, forward=True)
    with pytest.raises(RuntimeError, match="no gradient of a gradient"):
        compare_tangents(run, refusing)
    without = run_of(forward_mode=False)
    compare_tangents(without, refusing)
    with pytest.raises(Failure, match="declares that it has no forward-mode derivatives, and returns some"):
        compare_tangents(without, lambda: results(without.truth.outputs))
