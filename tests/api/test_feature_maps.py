"""Feature maps: values, gradients, tracing, on every framework."""

from __future__ import annotations

import math
import sys
import warnings

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn import errors, feature_maps
from linattn.feature_maps import Cosformer, Exp, FeatureMap, Hedgehog, Performer, Rebased, Rfa, T2r
from linattn.feature_maps.random_features import directions
from maps_for_tests import EXAMPLES, H, K


def draw(*shape):
    return np.random.standard_normal(shape).astype(np.float32)


def maker(framework):
    return lambda x: array(framework, x)


@pytest.fixture(autouse=True)
def every_map_is_compiled_afresh():
    """Dynamo counts the maps as recompilations of one function, and allows eight."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


# -- values and gradients --------------------------------------------------------------------------------------------


def test_every_map_has_an_example():
    assert {name.split()[0] for name in EXAMPLES} == set(feature_maps.MAPS)
    for name, example in EXAMPLES.items():
        assert type(example.map(maker("numpy"))) is feature_maps.MAPS[name.split()[0]]


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("name", EXAMPLES)
def test_values(framework, name):
    x = draw(2, 5, H, K)
    found = np.asarray(EXAMPLES[name].map(maker(framework))(array(framework, x)))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, EXAMPLES[name].truth(x), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", EXAMPLES)
def test_traced(framework, name):
    x = draw(2, 5, H, K)
    phi = EXAMPLES[name].map(maker(framework))
    found = np.asarray(compiled(framework, lambda x: phi(x))(array(framework, x)))
    np.testing.assert_allclose(found, EXAMPLES[name].truth(x), rtol=3e-5, atol=3e-6)


def central(function, x, direction, step=1e-6):
    """Derivative of the sum of ``function`` along a direction, in float64."""
    return (function(x + step * direction) - function(x - step * direction)).sum() / (2 * step)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", EXAMPLES)
def test_gradient_in_x(framework, name):
    x, weigh, along = draw(2, 5, H, K), None, draw(2, 5, H, K)
    weigh = draw(*EXAMPLES[name].truth(x).shape)
    phi, w = EXAMPLES[name].map(maker(framework)), array(framework, weigh)
    found = (gradient(framework, lambda x: phi(x) * w, x).astype(np.float64) * along).sum()
    expected = central(lambda x: EXAMPLES[name].truth(x) * weigh, x.astype(np.float64), along)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-2)


LEARNED = [(name, parameter) for name, example in EXAMPLES.items() for parameter in example.parameters]


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize(("name", "parameter"), LEARNED)
def test_gradient_in_a_parameter(framework, name, parameter):
    example, x = EXAMPLES[name], draw(2, 5, H, K)
    weigh, along = draw(*example.truth(x).shape), draw(*example.parameters[parameter].shape)
    x_there, w = array(framework, x), array(framework, weigh)
    others = {n: array(framework, p) for n, p in example.parameters.items() if n != parameter}
    found = gradient(framework, lambda p: example.make(**others, **{parameter: p})(x_there) * w, example.parameters[parameter])
    wide = {n: p.astype(np.float64) for n, p in example.parameters.items()}
    expected = central(lambda p: example.define(x, **{**wide, parameter: p}) * weigh, wide[parameter], along)
    assert (found.astype(np.float64) * along).sum() == pytest.approx(expected, rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_tokens(framework, name):
    phi = EXAMPLES[name].map(maker(framework))
    assert tuple(phi(array(framework, draw(2, 0, H, K))).shape) == (2, 0, *EXAMPLES[name].truth(draw(2, 1, H, K)).shape[2:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_dtypes(torch, name, dtype):
    """Features have the dtype of x, and are rounded to it once."""
    x = torch.from_numpy(draw(2, 5, H, K)).to(getattr(torch, dtype))
    found = EXAMPLES[name].map(maker("torch"))(x)
    assert found.dtype == x.dtype
    truth = EXAMPLES[name].truth(x.double().numpy())
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "float64": 2**-40}[dtype]
    twice = 4 if name in ("elu1", "relu2") else 1  # these compute in the dtype itself
    np.testing.assert_allclose(found.double().numpy(), truth, rtol=twice * unit * 1.01, atol=3e-7)


def test_elu1_does_not_overflow_behind_the_where():
    x = np.array([1e4, 3e38])
    for framework in DIFFERENTIABLE:
        np.testing.assert_array_equal(gradient(framework, feature_maps.Elu1(), x), [1, 1])


def test_relu_keeps_nan():
    assert np.isnan(feature_maps.Relu()(np.array([np.nan]))).all()


# -- parameters ------------------------------------------------------------------------------------------------------


def test_initial_hedgehog_is_exp_of_x_and_of_its_negative():
    x = draw(2, 5, H, K)
    np.testing.assert_allclose(Hedgehog(**Hedgehog.init(H, K))(x), np.exp(np.concatenate([x, -x], -1)), rtol=1e-6)


def test_initial_parameters():
    assert {name: p.shape for name, p in T2r.init(H, K, features=5).items()} == {"W": (H, K, 5), "b": (H, 5)}
    assert T2r.init(16, 64)["W"].var() == pytest.approx(1 / 64, rel=0.05)
    assert (T2r.init(H, K, seed=1)["W"] == T2r.init(H, K, seed=1)["W"]).all()
    assert (T2r.init(H, K, seed=1)["W"] != T2r.init(H, K, seed=2)["W"]).all()
    q, k = draw(1, 1, H, K), draw(1, 1, H, K)
    phi = Rebased(**Rebased.init(H, K))
    unit = [(x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) for x in (q, k)]
    np.testing.assert_allclose((phi(q) * phi(k)).sum(-1), (unit[0] * unit[1]).sum(-1) ** 2 / K, rtol=1e-3, atol=1e-5)
    for parameters in (Hedgehog.init(H, K), T2r.init(H, K), Rebased.init(H, K)):
        assert all(p.dtype == np.float32 for p in parameters.values())


# -- random features -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phi", [Performer(seed=3), Rfa(seed=3), Performer(), Rfa()])
def test_one_seed_gives_the_same_features_everywhere(phi):
    x = 1e-3 * np.eye(K, dtype=np.float32)  # so that what is compared is the numbers drawn
    for framework in INSTALLED:
        np.testing.assert_allclose(np.asarray(phi(array(framework, x))), phi(x), rtol=1e-6)


def test_seeds_differ_and_draws_are_known():
    x = draw(5, K)
    assert not np.allclose(Performer(seed=1)(x), Performer(seed=2)(x))
    # the first numbers of two seeds, written down: a release that drew others would break stored models
    np.testing.assert_allclose(directions(0, 4, 3, False)[0], [0.12573022, -0.13210486, 0.64042265], rtol=1e-6)
    np.testing.assert_allclose(directions(7, 4, 8, True)[0, :3], [-0.83954106, -0.60226992, -0.10180218], rtol=1e-6)


def test_orthogonal_directions_are_orthogonal_in_blocks():
    w = directions(5, 4, 10, True)
    assert w.shape == (4, 10)
    for block in (w[:, :4], w[:, 4:8], w[:, 8:]):
        products = block.T @ block
        np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-12)


def test_random_features_in_torch_s_modes(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for phi in (Performer(seed=11), Rfa(seed=11)):
        with FakeTensorMode() as mode:
            assert phi(mode.from_tensor(torch.randn(2, 5, H, K))).shape == (2, 5, H, 2 * K)
        with torch.inference_mode():
            phi(torch.randn(2, 5, H, K))
        x = torch.randn(2, 5, H, K, requires_grad=True)
        phi(x).sum().backward()  # nothing of the modes before is left over
        assert torch.isfinite(x.grad).all()
        torch.testing.assert_close(torch.func.vmap(phi)(x), phi(x))
        exported = torch.export.export(_Module(torch, phi), (x,)).module()(x)
        torch.testing.assert_close(exported, phi(x))


def _Module(torch, phi):
    class Module(torch.nn.Module):
        def forward(self, x):
            return phi(x)

    return Module()


# -- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", INSTALLED)
def test_cosformer_starts_where_it_is_told(framework):
    x = array(framework, draw(2, 6, H, K))
    whole = np.asarray(Cosformer(M=16)(x))
    for start in (4, np.int64(4), array(framework, np.array(4)), array(framework, np.array([4, 4]))):
        np.testing.assert_allclose(np.asarray(Cosformer(M=16, start=start)(x[:, 4:])), whole[:, 4:], rtol=1e-5, atol=1e-6)


def test_cosformer_decodes_from_a_state(make):
    q, k, v = make(1, 9, 2, 8), make(1, 9, 2, 8), make(1, 9, 2, 4)
    whole, _ = linattn.linear_attn(q, k, v, feature_map=Cosformer(M=32), normalize=True)
    o, state = linattn.linear_attn(
        q[:, :5], k[:, :5], v[:, :5], feature_map=Cosformer(M=32), normalize=True, output_final_state=True
    )
    found = [o]
    for t in range(5, 9):
        here, options = slice(t, t + 1), {"initial_state": state, "output_final_state": True, "normalize": True}
        o, state = linattn.linear_attn(q[:, here], k[:, here], v[:, here], feature_map=Cosformer(M=32, start=t), **options)
        found.append(o)
    np.testing.assert_allclose(np.concatenate([np.asarray(o) for o in found], 1), np.asarray(whole), rtol=1e-4, atol=1e-5)


def test_cosformer_needs_no_positions_in_packed_sequences(make):
    q, k, v = make(1, 9, 2, 8), make(1, 9, 2, 8), make(1, 9, 2, 4)
    offsets = np.array([0, 4, 9])
    given = offsets if isinstance(q, np.ndarray) else pytest.importorskip("torch").from_numpy(offsets)
    options = {"feature_map": Cosformer(M=32), "normalize": True}
    packed, _ = linattn.linear_attn(q, k, v, cu_seqlens=given, **options)
    alone, _ = linattn.linear_attn(q[:, 4:], k[:, 4:], v[:, 4:], **options)
    np.testing.assert_allclose(np.asarray(packed[:, 4:]), np.asarray(alone), rtol=1e-4, atol=1e-5)


# -- large numbers ---------------------------------------------------------------------------------------------------

EXPONENTIALS = {
    "exp": lambda make: Exp(),
    "hedgehog": lambda make: Hedgehog(make(np.tile(np.eye(K, dtype=np.float32), (H, 1, 1)))),
}


LONG = EXPONENTIALS | {
    "hedgehog, softmax": lambda make: Hedgehog(make(np.tile(np.eye(K, dtype=np.float32), (H, 1, 1))), softmax=True),
}


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponents_are_held_where_sums_of_weights_are_finite(framework, name):
    x = np.array([-1e30, -200, -36, -34, 0.5, 34, 36, 1e30, np.nan], np.float32)
    rows = np.broadcast_to(x[:, None, None], (len(x), H, K)).copy()
    found = np.asarray(EXPONENTIALS[name](maker(framework))(array(framework, rows)))[:, 0]
    wanted = np.exp(x.clip(-feature_maps.base.HIGHEST, feature_maps.base.HIGHEST).astype(float))
    np.testing.assert_allclose(found[:, 0], wanted, rtol=3e-5)
    np.testing.assert_allclose(found[:, -1], 1 / wanted if name == "hedgehog" else wanted, rtol=3e-5)


@pytest.mark.parametrize("framework", INSTALLED)
def test_shares_are_held_where_a_product_of_two_does_not_vanish(framework):
    """Of 20, 0, -14 and -16 from the first; and what is not a number stays so."""
    y = np.array([[20, 0, -14, -16], [20, 0, np.nan, -16]], np.float32)
    phi = Hedgehog(maker(framework)(np.eye(4, dtype=np.float32)[None]), softmax=True, negation=False)
    found = np.asarray(phi(array(framework, y[:, None])))[:, 0]
    np.testing.assert_allclose(found[0], np.exp([-math.log1p(math.exp(-20)), -20, -34, -35]), rtol=3e-5)
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_no_gradient_passes_below_what_shares_are_held_to(framework):
    """However large it is: behind a normaliser it is some 10^15."""
    x = np.array([20, 0, -14, -16], np.float32).reshape(1, 1, 4)
    phi = Hedgehog(maker(framework)(np.eye(4, dtype=np.float32)[None]), softmax=True, negation=False)
    weights = array(framework, np.array([1, 2, 3, 1e15], np.float32))
    found = gradient(framework, lambda x: phi(x) * weights, x)[0, 0]
    p = np.exp([0, -20, -34, -36.0])
    wanted = p * ([1, 2, 3, 0] - p @ [1, 2, 3, 0])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LONG)
def test_queries_and_keys_of_any_length_give_finite_means_and_gradients(name, dtype):
    """A sum of weights past float32 would make an output ``inf / inf``, and every gradient of the model not a number."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 100, H, K) for _ in range(3))
    q, k, v = (x.to(getattr(torch, dtype)).requires_grad_() for x in (100 * q, 100 * k, v))
    phi = LONG[name](torch.from_numpy)
    o, state = linattn.linear_attn(q, k, v, feature_map=phi, normalize=True, output_final_state=True)
    assert o.isfinite().all()
    assert state.isfinite().all()
    assert o.abs().max() <= 1.01 * v.abs().max()
    assert all(found.isfinite().all() for found in torch.autograd.grad(o.float().square().sum(), (q, k, v)))
    assert feature_maps.distillation_loss(phi, q, k).isfinite()


