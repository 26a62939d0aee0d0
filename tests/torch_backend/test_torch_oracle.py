"""Every family, form and flag against the oracle, forward and backward."""

import pytest
import torch
from torch_cases import GATES, VARIANTS, draw, error, forms, gradients, row_error, truth

GATED = [v for v in VARIANTS if v not in ("linear_attn", "normalized", "bidirectional", "delta_rule", "delta_rule_vector_beta")]
GATED = [v for v in GATED if not v.startswith("mixed")]


def compare(variant, T, bound, **how):
    torch.manual_seed(sum(map(ord, variant)) + T)
    family, arrays, options = draw(variant, T, **how)
    expected, weights, grads = truth(family, arrays, options)
    for form in forms(variant):
        found, dfound = gradients(form, family, arrays, options, weights)
        for name, x in {**expected, **grads}.items():
            y = found[name] if name in found else dfound[name]
            assert y.shape == x.shape, (form, name)
            assert error(y, x) < bound, (form, name, error(y, x))
        for name, y in dfound.items():
            assert y.dtype == (arrays[name] if name in arrays else arrays["v"]).dtype, name


@pytest.mark.parametrize("T", [0, 1, 2, 17, 64, 65, 150])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64(variant, T):
    compare(variant, T, 1e-10)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("variant", GATED)
def test_gates(variant, kind):
    compare(variant, 100, 1e-10, kind=kind)


@pytest.mark.parametrize(
    ("lengths", "state"), [([0, 3, 70, 0, 1, 150, 33, 0], True), ([5] * 20, False), ([0, 0], True), ([], False)], ids=str
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed(variant, lengths, state):
    compare(variant, 0, 1e-10, lengths=lengths, state=state, kind="harsh")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_narrow(variant, dtype, bound):
    compare(variant, 90, bound, dtype=dtype)


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 9), (24, 3), (96, 64)])
@pytest.mark.parametrize("variant", ["gla", "kda", "dplr"])
def test_widths(variant, K, V):
    compare(variant, 33, 1e-10, K=K, V=V, B=1, H=1, HV=1)


# After a reset a mean is the token's own value, whatever its weight: the gradient of that weight is a difference of equals.
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("variant", [v for v in GATED if not v.startswith("normalized")])
def test_rows_float32(variant, kind):
    """Per token row, so that a gate gradient of small magnitude cannot hide behind large ones."""
    torch.manual_seed(7)
    family, arrays, options = draw(variant, 200, kind=kind, dtype=torch.float32, B=1, K=32, V=32)
    expected, weights, grads = truth(family, arrays, options)
    found, dfound = gradients("chunk", family, arrays, options, weights)
    for name, x in {**expected, **grads}.items():
        if name not in ("final_state", "initial_state", "u") and x.dim() > 2:
            y = found[name] if name in found else dfound[name]
            assert row_error(y, x) < 1e-4, (name, row_error(y, x))


def test_no_state_given_and_none_asked():
    for variant, (family, _) in VARIANTS.items():
        family, arrays, options = draw(variant, 20, state=False)
        options["output_final_state"] = False
        for form in forms(variant):
            from torch_cases import run

            assert run(form, family, arrays, options)[1] is None
