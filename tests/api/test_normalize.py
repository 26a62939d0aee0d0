"""``normalize=True`` is a weighted mean of the values, in every family that has it, in every form and framework."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn.ops._normalize import NORMALIZE

B, T, H, HV, K, V = 2, 37, 2, 4, 5, 3
FORMS = ("chunk", "recurrent", "parallel")


def draw(family: str, fixed: bool = False, T: int = T) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    arrays = {"q": rng.random((B, T, H, K)) + 0.1, "k": rng.random((B, T, H, K)) + 0.1, "v": rng.standard_normal((B, T, HV, V))}
    if family == "simple_gla":
        arrays["g"] = -rng.random((HV,) if fixed else (B, T, HV))
    if family == "gla":
        arrays |= {"g": -rng.random((B, T, HV, K)), "gv": -rng.random((B, T, HV, V))}
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def weighted_mean(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """``o_t = Σ_{s≤t} w_ts e^{GV_t − GV_s} ∘ v_s / Σ_{s≤t} w_ts``, ``w_ts = Σ_k q_t k_s e^{G_t − G_s}``, without a state."""
    x = {name: y.astype(np.float64) for name, y in arrays.items()}
    v, T = x["v"], x["v"].shape[1]
    q, k = (np.repeat(x[name], HV // H, 2) for name in ("q", "k"))
    g = x.get("g", np.zeros(HV))
    g = np.broadcast_to(g if g.ndim == 4 else g[..., None], k.shape)
    G, GV = np.cumsum(g, 1), np.cumsum(x.get("gv", np.zeros_like(v)), 1)
    causal = np.tril(np.ones((T, T)))[None, :, :, None, None]
    pairs = lambda x: np.exp(np.minimum(x[:, :, None] - x[:, None], 0.0)) * causal  # noqa: E731
    weights = np.einsum("bthk,bshk,btshk->btsh", q, k, pairs(G))
    return np.einsum("btsh,btshv,bshv->bthv", weights, pairs(GV), v) / weights.sum(2)[..., None]


def near(x, y) -> None:
    np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize(
    ("family", "fixed"), [("linear_attn", False), ("simple_gla", False), ("simple_gla", True), ("gla", False)]
)
def test_a_weighted_mean(framework, family, fixed):
    drawn = draw(family, fixed)
    given = {name: array(framework, x) for name, x in drawn.items()}
    for form in FORMS:
        o, _ = getattr(linattn, f"{form}_{family}")(**given, normalize=True, scale=3.0)
        near(o, weighted_mean(drawn))


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla"])
def test_the_state_carries_the_normaliser(framework, family):
    drawn = draw(family)
    given = {name: array(framework, x) for name, x in drawn.items()}
    operator = getattr(linattn, f"chunk_{family}")
    first, second = ({name: x[:, part] for name, x in given.items()} for part in (slice(0, 20), slice(20, T)))
    _, state = operator(**first, normalize=True, output_final_state=True)
    assert tuple(state.shape) == (B, HV, K, V + 1)
    o, _ = operator(**second, normalize=True, initial_state=state)
    near(o, weighted_mean(drawn)[:, 20:])


@pytest.mark.parametrize("framework", [name for name in INSTALLED if name in ("numpy", "torch")])
@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla"])
def test_decoding(framework, family):
    drawn = draw(family, T=6)
    pool = array(framework, np.zeros((B + 1, HV, K, V + 1)))
    slots = np.array([2, 0], np.int32)
    indices = slots if framework == "numpy" else pytest.importorskip("torch").from_numpy(slots)
    given = {name: array(framework, x) for name, x in drawn.items()}
    found = []
    for t in range(6):
        token = {name: x[:, t : t + 1] for name, x in given.items()}
        found.append(getattr(linattn, f"decode_{family}")(**token, state=pool, state_indices=indices, normalize=True))
    near(np.concatenate([np.asarray(o) for o in found], 1), weighted_mean(drawn))
    assert not np.asarray(pool[1]).any()


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("family", ["simple_gla", "gla"])
def test_gradients(framework, family):
    """By differences of the formula, along one direction an array."""
    drawn = {name: x[:, :9] for name, x in draw(family).items()}
    rng = np.random.default_rng(3)
    for name in drawn:
        others = {key: array(framework, x) for key, x in drawn.items() if key != name}

        def operator(x, others=others, name=name):
            return getattr(linattn, f"chunk_{family}")(**others, **{name: x}, normalize=True)[0]

        direction, step = rng.standard_normal(drawn[name].shape), 1e-5
        ahead, behind = (
            weighted_mean({**drawn, name: drawn[name].astype(np.float64) + sign * step * direction}).sum() for sign in (1, -1)
        )
        found = (gradient(framework, operator, drawn[name]) * direction).sum()
        np.testing.assert_allclose(found, (ahead - behind) / (2 * step), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("framework", INSTALLED)
def test_compiled(framework):
    drawn = draw("gla")
    rest = {name: array(framework, x) for name, x in drawn.items() if name != "v"}
    function = compiled(framework, lambda v: linattn.chunk_gla(**rest, v=v, normalize=True)[0])
    near(function(array(framework, drawn["v"])), weighted_mean(drawn))


def test_sixteen_bits_are_divided_before_they_are_rounded(torch):
    """A denominator in bfloat16 would be off by three digits more."""
    drawn = draw("simple_gla")
    given = {name: array("torch", x).bfloat16() for name, x in drawn.items()}
    o, _ = linattn.chunk_simple_gla(**given, normalize=True)
    wanted = weighted_mean({name: x.float().numpy() for name, x in given.items()})
    assert o.dtype == torch.bfloat16
    assert (o.double() - torch.from_numpy(wanted)).abs().max() <= 2**-8 * np.abs(wanted).max()


def test_no_weight_at_all_gives_zero(make):
    x = make(1, 4, 1, 3)
    o, _ = linattn.chunk_gla(x, x * 0, x, -abs(x), normalize=True)
    assert not np.asarray(o).any()


def test_it_is_declared_once():
    families = {name for name, spec in linattn.spec.FAMILIES.items() if "normalize" in spec.option_names}
    assert families == {"linear_attn", "simple_gla", "gla"}
    assert all(NORMALIZE in linattn.spec.FAMILIES[name].options for name in families)
