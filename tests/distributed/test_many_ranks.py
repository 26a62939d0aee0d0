"""As many simulated ranks as no test has devices for: 64 of every family and flag, a family of each kind of transition with
gradients there, and forward on 1,024.
"""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from linattn.distributed import simulate
from sequence_cases import SPREAD, arguments, draw, parts

KINDS = ("simple_gla", "gla", "gated_delta_rule")


def arrays(family: str, T: int) -> dict[str, np.ndarray]:
    """Decays and writing strengths so small that the first rank's tokens are seen by the last."""
    rng = np.random.default_rng(T)
    found = dict(zip("qkv", rng.standard_normal((3, 1, T, 1, 3)), strict=True))
    found["g"] = -np.abs(rng.standard_normal((1, T, 1, 3) if family == "gla" else (1, T, 1))) / T
    if family == "gated_delta_rule":
        found["k"] /= np.linalg.norm(found["k"], axis=-1, keepdims=True)
        found["beta"] = rng.random((1, T, 1)) * 8 / T
    return found


@pytest.mark.parametrize("packing", [None, [0, 1, 700, 2000, 2048]])
@pytest.mark.parametrize("family", KINDS)
def test_1024_ranks_give_what_one_gives(family: str, packing: list[int] | None):
    given, operator = arrays(family, 2048), getattr(linattn, f"chunk_{family}")
    packed = {} if packing is None else {"cu_seqlens": np.array(packing)}
    o, final = operator(**given, **packed, output_final_state=True)
    spread, state = simulate(operator, **given, output_final_state=True, ranks=1024, cu_seqlens=packing)
    np.testing.assert_allclose(spread, o, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(state, final, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("packing", [None, [0, 1, 85, 200, 252]])
@pytest.mark.parametrize("variant", SPREAD)
def test_64_ranks_share_every_kind_of_call(variant: str, packing: list[int] | None):
    case = draw(variant, B=1, T=256, H=1, HV=1, K=3, V=2, cu_seqlens=packing, resets=False)
    for name in case.arrays.keys() & {"g", "gv", "dt", "beta", "b"}:
        case.arrays[name] *= 0.05  # what the first rank writes is there for the last
    operator = getattr(linattn, f"chunk_{case.family}")
    given = arguments(case, case.arrays, operator) | {"output_final_state": True}
    o, final = operator(**given)
    given.pop("cu_seqlens", None)
    spread, state = simulate(operator, **given, ranks=64, cu_seqlens=packing)
    for found, expected in zip((spread, *parts(state)), (o, *parts(final)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family", KINDS)
def test_gradients_cross_64_ranks(family: str):
    torch = pytest.importorskip("torch")
    operator = getattr(linattn, f"chunk_{family}")
    gradients = []
    for options in ({}, {"ranks": 64, "layout": "zigzag"}):
        given = {name: torch.from_numpy(x).requires_grad_() for name, x in arrays(family, 256).items()}
        o, _ = simulate(operator, **given, **options) if options else operator(**given)
        gradients.append(torch.autograd.grad(o[:, -1].sum(), list(given.values())))
    for found, expected in zip(*gradients[::-1], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert gradients[0][2][0, 0].abs().max() > 1e-5, "the first token counts for the last"
