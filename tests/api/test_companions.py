"""``short_conv``, ``decode_short_conv`` and ``gated_rms_norm`` against their equations, written out, in every framework."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, INSTALLED, array, compiled, gradient
from linattn import errors

B, T, D = 2, 11, 6
WRITABLE = [name for name in INSTALLED if name in ("numpy", "torch")]


def draw(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32).astype(np.float64)


def index(framework: str, values: Any) -> Any:
    """Offsets or slots, int32."""
    values = np.asarray(values, np.int32)
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy(values)
    if framework == "jax":
        return pytest.importorskip("jax.numpy").asarray(values)
    return pytest.importorskip("mlx.core").array(values) if framework == "mlx" else values


def near(x: Any, y: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=2e-5, atol=2e-6)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def convolution(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, before: np.ndarray) -> np.ndarray:
    """A sequence ``[T, D]`` by numpy.convolve, channel by channel: ``before [D, W-1]`` are the inputs before the first."""
    if not len(x):
        return x
    channels = [np.convolve(np.concatenate([before[d], x[:, d]]), weight[d, ::-1], "valid") for d in range(x.shape[1])]
    return silu(np.stack(channels, 1).reshape(x.shape) + bias)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_convolution(framework, W):
    x, weight, bias, state = draw(B, T, D), draw(D, W), draw(D), draw(B, D, W - 1)
    given = [array(framework, a) for a in (x, weight, bias)]
    y, final = linattn.short_conv(
        *given, activation="silu", initial_state=array(framework, state), output_final_state=True
    )  # fmt: skip
    near(y, np.stack([convolution(x[b], weight, bias, state[b]) for b in range(B)]))
    near(final, np.concatenate([state, x.swapaxes(1, 2)], 2)[:, :, T:])
    plain, none = linattn.short_conv(given[0], given[1])
    near(plain, sum(np.pad(x, ((0, 0), (W - 1 - i, 0), (0, 0)))[:, :T] * weight[:, i] for i in range(W)))
    assert none is None


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("W", [1, 2, 4, 8])
@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences(framework, W, with_state):
    """Among them empty ones, and such as are shorter than the filter; behind the last one there is nothing."""
    lengths, tail = (0, 3, 0, 1, 9, 0), 4
    offsets = np.cumsum((0, *lengths))
    x, weight, bias = draw(1, offsets[-1] + tail, D), draw(D, W), draw(D)
    state = draw(len(lengths), D, W - 1) if with_state else np.zeros((len(lengths), D, W - 1))
    y, final = linattn.short_conv(
        *(array(framework, a) for a in (x, weight, bias)), activation="silu", cu_seqlens=index(framework, offsets),
        initial_state=array(framework, state) if with_state else None, output_final_state=True,
    )  # fmt: skip
    parts = [x[0, start:end] for start, end in pairwise(offsets)]
    near(y[0, : offsets[-1]], np.concatenate([convolution(p, weight, bias, s) for p, s in zip(parts, state, strict=True)]))
    assert not np.asarray(y[0, offsets[-1] :]).any()
    joined = [np.concatenate([s, p.T], 1) for p, s in zip(parts, state, strict=True)]
    near(final, np.stack([j[:, j.shape[1] - W + 1 :] for j in joined]))


def numeric(function: Any, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of a sum, from central differences."""
    found = np.zeros_like(x)
    for at in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[at] += step
        down[at] -= step
        found[at] = (function(up) - function(down)) / (2 * step)
    return found


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("name", ["x", "weight", "bias", "initial_state"])
def test_gradients_of_a_convolution(framework, name):
    W = 4
    arrays = dict(x=draw(1, 9, D), weight=draw(D, W), bias=draw(D), initial_state=draw(3, D, W - 1))
    offsets = (0, 2, 2, 8)

    def formula(value: np.ndarray) -> float:
        a = {**arrays, name: value}
        spans = enumerate(pairwise(offsets))
        return sum(convolution(a["x"][0, s:e], a["weight"], a["bias"], a["initial_state"][n]).sum() for n, (s, e) in spans)

    def ours(value: Any) -> Any:
        a = {**{key: array(framework, x) for key, x in arrays.items()}, name: value}
        return linattn.short_conv(**a, activation="silu", cu_seqlens=index(framework, offsets))[0]

    np.testing.assert_allclose(gradient(framework, ours, arrays[name]), numeric(formula, arrays[name]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("framework", WRITABLE)
@pytest.mark.parametrize(("W", "L"), [(1, 0), (2, 1), (4, 3), (4, 6), (8, 7)])
def test_decoding(framework, W, L):
    """Windows longer than the filter are shifted as a whole; others in the pool stay as they are."""
    x, weight, bias, pool = draw(3, 5, D), draw(D, W), draw(D), draw(6, D, L)
    slots = np.array([4, -1, 0])
    state = array(framework, pool)
    given = [array(framework, a) for a in (weight, bias)]
    cuts = ((0, 1), (1, 2), (2, 5))
    found = [
        linattn.decode_short_conv(
            array(framework, x[:, s:e]), *given, activation="silu", state=state, state_indices=index(framework, slots)
        )
        for s, e in cuts
    ]
    wanted, after = np.zeros_like(x), pool.copy()
    for n in (0, 2):
        past = pool[slots[n]]
        wanted[n] = convolution(x[n], weight, bias, past[:, L - W + 1 :])
        after[slots[n]] = np.concatenate([past, x[n].T], 1)[:, 5:]
    near(np.concatenate([np.asarray(y) for y in found], 1), wanted)
    near(state, after)


def test_a_pool_of_any_strides():
    torch = pytest.importorskip("torch")
    pool = torch.from_numpy(draw(3, 4, D)).float().transpose(1, 2)
    x, weight = torch.from_numpy(draw(3, 1, D)).float(), torch.from_numpy(draw(D, 4)).float()
    before = pool.clone()
    y = linattn.decode_short_conv(x, weight, state=pool)
    torch.testing.assert_close(pool, torch.cat([before, x.transpose(1, 2)], 2)[:, :, 1:])
    torch.testing.assert_close(y, linattn.short_conv(x, weight, initial_state=before[:, :, 1:])[0])


NORMS = [
    dict(activation=activation, norm_before_gate=first, group_size=size, eps=eps)
    for activation in ("silu", "sigmoid")
    for first in (True, False)
    for size, eps in ((None, 1e-5), (3, 0.1))
]


def norm(
    x: np.ndarray, z: np.ndarray, weight: np.ndarray, activation: str, norm_before_gate: bool, group_size: Any, eps: float
):
    """Row by row and group by group."""
    gate = silu(z) if activation == "silu" else 1 / (1 + np.exp(-z))
    h = x if norm_before_gate else x * gate
    y = np.zeros_like(x)
    for row in np.ndindex(*x.shape[:-1]):
        for start in range(0, D, group_size or D):
            part = h[row][start : start + (group_size or D)]
            y[row][start : start + (group_size or D)] = part / np.sqrt(np.mean(part**2) + eps)
    return y * weight * (gate if norm_before_gate else 1.0)


@pytest.mark.parametrize("framework", INSTALLED)
@pytest.mark.parametrize("options", NORMS, ids=str)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 3, 2)], ids=str)
def test_a_norm(framework, options, leading):
    x, z, weight = draw(*leading, D), draw(*leading, D, seed=4), draw(D)
    near(linattn.gated_rms_norm(*(array(framework, a) for a in (x, z, weight)), **options), norm(x, z, weight, **options))


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
@pytest.mark.parametrize("options", NORMS, ids=str)
@pytest.mark.parametrize("name", ["x", "z", "weight"])
def test_gradients_of_a_norm(framework, options, name):
    arrays = dict(x=draw(3, D), z=draw(3, D, seed=4), weight=draw(D))

    def ours(value: Any) -> Any:
        given = {key: array(framework, x) for key, x in arrays.items()}
        return linattn.gated_rms_norm(**{**given, name: value}, **options)

    wanted = numeric(lambda value: norm(**{**arrays, name: value}, **options).sum(), arrays[name])
    np.testing.assert_allclose(gradient(framework, ours, arrays[name]), wanted, rtol=1e-3, atol=1e-4)


