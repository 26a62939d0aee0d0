"""As many simulated ranks as no test has devices for: 64 with gradients, 1,024 forward, a family of each kind of transition."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from linattn.distributed import simulate

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
