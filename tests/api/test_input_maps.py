"""Input maps: what ``qk_norm``, ``gate`` and ``beta_map`` compute, written down from the papers, in every framework."""

from __future__ import annotations

from typing import Any

import linattn
import numpy as np
import pytest
from backends_for_tests import Recorder
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient, offsets
from linattn import errors, gates

B, T, H, HV, K, V = 2, 19, 2, 4, 5, 3

Arrays = dict[str, np.ndarray]


def draw(seed: int = 11) -> Arrays:
    rng = np.random.default_rng(seed)
    shapes = dict(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, HV, K), beta=(B, T, HV), A_log=(HV,), bias=(HV, K))
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {name: x.astype(np.float32).astype(np.float64) for name, x in drawn.items()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def spread(x: np.ndarray) -> np.ndarray:
    return np.repeat(x, HV // H, 2)


def delta(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """``S = Diag(α) S⁻ + kᵀ β (v − k Diag(α) S⁻)``, ``o = K^{-1/2} q S`` (Kimi Linear, eq. 1), from zeros."""
    S, o = np.zeros((B, HV, K, V)), np.zeros((B, T, HV, V))
    for t in range(T):
        S = decay[:, t, ..., None] * S
        read = np.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - read))
        o[:, t] = K**-0.5 * np.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o


def gated(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """``S = Diag(α) S⁻ + kᵀ v``, ``o = K^{-1/2} q S`` (GLA, eq. 4), from zeros."""
    S, o = np.zeros((B, HV, K, V)), np.zeros((B, T, HV, V))
    for t in range(T):
        S = decay[:, t, ..., None] * S + np.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        o[:, t] = K**-0.5 * np.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o


def softplus_decay(x: Arrays) -> np.ndarray:
    return np.exp(-np.exp(x["A_log"])[:, None] * np.log1p(np.exp(x["g"] + x["bias"])))


DECAYS = {
    "Softplus": (lambda a: gates.Softplus(a["A_log"], a["bias"]), softplus_decay),
    "BoundedSigmoid": (
        lambda a: gates.BoundedSigmoid(a["A_log"], a["bias"], lower_bound=-5.0),
        lambda x: np.exp(-5.0 * sigmoid(np.exp(x["A_log"])[:, None] * (x["g"] + x["bias"]))),
    ),
    "LogSigmoid": (lambda a: gates.LogSigmoid(tau=8.0), lambda x: sigmoid(x["g"]) ** (1 / 8)),
    "NegExp": (lambda a: gates.NegExp(a["bias"]), lambda x: np.exp(-np.exp(x["g"] + x["bias"]))),
}
"""Of each gate object: how it is made, and ``α = e^g`` as its paper has it."""


def near(x: Any, y: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=3e-5, atol=3e-6)


def given(framework: str, x: Arrays, *names: str) -> dict[str, Any]:
    return {name: array(framework, x[name]) for name in names}


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("kind", DECAYS)
def test_gates(framework, kind):
    x = draw()
    make, decay = DECAYS[kind]
    gate = make(given(framework, x, *x))
    wanted = gated(spread(x["q"]), spread(x["k"]), x["v"], decay(x))
    for form in ("chunk", "recurrent", "parallel"):
        near(getattr(linattn, f"{form}_gla")(**given(framework, x, "q", "k", "v", "g"), gate=gate)[0], wanted)
    near(gate(array(framework, x["g"])), np.log(decay(x)))


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize(("beta_map", "factor"), [("sigmoid", 1.0), ("2sigmoid", 2.0)])
def test_all_at_once_is_kimi_delta_attention(framework, beta_map, factor):
    x = draw()
    arrays = given(framework, x, *x)
    gate = gates.Softplus(arrays.pop("A_log"), arrays.pop("bias"))
    wanted = delta(spread(unit(x["q"])), spread(unit(x["k"])), x["v"], softplus_decay(x), factor * sigmoid(x["beta"]))
    near(linattn.kda(**arrays, qk_norm="l2", gate=gate, beta_map=beta_map)[0], wanted)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize(
    "family", ["linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr"]
)
def test_unit_keys_in_every_family(framework, family):
    x = draw() | {"u": draw(5)["bias"], "a": 0.3 * draw(6)["g"], "b": 0.3 * draw(7)["g"]}
    x |= {"g": -np.abs(x["g"]), "beta": sigmoid(x["beta"])}
    names = [arg.name for arg in linattn.spec.FAMILIES[family].args if arg.name != "gv"]
    scalar = family in ("simple_gla", "gated_delta_rule")
    x |= {"g": x["g"][..., 0]} if scalar else {}
    operator = getattr(linattn, family)
    wanted = operator(**{name: unit(x[name]) if name in ("q", "k") else x[name] for name in names})[0]
    near(operator(**given(framework, x, *names), qk_norm="l2")[0], wanted)


def pulled(kind: str, name: str, x: Arrays, step: float = 1e-5) -> np.ndarray:
    """The gradient of the sum of ``o`` by an input, from central differences of the formula."""
    decay = DECAYS[kind][1]

    def total(value: np.ndarray) -> float:
        y = {**x, name: value}
        return delta(spread(unit(y["q"])), spread(unit(y["k"])), y["v"], decay(y), sigmoid(y["beta"])).sum()

    found = np.zeros_like(x[name])
    for at in np.ndindex(*found.shape):
        up, down = (x[name].copy() for _ in range(2))
        up[at] += step
        down[at] -= step
        found[at] = (total(up) - total(down)) / (2 * step)
    return found


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("Softplus", "A_log"), ("Softplus", "bias"), ("BoundedSigmoid", "bias"), ("NegExp", "bias"), ("Softplus", "beta")],
)
def test_gradients_reach_projections_and_parameters(framework, kind, name):
    x = draw()
    arrays = given(framework, x, *x)

    def o(value: Any) -> Any:
        a = {**arrays, name: value}
        tokens = {key: a[key] for key in ("q", "k", "v", "g", "beta")}
        return linattn.kda(**tokens, qk_norm="l2", gate=DECAYS[kind][0](a), beta_map="sigmoid")[0]

    np.testing.assert_allclose(gradient(framework, o, x[name]), pulled(kind, name, x), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("framework", INSTALLED)
def test_squares_of_long_keys_do_not_overflow(framework):
    x = draw()
    long = array(framework, x["k"] * 2.0**100)
    wanted, _ = linattn.linear_attn(spread(unit(x["q"])), spread(unit(x["k"] * 2.0**100)), x["v"])
    near(linattn.linear_attn(k=long, **given(framework, x, "q", "v"), qk_norm="l2")[0], wanted)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("length", [2.0**60, 2.0**100])
def test_the_gradient_of_long_keys_is_none_of_their_squares(framework, length):
    """As many times smaller than that of keys of an ordinary length, though that of their squares underflows."""
    x = draw()
    q, v, beta = (array(framework, a) for a in (x["q"], x["v"], sigmoid(x["beta"])))

    def o(k: Any) -> Any:
        return linattn.delta_rule(q, k, v, beta, qk_norm="l2")[0]

    wanted = gradient(framework, o, x["k"] * 2.0**8) * 2.0**8
    found = gradient(framework, o, x["k"] * length).astype(np.float64) * length
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["A_log", "bias", "q", "k", "g", "beta"])
def test_behind_the_last_sequence_nothing_has_a_gradient(framework, name):
    """Whatever stands there."""
    x = {name: a[:1] if a.ndim > 2 else a for name, a in draw().items()}
    found = []
    for rest in (0.0, np.nan):
        for token in ("q", "k", "v", "g", "beta"):
            x[token][:, 16:] = rest
        arrays, cu_seqlens = given(framework, x, *x), offsets(framework, [0, 9, 16])

        def o(value: Any, arrays: Any = arrays, cu_seqlens: Any = cu_seqlens) -> Any:
            a = {**arrays, name: value}
            tokens = {key: a[key] for key in ("q", "k", "v", "g", "beta")}
            gate = gates.Softplus(a["A_log"], a["bias"])
            return linattn.kda(**tokens, qk_norm="l2", gate=gate, beta_map="sigmoid", cu_seqlens=cu_seqlens)[0]

        found.append(gradient(framework, o, x[name]))
    assert found[0].any()
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_traced(framework):
    x = draw()
    arrays = given(framework, x, *x)

    def o(g: Any, A_log: Any) -> Any:
        gate = gates.Softplus(A_log, arrays["bias"])
        rest = {name: arrays[name] for name in ("q", "k", "v", "beta")}
        return linattn.kda(**rest, g=g, qk_norm="l2", gate=gate, beta_map="2sigmoid")[0]

    found = compiled(framework, o)(arrays["g"], arrays["A_log"])
    np.testing.assert_allclose(np.asarray(found), np.asarray(o(arrays["g"], arrays["A_log"])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("framework", [name for name in ("numpy", "torch") if name in INSTALLED])
def test_decoding(framework):
    x = draw()
    arrays = given(framework, x, *x)
    gate = gates.Softplus(arrays.pop("A_log"), arrays.pop("bias"))
    maps: dict[str, Any] = dict(qk_norm="l2", gate=gate, beta_map="sigmoid")
    state = array(framework, np.zeros((B, HV, K, V)))
    tokens = [{name: a[:, t : t + 1] for name, a in arrays.items()} for t in range(T)]
    o = np.concatenate([np.asarray(linattn.decode_kda(**token, **maps, state=state)) for token in tokens], 1)
    near(o, delta(spread(unit(x["q"])), spread(unit(x["k"])), x["v"], softplus_decay(x), sigmoid(x["beta"])))


def test_bfloat16_keys_are_rounded_once():
    torch = pytest.importorskip("torch")
    q = torch.from_numpy(draw()["q"]).bfloat16()
    unit_q = (q.float() / (q.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    plain, _ = linattn.chunk_linear_attn(unit_q, unit_q, q)
    torch.testing.assert_close(linattn.chunk_linear_attn(q, q, q, qk_norm="l2")[0], plain, rtol=0, atol=0)


class Taking(Recorder):
    """A method that takes two maps, and not the third."""

    name = "taking"

    def chunk_kda(
        self, q, k, v, g, beta, *, qk_norm, gate, scale, initial_state, output_final_state, cu_seqlens, chunk_size
    ):  # fmt: skip
        self.seen = dict(locals())
        return v * 1, None


def test_a_method_gets_what_it_takes(make):
    backend = Taking()
    linattn.register_backend(backend)
    q, v, g, beta = make(B, T, H, K), make(B, T, HV, V), make(B, T, HV, K), make(B, T, HV)
    gate = gates.Softplus(make(HV), make(HV, K))
    linattn.chunk_kda(q, q, v, g, beta, qk_norm="l2", gate=gate, beta_map="sigmoid", backend="taking")
    assert backend.seen["gate"] is gate
    assert backend.seen["qk_norm"] == "l2"
    assert backend.seen["g"] is g
    near(backend.seen["beta"], sigmoid(np.asarray(beta, np.float64)))
    plan = linattn.explain("chunk_kda", q, q, v, g, beta, gate=gate, backend="taking")
    assert plan.call.gate == gate.kind
    assert plan.call.shapes["gate.dt_bias"] == "G K"


def test_other_parameters_of_one_kind(make):
    """What a plan rests on is static; the parameters are those of the call."""
    q, v, g = make(B, T, H, K), make(B, T, HV, V), make(B, T, HV, K)
    first, second = gates.Softplus(make(HV)), gates.Softplus(make(HV))
    assert first.kind == second.kind == ("Softplus", ("A_log",), None)
    assert first.kind != gates.Softplus(make(HV), make(HV)).kind
    a, b = (np.asarray(linattn.gla(q, q, v, g, gate=gate)[0]) for gate in (first, second))
    assert not np.array_equal(a, b)


BAD = [
    ("gla", dict(gate="softplus"), "gate must be an object of linattn.gates or None, got 'softplus'", errors.OptionError),
    ("gla", dict(gate=gates.gla), "gate must be an object of linattn.gates or None, got function", errors.OptionError),
    ("gla", dict(qk_norm="l1"), "qk_norm must be 'l2' or None, a static Python value, got 'l1'", errors.OptionError),
    (
        "gla",
        dict(qk_norm="l2", feature_map="relu"),
        "qk_norm and feature_map both map q and k: pass one of them",
        errors.OptionError,
    ),
    (
        "kda",
        dict(beta_map="tanh"),
        "beta_map must be 'sigmoid' or '2sigmoid' or None, a static Python value, got 'tanh'",
        errors.OptionError,
    ),
]


def arguments(make: Any, family: str) -> dict[str, Any]:
    found = dict(q=make(B, T, H, K), k=make(B, T, H, K), v=make(B, T, HV, V), g=make(B, T, HV, K))
    return found | ({"beta": make(B, T, HV)} if family == "kda" else {})


@pytest.mark.parametrize(("family", "maps", "text", "error"), BAD, ids=[text for _, _, text, _ in BAD])
@pytest.mark.usefixtures("nothing_is_computed")
def test_bad_options(make, family, maps, text, error):
    with pytest.raises(error) as caught:
        getattr(linattn, family)(**arguments(make, family), **maps)
    assert str(caught.value) == f"{family}: {text}"


SHAPES = [
    (lambda make: gates.Softplus(make(3)), "gate.A_log must be [G] = [4] or [], got [3]"),
    (lambda make: gates.Softplus(make(4), make(4, 2)), "gate.dt_bias must be [G] = [4] or [G, K] = [4, 5], got [4, 2]"),
    (lambda make: gates.NegExp(make(5)), "gate.bias must be [G] = [4] or [G, K] = [4, 5], got [5]"),
]


@pytest.mark.parametrize(("gate", "text"), SHAPES, ids=[text for _, text in SHAPES])
@pytest.mark.usefixtures("nothing_is_computed")
def test_parameters_of_the_wrong_shape(make, gate, text):
    with pytest.raises(errors.ShapeError) as caught:
        linattn.kda(**arguments(make, "kda"), gate=gate(make))
    assert str(caught.value) == f"kda: {text}"


@pytest.mark.parametrize("family", ["simple_gla", "gated_delta_rule"])
@pytest.mark.usefixtures("nothing_is_computed")
def test_a_gate_by_head_takes_no_parameters_by_channel(make, family):
    given = dict(q=make(B, T, H, K), k=make(B, T, H, K), v=make(B, T, HV, V), g=make(B, T, HV))
    given |= {"beta": make(B, T, HV)} if family == "gated_delta_rule" else {}
    with pytest.raises(errors.ShapeError) as caught:
        getattr(linattn, family)(**given, gate=gates.Softplus(make(HV), make(HV, K)))
    assert str(caught.value) == f"{family}: gate.dt_bias must be [G] = [4], got [4, 5]"


@pytest.mark.usefixtures("nothing_is_computed")
def test_parameters_of_another_framework(torch):
    x = {name: torch.from_numpy(a.astype(np.float32)) for name, a in draw().items()}
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.gla(x["q"], x["k"], x["v"], x["g"], gate=gates.Softplus(np.zeros(HV, np.float32)))
    assert str(caught.value) == (
        "gla: gate.A_log is a numpy array but q is a torch array: convert it, nothing is copied for you"
    )


@pytest.mark.usefixtures("nothing_is_computed")
def test_parameters_on_another_device(torch):
    x = {name: torch.from_numpy(a.astype(np.float32)) for name, a in draw().items()}
    with pytest.raises(errors.DeviceError) as caught:
        linattn.gla(x["q"], x["k"], x["v"], x["g"], gate=gates.Softplus(x["A_log"].to("meta")))
    assert str(caught.value) == "gla: gate.A_log is on meta but q is on cpu: move it, nothing is copied for you"


@pytest.mark.usefixtures("nothing_is_computed")
def test_integer_parameters(make):
    with pytest.raises(errors.DtypeError) as caught:
        linattn.gla(**arguments(make, "gla"), gate=gates.Softplus(make(HV, dtype="int32")))
    assert str(caught.value) == "gla: gate.A_log must be float16, bfloat16, float32 or float64, got int32"


@pytest.mark.usefixtures("nothing_is_computed")
def test_a_fixed_decay_is_no_projection(make):
    x = arguments(make, "gla")
    with pytest.raises(errors.OptionError) as caught:
        linattn.simple_gla(x["q"], x["k"], x["v"], make(HV), gate=gates.LogSigmoid())
    assert str(caught.value) == (
        "simple_gla: gate maps a projection g of every token, and g is a fixed decay [4]: call the gate object yourself, "
        "or drop it"
    )


@pytest.mark.parametrize("bound", [0.0, 1.0, -float("inf"), float("nan"), "-5", True])
def test_a_bound_is_negative(bound):
    with pytest.raises(errors.OptionError) as caught:
        gates.BoundedSigmoid(np.zeros(4), np.zeros(4), bound)
    assert str(caught.value) == f"BoundedSigmoid: lower_bound must be a negative number, got {bound!r}"


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf"), "16", True])
def test_a_temperature_is_positive(tau):
    with pytest.raises(errors.OptionError) as caught:
        gates.LogSigmoid(tau)
    assert str(caught.value) == f"LogSigmoid: tau must be a positive number, got {tau!r}"


@pytest.mark.parametrize(
    ("family", "keyword"), [("delta_rule", "gate"), ("linear_attn", "gate"), ("gla", "beta_map"), ("mixed_attn", "qk_norm")]
)
@pytest.mark.usefixtures("nothing_is_computed")
def test_a_map_of_what_a_family_has_not(family, keyword):
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{keyword}'$"):
        getattr(linattn, family)(*[np.zeros((1, 1, 1, 1))] * 5, **{keyword: "sigmoid"})