# -- in operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["chunk_gla", "linear_attn", "recurrent_kda"])
def test_an_operator_maps_queries_and_keys_and_nothing_else(make, operator):
    q, k, v = (make(1, 5, 2, 8) for _ in range(3))
    extra = {"chunk_gla": (-abs(v),), "linear_attn": (), "recurrent_kda": (-abs(v), abs(v[..., 0]))}[operator]
    function = getattr(linattn, operator)
    phi = Exp(t=0.5)
    mapped, _ = function(q, k, v, *extra, feature_map=phi)
    plain, _ = function(phi(q), phi(k), v, *extra)
    assert (mapped == plain).all()


@pytest.mark.parametrize("name", EXAMPLES)
def test_linear_attention_with_every_map(make, name):
    """Normalised weights sum to one: values of one give an output of one, wherever weights are positive."""
    q, k = make(2, 9, H, K), make(2, 9, H, K)
    phi = EXAMPLES[name].map(lambda x: _like(q, x))
    v = q[..., :4] * 0 + 1
    if phi.signed:
        assert tuple(linattn.linear_attn(q, k, v, feature_map=phi)[0].shape) == tuple(v.shape)
        return
    o, _ = linattn.linear_attn(q, k, v, feature_map=phi, normalize=True)
    weights = np.asarray(feature_maps.attention_weights(phi, q, k))
    sums = weights.sum(-1).swapaxes(1, 2)[..., None]  # zero where nothing is attended to
    np.testing.assert_allclose(np.where(sums < 0.5, 0, 1), sums, atol=1e-5)
    np.testing.assert_allclose(np.asarray(o), np.broadcast_to(sums, o.shape), atol=1e-5)
    assert weights.min() > -1e-6


