"""Every analytic gradient against central finite differences, and where gates vanish."""

import numpy as np
import pytest
from linattn_backends.numpy import forward, vjp
from oracle_cases import GRADIENTS, MATRIX, SCALAR_GATE, VECTOR_GATE, Case, draw, floats, replaced

STEP = 1e-5


def pair(outputs, cotangents):
    """``⟨cotangent, output⟩`` over all float outputs."""
    outputs, cotangents = (
        floats(dict(zip("oS", outputs, strict=True))),
        floats(dict(zip("oS", cotangents, strict=True))),
    )
    return sum(np.vdot(outputs[name], cotangents[name]) for name in outputs)


def cotangents_of(outputs, rng):
    """Random gradients of ``(o, final_state)``."""

    def like(value):
        if isinstance(value, tuple):
            return type(value)(*map(like, value))
        return None if value is None else rng.standard_normal(value.shape)

    return tuple(map(like, outputs))


@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_vjp_is_the_derivative(case):
    rng = np.random.default_rng(hash_of(case))
    arrays, options = draw(case, rng)
    cotangents = cotangents_of(forward(case.op, arrays, options), rng)
    gradients = floats(vjp(case.op, arrays, options, *cotangents))
    assert gradients.keys() == floats(arrays).keys()
    for name, array in floats(arrays).items():
        assert gradients[name].shape == array.shape
        assert gradients[name].dtype == np.float64
        for _ in range(3):
            direction = rng.standard_normal(array.shape) * held_rows(name, arrays, array)
            up, down = (
                pair(forward(case.op, replaced(arrays, name, array + sign * STEP * direction), options), cotangents)
                for sign in (1, -1)
            )
            np.testing.assert_allclose(
                np.vdot(gradients[name], direction), (up - down) / (2 * STEP), rtol=2e-6, atol=1e-7, err_msg=name
            )


def hash_of(case):
    """A seed of its own for each case, the same in every run."""
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(str(case)))


def held_rows(name, arrays, array):
    """Mask of the entries that may be varied: rows of a mixed state from ``length`` on are zero, whatever one adds."""
    if name.partition(".")[2] in ("k_quad", "k_lin", "v"):
        return (np.arange(array.shape[1]) < arrays["initial_state"].length[:, None])[..., None, None]
    return 1.0


@pytest.mark.parametrize("case", [Case(op, group=2) for op in MATRIX] + [Case("mixed_attn")], ids=str)
def test_a_gradient_not_given_is_zero(case):
    arrays, options = draw(case, np.random.default_rng(1))
    d_o, d_state = cotangents_of(forward(case.op, arrays, options), np.random.default_rng(2))
    both, only_o, only_state = (
        floats(vjp(case.op, arrays, options, *given)) for given in ((d_o, d_state), (d_o, None), (None, d_state))
    )
    for name in both:
        np.testing.assert_allclose(both[name], only_o[name] + only_state[name], rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("depth", [-np.inf, -1e4, -745.2])
@pytest.mark.parametrize("case", [Case(op, group=2) for op in (*SCALAR_GATE, *VECTOR_GATE)], ids=str)
def test_a_gate_that_forgets_everything(case, depth):
    arrays, options = draw(case, np.random.default_rng(3))
    arrays["g"][:, 4] = depth
    outputs = forward(case.op, arrays, options)
    gradients = vjp(case.op, arrays, options, *cotangents_of(outputs, np.random.default_rng(4)))
    assert all(np.isfinite(output).all() for output in outputs)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    np.testing.assert_allclose(gradients["g"][:, 4], 0, atol=1e-300)
    if case.op != "dplr":  # whose low-rank term reads the state before the gate
        after = {name: array if array.ndim < 3 else array[:, 4:] for name, array in arrays.items() if name != "initial_state"}
        skip = case.op == "rwkv6"  # whose output reads the state before the gate, too
        np.testing.assert_array_equal(outputs[0][:, 4 + skip :], forward(case.op, after, options)[0][:, skip:])


def test_value_gate_that_forgets_everything():
    arrays, options = draw(Case("gla", gv=True), np.random.default_rng(5))
    arrays["gv"][:, 3] = -np.inf
    outputs = forward("gla", arrays, options)
    gradients = vjp("gla", arrays, options, *cotangents_of(outputs, np.random.default_rng(6)))
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
    assert not gradients["gv"][:, 3].any()


@pytest.mark.parametrize("causal", [True, False])
def test_a_denominator_of_zero_gives_a_zero_row_and_no_gradient(causal):
    options = {"normalize": True, "causal": causal}
    rng = np.random.default_rng(7)
    arrays = {"q": rng.random((1, 3, 1, 2)), "k": rng.random((1, 3, 1, 2)), "v": rng.random((1, 3, 1, 2))}
    arrays["q"][:, 1] = 0
    o, _ = forward("linear_attn", arrays, options)
    assert not o[:, 1].any()
    assert o[:, [0, 2]].all()
    d_o = np.zeros_like(o)
    d_o[:, 1] = 1
    gradients = vjp("linear_attn", arrays, options, d_o)
    assert not any(gradient.any() for gradient in gradients.values())
