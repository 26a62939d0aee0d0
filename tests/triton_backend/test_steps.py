"""The recurrence of the delta families, token by token, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from linattn_backends.numpy import oracle
from triton_cases import TOLERANCE, arrays, as_numpy, call, distance

FAMILIES = ("delta_rule", "gated_delta_rule", "kda", "dplr")


def check_forward(family, given, **options):
    """Outputs and final state agree with the oracle; inputs stay as they were."""
    tolerance = TOLERANCE[given["v"].dtype]
    before = {name: x.clone() for name, x in given.items()}
    with torch.no_grad():
        o, final = call(family, given, "recurrent", output_final_state=True, **options)
    wanted_o, wanted_final = oracle.forward(family, as_numpy(given), dict(options, output_final_state=True))
    assert o.dtype == given["v"].dtype
    assert final.dtype == torch.float32
    assert distance(o, wanted_o) < tolerance
    assert distance(final, wanted_final) < tolerance
    assert all(torch.equal(x, given[name]) for name, x in before.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    check_forward(family, arrays(family, B=2, T=5, H=2, HV=4, K=20, V=18))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_a_writing_strength_for_each_value_channel(family):
    check_forward(family, arrays(family, T=5, HV=2, per_value=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_without_a_state(family):
    check_forward(family, arrays(family, T=12, HV=2, cu=[0, 0, 5, 12], state=False))


@pytest.mark.parametrize("kind", ["zero", "strong", "-inf", "mixed"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_gates(family, kind):
    check_forward(family, arrays(family, T=6, kind=kind))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (17, 33), (200, 40)])
def test_widths(K, V):
    check_forward("kda", arrays("kda", T=3, K=K, V=V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits(family, dtype):
    check_forward(family, arrays(family, T=5, K=16, V=16, dtype=dtype), scale=0.3)


def test_strided_inputs():
    given = arrays("kda", B=2, T=5, H=2, HV=2)
    for name in ("k", "v", "g"):
        given[name] = torch.stack((given[name], given[name] + 1), -1)[..., 0]
        assert not given[name].is_contiguous()
    given["initial_state"] = given["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    check_forward("kda", given)


def test_no_tokens():
    given = arrays("kda", T=0)
    o, final = call("kda", given, "recurrent", output_final_state=True)
    assert o.shape == (1, 0, 1, 7)
    assert torch.equal(final, given["initial_state"])