def test_a_bfloat16_norm_is_rounded_once():
    torch = pytest.importorskip("torch")
    x, z, weight = (torch.from_numpy(a).bfloat16() for a in (draw(7, D), draw(7, D, seed=4), draw(D)))
    exact = norm(*(a.double().numpy() for a in (x, z, weight)), **NORMS[0])
    torch.testing.assert_close(linattn.gated_rms_norm(x, z, weight), torch.from_numpy(exact).bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_traced(framework):
    x, weight = array(framework, draw(B, T, D)), array(framework, draw(D, 4))

    def both(x: Any, weight: Any) -> Any:
        y, _ = linattn.short_conv(x, weight, activation="silu")
        return linattn.gated_rms_norm(y, x, weight[:, 0], norm_before_gate=False)

    near(compiled(framework, both)(x, weight), np.asarray(both(x, weight), np.float64))


def packed_and_compiled(torch, x, weight, offsets):
    return torch.compile(lambda *a: linattn.short_conv(a[0], a[1], cu_seqlens=a[2])[0], fullgraph=True, backend="eager")(
        x, weight, offsets
    )


def test_offsets_are_not_read_when_compiled(torch):
    x, weight, offsets = torch.randn(1, 9, D), torch.randn(D, 4), torch.tensor([0, 2, 2, 7])
    torch.testing.assert_close(
        packed_and_compiled(torch, x, weight, offsets), linattn.short_conv(x, weight, cu_seqlens=offsets)[0]
    )


def test_who_runs_it(make):
    plan = linattn.explain(linattn.short_conv, make(B, T, D), make(D, 4))
    assert plan.call.form == "direct"
    assert plan.method == "short_conv"
    assert plan.backend == plan.call.framework


BAD = [
    ("short_conv", dict(weight=(D, 9)), "W, the width of a filter, must be 1 … 8, got 9", errors.ShapeError),
    ("short_conv", dict(weight=(D, 0)), "W, the width of a filter, must be 1 … 8, got 0", errors.ShapeError),
    ("short_conv", dict(weight=(D - 1, 4)), "weight must be [D, W] = [6, W], got [5, 4]", errors.ShapeError),
    ("short_conv", dict(bias=(4,)), "bias must be [D] = [6], got [4]", errors.ShapeError),
    (
        "short_conv",
        dict(initial_state=(B, D, 4)),
        "initial_state must be [N, D, W-1] = [2, 6, 3], got [2, 6, 4]",
        errors.ShapeError,
    ),
    (
        "short_conv",
        dict(activation="gelu"),
        "activation must be 'silu' or None, a static Python value, got 'gelu'",
        errors.OptionError,
    ),
    ("decode_short_conv", dict(state=(B, D, 2)), "L must be at least W-1 = 3, got 2", errors.ShapeError),
    (
        "decode_short_conv",
        dict(state=(1, D, 3)),
        "state must have a slot for each of N = 2 sequences without state_indices, got P = 1",
        errors.ShapeError,
    ),
    ("gated_rms_norm", dict(z=(B, T, D - 1)), "z must be [..., D] = [2, 11, 6], got [2, 11, 5]", errors.ShapeError),
    ("gated_rms_norm", dict(z=(T, D)), "z must be [..., D] = [2, 11, 6], got [11, 6]", errors.ShapeError),
    ("gated_rms_norm", dict(weight=(B, D)), "weight must be [D] = [6], got [2, 6]", errors.ShapeError),
    ("gated_rms_norm", dict(group_size=4), "group_size must divide D = 6, got 4", errors.OptionError),
    ("gated_rms_norm", dict(group_size=0), "group_size must divide D = 6, got 0", errors.OptionError),
    ("gated_rms_norm", dict(eps=-1), "eps must be a finite number, 0 or larger, got -1", errors.OptionError),
    ("gated_rms_norm", dict(eps=float("nan")), "eps must be a finite number, 0 or larger, got nan", errors.OptionError),
    (
        "gated_rms_norm",
        dict(activation=None),
        "activation must be 'silu' or 'sigmoid', a static Python value, got None",
        errors.OptionError,
    ),
]

RIGHT = {
    "short_conv": dict(x=(B, T, D), weight=(D, 4)),
    "decode_short_conv": dict(x=(B, T, D), weight=(D, 4), state=(B, D, 3)),
    "gated_rms_norm": dict(x=(B, T, D), z=(B, T, D), weight=(D,)),
}


@pytest.mark.parametrize(("operator", "change", "text", "error"), BAD, ids=[f"{name}: {text}" for name, _, text, _ in BAD])
@pytest.mark.usefixtures("nothing_is_computed")
def test_bad_input(make, operator, change, text, error):
    given = {name: make(*value) if isinstance(value, tuple) else value for name, value in {**RIGHT[operator], **change}.items()}
    with pytest.raises(error) as caught:
        getattr(linattn, operator)(**given)
    assert str(caught.value) == f"{operator}: {text}"


@pytest.mark.parametrize("operator", RIGHT)
def test_what_is_computed_is_noticed(make, operator, nothing_is_computed):
    getattr(linattn, operator)(**{name: make(*shape) for name, shape in RIGHT[operator].items()})
    assert set(nothing_is_computed) & {operator, "short_conv"}
    nothing_is_computed.clear()


def test_decoding_has_no_gradient(torch):
    with pytest.raises(errors.OptionError) as caught:
        linattn.decode_short_conv(torch.ones(1, 1, D, requires_grad=True), torch.ones(D, 4), state=torch.ones(1, D, 3))
    assert str(caught.value) == (
        "decode_short_conv: has no gradient, because it overwrites state: call it under torch.no_grad(), or short_conv with "
        "initial_state and output_final_state=True"
    )


def test_jax_arrays_cannot_be_written_to():
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.decode_short_conv(jnp.ones((1, 1, D)), jnp.ones((D, 4)), state=jnp.ones((1, D, 3)))
    assert str(caught.value) == (
        "decode_short_conv: state is written to, and jax arrays cannot be: call short_conv with initial_state and "
        "output_final_state=True"
    )