def _like(x, parameter):
    return parameter if isinstance(x, np.ndarray) else pytest.importorskip("torch").from_numpy(parameter)


def test_mixed_attn_maps_its_linear_heads(make):
    x = make(1, 12, 2, 8)
    mapped, _ = linattn.mixed_attn(x, x, x, x, x, chunk_size=4, feature_map="relu")
    r = feature_maps.Relu()(x)
    plain, _ = linattn.mixed_attn(x, x, r, r, x, chunk_size=4)
    assert (mapped == plain).all()


def test_a_map_of_one_s_own(make):
    class Twice(FeatureMap):
        def __call__(self, x):
            return x + x

    x = make(1, 5, 2, 8)
    mapped, _ = linattn.linear_attn(x, x, x, feature_map=Twice(), normalize=True)
    plain, _ = linattn.linear_attn(x + x, x + x, x, normalize=True)
    assert (mapped == plain).all()


def test_a_map_that_is_made_inside_a_compiled_model(torch):
    parameters = torch.nn.ParameterDict({name: torch.from_numpy(p) for name, p in Hedgehog.init(H, K).items()})

    def model(x, start):
        phi = Hedgehog(**dict(parameters.items()))  # PyTorch 2.9 to 2.11 do not trace ** of a ParameterDict itself
        o, _ = linattn.linear_attn(x, x, x, feature_map=phi, normalize=True)
        o, _ = linattn.linear_attn(o, o, o, feature_map="performer", normalize=True)
        return linattn.linear_attn(o, o, o, feature_map=Cosformer(M=64, start=start), normalize=True)[0]

    fast = torch.compile(model, fullgraph=True, backend="eager")
    for start in range(4):
        x = torch.randn(1, 6 + start // 2, H, K)
        torch.testing.assert_close(fast(x, start), model(x, start))
    fast(x, 0).sum().backward()
    assert parameters["W"].grad.abs().sum() > 0


def test_a_map_that_is_made_inside_a_jax_gradient():
    jax = pytest.importorskip("jax")
    parameters, x = Hedgehog.init(H, K), draw(1, 6, H, K)

    @jax.jit
    def loss(parameters):
        return linattn.linear_attn(jax.numpy.asarray(x), x_, x_, feature_map=Hedgehog(**parameters))[0].sum()

    x_ = jax.numpy.asarray(x)
    gradients = jax.grad(loss)(parameters)
    assert {name: g.shape for name, g in gradients.items()} == {name: p.shape for name, p in parameters.items()}


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_products_on_jax_are_not_rounded(name):
    """Accelerators round the float32 operands of a product unless told otherwise."""
    jax = pytest.importorskip("jax")
    program = str(jax.make_jaxpr(EXAMPLES[name].map(jax.numpy.asarray))(draw(2, 5, H, K)))
    assert program.count("dot_general") == program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")


def test_temperature():
    np.testing.assert_allclose(Exp(t=2.0)(np.array([0.5, -1.0])), np.exp([1.0, -2.0]))
    assert Exp(t=2.0) == Exp(t=2.0) != Exp()


def test_equal_maps_are_equal():
    assert Performer(seed=1) == Performer(seed=1) != Performer(seed=2)
    assert Rfa() != Rfa(features=3)


@pytest.mark.parametrize("name", feature_maps.MAPS)
def test_a_name_makes_the_map_or_says_what_it_needs(name):
    needs = {"hedgehog": "W", "t2r": "W", "cosformer": "M", "rebased": "gamma, beta"}
    if name not in needs:
        assert feature_maps.resolve(name) == feature_maps.MAPS[name]()
        return
    cls = feature_maps.MAPS[name].__name__
    with pytest.raises(errors.OptionError) as caught:
        feature_maps.resolve(name)
    assert str(caught.value) == (
        f"feature map '{name}' needs {needs[name]}: pass the object linattn.feature_maps.{cls}({needs[name]})"
    )


# -- bad input -------------------------------------------------------------------------------------------------------


def zeros(*shape):
    return np.zeros(shape, np.float32)


WRONG = {
    "head count": (
        Hedgehog(zeros(4, K, K)),
        errors.ShapeError,
        "hedgehog: W must be [H, K, D] = [3, 8, D], got [4, 8, 8]",
    ),
    "width": (T2r(zeros(H, 16, 5)), errors.ShapeError, "t2r: W must be [H, K, D] = [3, 8, D], got [3, 16, 5]"),
    "bias": (Hedgehog(zeros(H, K, 5), zeros(H, K)), errors.ShapeError, "hedgehog: b must be [H, D] = [3, 5], got [3, 8]"),
    "gamma": (Rebased(zeros(K), zeros(H, K)), errors.ShapeError, "rebased: gamma must be [H, K] = [3, 8], got [8]"),
    "beta": (Rebased(zeros(H, K), zeros(H, 1)), errors.ShapeError, "rebased: beta must be [H, K] = [3, 8], got [3, 1]"),
    "no array": (
        Hedgehog([[1.0]]),
        errors.FrameworkError,
        "hedgehog: W: expected an array of numpy, torch, jax or mlx, got list",
    ),
    "whole numbers": (
        Hedgehog(np.zeros((H, K, 5), np.int64)),
        errors.DtypeError,
        "hedgehog: W must be float16, bfloat16, float32 or float64, got int64",
    ),
    "a start for other rows": (
        Cosformer(M=64, start=np.array([3])),
        errors.ShapeError,
        "cosformer: start must be [B] = [2], got [1]",
    ),
    "a start for every token": (
        Cosformer(M=64, start=np.zeros((2, 5), np.int64)),
        errors.ShapeError,
        "cosformer: start must be [B] = [2], got [2, 5]",
    ),
    "a start between two tokens": (
        Cosformer(M=64, start=1.5),
        errors.FrameworkError,
        "cosformer: start: expected an array of numpy, torch, jax or mlx, got float",
    ),
    "too many rolls": (feature_maps.Dpfp(nu=16), errors.OptionError, "dpfp: nu must be in 1 … 2K-1 = 15, got 16"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_parameters(what):
    phi, error, text = WRONG[what]
    x = draw(2, 5, H, K)
    with pytest.raises(error) as caught:
        linattn.linear_attn(x, x, x, feature_map=phi)
    assert str(caught.value) == text
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Performer(features=0), "performer: features must be an integer of at least 1, got 0"),
        (lambda: Performer(features=True), "performer: features must be an integer of at least 1, got True"),
        (lambda: Performer(seed=-1), "performer: seed must be an integer of at least 0, got -1"),
        (lambda: Rfa(features=-1), "rfa: features must be an integer of at least 1, got -1"),
        (lambda: Rfa(seed=None), "rfa: seed must be an integer of at least 0, got None"),
        (lambda: Cosformer(M=0), "cosformer: M must be an integer of at least 1, got 0"),
        (lambda: Cosformer(M=2.5), "cosformer: M must be an integer of at least 1, got 2.5"),
        (lambda: feature_maps.Dpfp(nu=0), "dpfp: nu must be an integer of at least 1, got 0"),
        (lambda: feature_maps.Dpfp(nu="2"), "dpfp: nu must be an integer of at least 1, got '2'"),
        (lambda: T2r.init(2, 3, features=0), "t2r: features must be an integer of at least 1, got 0"),
        (lambda: T2r.init(2, 3, seed=0.5), "t2r: seed must be an integer of at least 0, got 0.5"),
        (lambda: Hedgehog.init(2, 0), "hedgehog: K must be an integer of at least 1, got 0"),
        (lambda: Rebased.init(0, 3), "rebased: H must be an integer of at least 1, got 0"),
    ],
)
def test_wrong_options(make, text):
    with pytest.raises(errors.OptionError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize("phi", [Hedgehog(**Hedgehog.init(H, K)), Rebased(**Rebased.init(H, K)), Cosformer(M=8)])
def test_maps_that_need_heads_or_positions_say_so(phi):
    with pytest.raises(errors.ShapeError, match=r"^\w+: x must be \[\.\.\., T, H, K\], got \[5, 8\]$"):
        phi(draw(5, K))


def test_parameters_of_another_framework(torch):
    x = torch.randn(1, 5, H, K)
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.linear_attn(x, x, x, feature_map=Hedgehog(**Hedgehog.init(H, K)))
    assert str(caught.value) == "hedgehog: W is a numpy array but x is a torch array: convert it, nothing is copied for you"


def test_a_start_of_another_framework(torch):
    text = "^cosformer: start is a numpy array but x is a torch array: convert it, nothing is copied for you$"
    with pytest.raises(errors.FrameworkError, match=text):
        Cosformer(M=64, start=np.array([3, 3]))(torch.randn(2, 5, H, K))


@pytest.mark.parametrize("framework", INSTALLED)
def test_features_are_not_rounded_to_another_kind_of_number(framework):
    """In the dtype of x, features of whole numbers would be whole numbers, and those of truths truths."""
    x = array(framework, draw(2, 5, H, K)) > 0
    with pytest.raises(errors.DtypeError) as caught:
        Exp()(x)
    assert str(caught.value).startswith("exp: x must be float16, bfloat16, float32 or float64, got bool")


def test_parameters_on_another_device(torch):
    W = torch.empty(H, K, K, device="meta")
    with pytest.raises(errors.DeviceError) as caught:
        Hedgehog(W)(torch.randn(1, 5, H, K))
    assert str(caught.value) == "hedgehog: W is on meta but x is on cpu: move it, nothing is copied for you"


def test_a_state_of_the_width_before_the_map(make):
    x, state = make(1, 5, H, K), make(1, H, K, K)
    with pytest.raises(errors.ShapeError) as caught:
        linattn.linear_attn(x, x, x, initial_state=state, feature_map="taylor2")
    assert str(caught.value) == "linear_attn: initial_state must be [N, HV, K, V] = [1, 3, 73, 8], got [1, 3, 8, 8]"
    assert caught.value.__notes__ == ["K (L in mixed_attn) is the width after the feature map"]


@pytest.mark.parametrize(("name", "cls"), [("identity", "Identity"), ("rfa", "Rfa")])
def test_signed_weights_and_a_normaliser_give_a_warning(make, name, cls):
    x = make(1, 5, H, K)
    with pytest.warns(errors.SignedWeightsWarning) as caught:
        linattn.chunk_linear_attn(x, x, x, feature_map=name, normalize=True)
    assert [str(warning.message) for warning in caught] == [
        f"chunk_linear_attn: normalize=True divides by a sum of weights, and those of {cls} can be negative: the sum can come "
        f"close to zero and the output grow without bound. Take a map whose weights are positive, or drop normalize"
    ]
    assert caught[0].filename == __file__


def test_cosformer_warns_of_more_tokens_than_its_distance(make):
    x = make(1, 5, H, K)
    with pytest.warns(errors.SignedWeightsWarning, match="those of Cosformer can be negative"):
        linattn.linear_attn(x, x, x, feature_map=Cosformer(M=3), normalize=True)
    with pytest.warns(errors.SignedWeightsWarning, match="those of Cosformer can be negative"):
        linattn.linear_attn(x, x, x, feature_map=Cosformer(M=4, start=1), normalize=True)
    with pytest.warns(errors.SignedWeightsWarning, match="those of Cosformer can be negative"):
        linattn.linear_attn(x, x, x, feature_map=Cosformer(M=4, start=np.int64(1)), normalize=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linattn.linear_attn(x, x, x, feature_map=Cosformer(M=4), normalize=True)
        linattn.linear_attn(x, x, x, feature_map=Cosformer(M=3))


def test_signed_weights_warn_once_when_compiled(torch):
    x = torch.randn(1, 5, H, K)
    f = torch.compile(
        lambda x: linattn.linear_attn(x, x, x, feature_map="rfa", normalize=True)[0], fullgraph=True, backend="eager"
    )
    with pytest.warns(errors.SignedWeightsWarning, match="those of Rfa can be negative"):
        f(x)
