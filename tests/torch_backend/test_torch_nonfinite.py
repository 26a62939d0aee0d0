"""NaN and inf in the data: forward in time, as far as the recurrence sends them, and never back."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
import torch

T, H, HV, K, V = 90, 2, 4, 8, 6
WRITTEN = {
    "linear_attn": ("k", "v"),
    "simple_gla": ("k", "v", "g"),
    "gla": ("k", "v", "g", "gv"),
    "rwkv6": ("k", "v", "g"),
    "delta_rule": ("k", "v", "beta"),
    "gated_delta_rule": ("k", "v", "g", "beta"),
    "kda": ("k", "v", "g", "beta"),
    "dplr": ("k", "v", "g", "a", "b"),
    "mixed_attn": ("k_quad", "k_lin", "v"),
}
CASES = [(family, name) for family, names in WRITTEN.items() for name in names]


def arguments(family: str) -> dict[str, torch.Tensor]:
    spec = linattn.spec.FAMILIES[family]
    sizes = {"B": 2, "T": T, "H": H, "HV": H if family == "mixed_attn" else HV, "K": K, "V": V, "L": K}
    found = {arg.name: torch.randn([sizes[s] for s in arg.shapes[0]]) * 0.3 for arg in spec.args}
    for name in ("g", "gv"):
        if name in found:
            found[name] = -found[name].abs()
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["chunk", "recurrent", "parallel"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_never_back_in_time(family, name, form, value):
    if value == float("inf") and name in ("g", "gv"):
        pytest.skip("a gate above zero is not a gate")
    function = getattr(linattn, f"{form}_{family}")
    options = {"chunk_size": 32}
    call, t = arguments(family), 45
    before, _ = function(**call, **options)
    call[name] = call[name].clone()
    call[name][1, t, 1] = value
    after, _ = function(**call, **options)
    torch.testing.assert_close(after[1, :t], before[1, :t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-5)
    assert after[1, t:].isnan().any() or after[1, t:].isinf().any()


@pytest.mark.parametrize("form", ["chunk", "parallel"])
def test_of_a_packed_sequence_only_what_follows(form):
    call = {name: x[:1] for name, x in arguments("gla").items()}
    cu = torch.tensor([0, 20, 20, 61, 90])
    call["v"][0, 50, 1, 2] = call["v"][0, 75, 1, 2] = float("nan")
    o, _ = getattr(linattn, f"{form}_gla")(**call, cu_seqlens=cu, chunk_size=32)
    bad = np.flatnonzero(o.isnan().any(-1).any(-1)[0].numpy())
    assert bad.tolist() == [*range(50, 61), *range(75, 90)]


def test_a_nan_query_stays_in_its_row():
    call = arguments("gla")
    call["q"][0, 40, 1] = float("nan")
    o, _ = linattn.chunk_gla(**call)
    assert set(np.argwhere(o.isnan().numpy())[:, 1]) == {40}


def test_a_reset_is_no_accident():
    call = arguments("gla")
    call["g"][:, 33] = -float("inf")
    o, _ = linattn.chunk_gla(**call)
    assert o.isfinite().all()
