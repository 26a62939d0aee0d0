"""``ssd`` against the equations of Mamba-2, written out, in every form and framework."""

from __future__ import annotations

from typing import Any

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient, offsets
from linattn import errors
from linattn.plugin import Backend

BATCH, T, H, HV, K, V = 2, 21, 2, 4, 5, 3
LIMITS = (0.1, 1.5)

Arrays = dict[str, np.ndarray]


def draw(T: int = T) -> Arrays:
    rng = np.random.default_rng(8)
    shapes = dict(
        x=(BATCH, T, HV, V), dt=(BATCH, T, HV), A=(HV,), B=(BATCH, T, H, K), C=(BATCH, T, H, K), D=(HV,),
        z=(BATCH, T, HV, V), dt_bias=(HV,), initial_state=(BATCH, HV, K, V),
    )  # fmt: skip
    found = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    found["A"] = -np.exp(found["A"])
    return {name: x.astype(np.float32).astype(np.float64) for name, x in found.items()}


def mamba2(a: Arrays, limits: tuple[float, float] = LIMITS) -> tuple[np.ndarray, np.ndarray]:
    """``h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t xᵀ_t``, ``y_t = (C_t h_t + D x_t) silu(z_t)``, head by head."""
    dt = np.clip(np.log1p(np.exp(a["dt"] + a["dt_bias"])), *limits)
    state, y = a["initial_state"].copy(), np.zeros_like(a["x"])
    for t in range(a["x"].shape[1]):
        for h in range(HV):
            B, C, step = a["B"][:, t, h // (HV // H)], a["C"][:, t, h // (HV // H)], dt[:, t, h, None, None]
            state[:, h] = np.exp(step * a["A"][h]) * state[:, h] + step * B[:, :, None] * a["x"][:, t, h][:, None]
            skip = a["D"][h] if a["D"].ndim == 1 else a["D"][h][None]
            y[:, t, h] = np.einsum("bk,bkv->bv", C, state[:, h]) + skip * a["x"][:, t, h]
    return y * a["z"] / (1 + np.exp(-a["z"])), state


def near(x: Any, y: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=3e-5, atol=1e-5)


def given(framework: str, a: Arrays) -> dict[str, Any]:
    return {name: array(framework, x) for name, x in a.items()}


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("form", ["", "chunk_", "recurrent_", "parallel_"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_mamba2(framework, form, by_channel):
    a = draw()
    a["D"] = np.random.default_rng(1).standard_normal((HV, V)).astype(np.float32).astype(np.float64) if by_channel else a["D"]
    operator = getattr(linattn, f"{form}ssd")
    y, state = operator(**given(framework, a), dt_softplus=True, dt_limit=LIMITS, output_final_state=True)
    wanted, final = mamba2(a)
    near(y, wanted)
    near(state, final)


@pytest.mark.parametrize("framework", INSTALLED)
def test_step_sizes_are_taken_as_they_are(framework):
    a = draw()
    raw = {name: a[name] for name in ("x", "A", "B", "C")} | {"dt": np.abs(a["dt"])}
    y, state = linattn.ssd(**given(framework, raw))
    same = {**a, "dt": np.log(np.expm1(raw["dt"])), "dt_bias": np.zeros(HV), "D": np.zeros(HV), "z": np.full_like(a["z"], 1e3)}
    near(y, mamba2({**same, "initial_state": np.zeros_like(a["initial_state"])}, (0.0, np.inf))[0] / 1e3)
    assert state is None


@pytest.mark.parametrize("framework", [name for name in ("numpy", "torch") if name in INSTALLED])
def test_decoding(framework):
    a = draw(T=5)
    pool = array(framework, a.pop("initial_state"))
    arrays = given(framework, a)
    found = []
    for t in range(5):
        token = {name: x[:, t : t + 1] if x.ndim > 2 else x for name, x in arrays.items()}
        found.append(linattn.decode_ssd(**token, state=pool, dt_softplus=True, dt_limit=LIMITS))
    y, state = mamba2(draw(T=5))
    near(np.concatenate([np.asarray(o) for o in found], 1), y)
    near(pool, state)


class Still(Backend):
    """Decodes ``simple_gla`` in place, to nothing at all."""

    name = "still"
    api = ">=1,<2"
    frameworks = ("numpy",)

    def supports(self, call):
        return None

    def decode_simple_gla(self, q, k, v, g, *, state, state_indices, scale):
        return np.zeros_like(v)


@pytest.mark.parametrize("by_channel", [False, True])
def test_padding_stays_zero_where_a_backend_decodes_in_place(by_channel):
    linattn.register_backend(Still())
    a = draw(T=1)
    pool = a.pop("initial_state")
    a["D"] = np.ones((HV, V)) if by_channel else a["D"]
    a["x"][1] = a["z"][1] = np.nan
    o = linattn.decode_ssd(**a, state=pool, state_indices=np.array([0, -1]), backend="still")
    np.testing.assert_allclose(o[0], (a["D"].reshape(HV, -1) * a["x"][0] * a["z"][0] / (1 + np.exp(-a["z"][0]))))
    assert not o[1].any()


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["dt", "A", "D", "dt_bias", "C"])
def test_gradients(framework, name):
    a = draw(T=6)

    def ours(value: Any) -> Any:
        return linattn.chunk_ssd(**{**given(framework, a), name: value}, dt_softplus=True, dt_limit=LIMITS)[0]

    step, wanted = 1e-5, np.zeros_like(a[name])
    for at in np.ndindex(*wanted.shape):
        moved = [a[name].copy(), a[name].copy()]
        moved[0][at] += step
        moved[1][at] -= step
        up, down = (mamba2({**a, name: x})[0].sum() for x in moved)
        wanted[at] = (up - down) / (2 * step)
    np.testing.assert_allclose(gradient(framework, ours, a[name]), wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_traced(framework):
    a = draw()
    arrays = given(framework, a)

    def y(x: Any, dt: Any) -> Any:
        return linattn.ssd(**{**arrays, "x": x, "dt": dt}, dt_softplus=True, dt_limit=LIMITS)[0]

    near(compiled(framework, y)(array(framework, a["x"]), array(framework, a["dt"])), mamba2(a)[0])


@pytest.mark.parametrize("framework", INSTALLED)
def test_behind_the_last_sequence_there_is_nothing(framework):
    """Not even what the skip would add."""
    a = {name: x[:1] if x.ndim > 1 else x for name, x in draw().items()}
    y, _ = linattn.ssd(**given(framework, a), dt_softplus=True, dt_limit=LIMITS, cu_seqlens=offsets(framework, [0, 16]))
    near(y[:, :16], mamba2({name: x[:, :16] if x.ndim > 2 and name != "initial_state" else x for name, x in a.items()})[0])
    assert not np.asarray(y[:, 16:]).any()


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["x", "dt", "A", "D", "dt_bias", "z"])
def test_behind_the_last_sequence_nothing_has_a_gradient(framework, name):
    """Whatever stands there."""
    a = {name: x[:1] if x.ndim > 1 else x for name, x in draw().items()}
    found = []
    for rest in (0.0, np.nan):
        for token in ("x", "dt", "B", "C", "z"):
            a[token][:, 16:] = rest
        arrays, cu_seqlens = given(framework, a), offsets(framework, [0, 16])

        def y(value: Any, arrays: Any = arrays, cu_seqlens: Any = cu_seqlens) -> Any:
            return linattn.ssd(**{**arrays, name: value}, dt_softplus=True, dt_limit=LIMITS, cu_seqlens=cu_seqlens)[0]

        found.append(gradient(framework, y, a[name]))
    assert found[0].any()
    np.testing.assert_array_equal(found[1], found[0])


def test_it_is_lowered_where_a_backend_has_none(make):
    x = make(BATCH, T, HV, V)
    plan = linattn.explain(linattn.chunk_ssd, x, make(BATCH, T, HV), make(HV), make(BATCH, T, H, K), make(BATCH, T, H, K))
    assert plan.method == ("chunk_ssd" if plan.backend == "triton" else "chunk_simple_gla")


def arguments(make: Any) -> dict[str, Any]:
    return dict(
        x=make(BATCH, T, HV, V), dt=make(BATCH, T, HV), A=make(HV), B=make(BATCH, T, H, K), C=make(BATCH, T, H, K)
    )  # fmt: skip


SHAPES = [
    ("z", (BATCH, T, HV, V + 1), "z must be [B, T, HV, V] = [2, 21, 4, 3], got [2, 21, 4, 4]"),
    ("A", (HV, K), "A must be [HV] = [4], got [4, 5]"),
    ("C", (BATCH, T, H, K + 1), "C (output projection) must be [B, T, H, K] = [2, 21, 2, 5], got [2, 21, 2, 6]"),
    ("B", (BATCH, T, K), "B (input projection) must be [B, T, H, K] = [2, 21, H, K], got [2, 21, 5]"),
    ("D", (V,), "D (skip) must be [HV] = [4] or [HV, V] = [4, 3], got [3]"),
    ("dt_bias", (H,), "dt_bias must be [HV] = [4], got [2]"),
    ("dt", (BATCH, T, H), "dt must be [B, T, HV] = [2, 21, 4], got [2, 21, 2]"),
]


@pytest.mark.parametrize(("name", "shape", "text"), SHAPES, ids=[text for *_, text in SHAPES])
@pytest.mark.usefixtures("nothing_is_computed")
def test_wrong_shapes(make, name, shape, text):
    with pytest.raises(errors.ShapeError) as caught:
        linattn.ssd(**{**arguments(make), name: make(*shape)})
    assert str(caught.value) == f"ssd: {text}"


@pytest.mark.parametrize("limit", [(2.0, 1.0), (1.0,), ("0", 1.0), (True, 2.0), (float("nan"), 1.0)], ids=str)
@pytest.mark.usefixtures("nothing_is_computed")
def test_wrong_limits(make, limit):
    with pytest.raises(errors.OptionError) as caught:
        linattn.ssd(**arguments(make), dt_limit=limit)
    assert str(caught.value) == f"ssd: dt_limit must be two numbers, the smaller first, got {limit!r}"


def test_projections_are_called_what_they_are(make):
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.ssd(**{**arguments(make), "B": None})
    assert str(caught.value) == "ssd: B (input projection) is required, got None"
    with pytest.raises(errors.DtypeError) as caught:
        linattn.ssd(**{**arguments(make), "C": make(BATCH, T, H, K, dtype="float16")})
    assert str(caught.value) == "ssd: C (output projection) must have the dtype of x, float32, got float16"
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.ssd(**{**arguments(make), "B": [[1.0]]})
    assert str(caught.value) == "ssd: B (input projection): expected an array of numpy, torch, jax or mlx, got list"


@pytest.mark.usefixtures("nothing_is_computed")
def test_devices(torch):
    given = arguments(lambda *shape: torch.ones(shape))
    with pytest.raises(errors.DeviceError) as caught:
        linattn.ssd(**{**given, "B": given["B"].to("meta")})
    assert str(caught.value) == "ssd: B (input projection) is on meta but x is on cpu: move it, nothing is copied for you"
