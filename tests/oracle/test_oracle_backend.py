"""The oracle behind the plug-in contract: signatures, dtypes, strides, and the same numbers through ``linattn``."""

import inspect
from contextlib import suppress

import linattn
import numpy as np
import pytest
from linattn.plugin import FORMS
from linattn.spec import FAMILIES
from linattn_backends.numpy import NumpyBackend, forward
from oracle_cases import Case, draw, floats

BACKEND = NumpyBackend()
OPS = sorted(set(FAMILIES) - {"ssd"})
MAPS = ("qk_norm", "gate", "beta_map")
"""What linattn applies."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_methods_take_the_parameters_of_the_spec(op, form):
    parameters = inspect.signature(getattr(BACKEND, f"{form}_{op}")).parameters.values()
    own, keywords = (
        tuple(name for name in names if name not in MAPS) for names in (FAMILIES[op].parameters, FAMILIES[op].keywords)
    )
    assert tuple(p.name for p in parameters) == own
    assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == keywords


@pytest.mark.parametrize("op", OPS)
def test_every_form_runs_the_definition(op):
    arrays, options = draw(Case(op), np.random.default_rng(21))
    expected = forward(op, arrays, options)
    for form in FORMS:
        for function in (getattr(BACKEND, f"{form}_{op}"), getattr(linattn, f"{form}_{op}")):
            actual = function(**arrays, **options)
            actual, wanted = (floats(dict(enumerate(outputs))) for outputs in (actual, expected))
            for name in wanted:
                np.testing.assert_array_equal(actual[name], wanted[name])
            assert function(**arrays, **{**options, "output_final_state": False})[1] is None


DTYPES = [np.float64, np.float32, np.float16]
with suppress(ImportError):
    from ml_dtypes import bfloat16

    DTYPES.append(bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("op", OPS)
def test_dtypes(op, dtype):
    arrays, options = draw(Case(op), np.random.default_rng(22))
    state = arrays.pop("initial_state")
    arrays = {name: array.astype(np.float32 if name in ("g", "u") else dtype) for name, array in arrays.items()}
    arrays["initial_state"] = cast_state(state, np.float32)
    o, final = getattr(BACKEND, f"recurrent_{op}")(**arrays, **options)
    full = np.float64 if dtype is np.float64 else np.float32
    assert (o.dtype, o.shape) == (dtype, arrays["v"].shape)
    assert {array.dtype for array in floats({"": final}).values()} == {np.dtype(full)}
    gradients = floats(BACKEND.vjp(op, arrays, options, o, final))
    for name, array in floats(arrays).items():
        assert gradients[name].dtype == array.dtype
    # The numbers are those of float64 arithmetic on the rounded inputs, rounded once.
    exact, _ = forward(op, arrays, options)
    np.testing.assert_array_equal(o, exact.astype(dtype))


def cast_state(state, dtype):
    if isinstance(state, tuple):
        return type(state)(*(array if array.dtype.kind == "i" else array.astype(dtype) for array in state))
    return state.astype(dtype)


def test_beyond_the_largest_float16_lies_inf():
    ones = np.full((1, 1, 1, 1), 200, np.float16)
    o, S = BACKEND.recurrent_linear_attn(ones, ones, ones, scale=1.0, output_final_state=True)
    assert np.isposinf(o).all()
    assert S.item() == 40_000


@pytest.mark.parametrize("op", OPS)
def test_strided_inputs(op):
    arrays, options = draw(Case(op, group=1), np.random.default_rng(23))
    expected, _ = forward(op, arrays, options)
    strided = {
        name: array if name == "initial_state" else np.repeat(array, 2, -1)[..., ::2].copy(order="F")
        for name, array in arrays.items()
    }
    np.testing.assert_array_equal(forward(op, strided, options)[0], expected)
