"""The convolution and the norm by blocks of rows: the same as by plain operations, whatever a block holds."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from linattn_backends import companions  # noqa: E402
from linattn_backends.torch import blocks, conv, norm  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=[1, 40, 1 << 17], ids=["shortest blocks", "several blocks", "one block"], autouse=True)
def numbers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "NUMBERS", request.param)


def draw(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def results(function: Any, arrays: dict[str, Any], d: Any) -> list[Any]:
    """An output and the gradients of all arrays."""
    leaves = {name: x.detach().requires_grad_() for name, x in arrays.items()}
    y = function(**leaves)
    return [y, *torch.autograd.grad(y, list(leaves.values()), d)]


def agree(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * (1 + y.abs().sum().item() / max(1, y.numel())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("W", "activation", "bias", "state"),
    [(4, "silu", True, True), (4, None, False, False), (1, "silu", False, True), (8, None, True, True)],
)
def test_a_convolution(dtype, W, activation, bias, state):
    B, T, D = 3, 19, 5
    arrays = {"x": draw(B, D, T, dtype=dtype).mT, "weight": draw(D, W)}
    arrays |= ({"bias": draw(D)} if bias else {}) | ({"initial_state": draw(B, D, W - 1, dtype=dtype)} if state else {})
    d = draw(B, T, D, dtype=dtype)

    def of(short_conv):
        return results(lambda **given: short_conv(**given, activation=activation)[0], arrays, d)

    agree(of(conv.short_conv), of(companions.short_conv), DTYPES[dtype])


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("T", [8, 13])
def test_a_convolution_of_any_width(W, T):
    """The shortest sequence that goes by blocks among them."""
    arrays = {"x": draw(2, T, 3), "weight": draw(3, W), "bias": draw(3), "initial_state": draw(2, 3, W - 1)}
    d = draw(2, T, 3)

    def of(short_conv):
        return results(lambda **given: short_conv(**given, activation="silu")[0], arrays, d)

    agree(of(conv.short_conv), of(companions.short_conv), 1e-12)


def test_the_last_inputs_are_a_copy():
    x = draw(2, 9, 3)
    _, final = conv.short_conv(x, draw(3, 4), output_final_state=True)
    assert torch.equal(final, x[:, -3:].mT)
    before = final.clone()
    x.zero_()
    assert torch.equal(final, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
def test_a_norm(dtype, activation, norm_before_gate, group_size):
    arrays = {"x": draw(2, 7, 3, 8, dtype=dtype), "z": draw(2, 3, 7, 8, dtype=dtype).transpose(1, 2), "weight": draw(8)}
    options = dict(activation=activation, norm_before_gate=norm_before_gate, group_size=group_size, eps=1e-3)
    d = draw(2, 7, 3, 8, dtype=dtype)

    def of(gated_rms_norm):
        return results(lambda **given: gated_rms_norm(**given, **options), arrays, d)

    agree(of(norm.gated_rms_norm), of(companions.gated_rms_norm), DTYPES[dtype])


def short_conv(x: Any, weight: Any, bias: Any, state: Any) -> Any:
    return conv.short_conv(x, weight, bias, activation="silu", initial_state=state)[0]


def convolutions_of_one_filter(x: Any, weight: Any) -> Any:
    """And a state that is made of what it goes before."""
    bias, state = weight[:, 0], x[:, :2].mT
    return short_conv(short_conv(x, weight, bias, state), weight, bias, state)


def norms_of_one_weight(x: Any, weight: Any) -> Any:
    """And a gate that is made of what it gates."""
    return norm.gated_rms_norm(norm.gated_rms_norm(x, x, weight), x.sin(), weight)


OPERATORS = {"convolution": short_conv, "norm": norm.gated_rms_norm}
AGAIN = {"convolution": (convolutions_of_one_filter, (1, 9, 2), (2, 3)), "norm": (norms_of_one_weight, (3, 4), (4,))}


def operands(name: str) -> tuple[Any, ...]:
    given = {"convolution": ((1, 9, 2), (2, 3), (2,), (1, 2, 2)), "norm": ((3, 4), (3, 4), (4,))}
    return tuple(draw(*shape) for shape in given[name])


def training(name: str) -> tuple[Any, ...]:
    return tuple(x.requires_grad_() for x in operands(name))


def subsets(name: str) -> list[tuple[int, ...]]:
    places = range(len(operands(name)))
    return [some for n in range(1, len(places)) for some in combinations(places, n)]


@pytest.mark.parametrize(("name", "some"), [(name, some) for name in OPERATORS for some in subsets(name)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_some_arrays(name, some, create_graph):
    """Whether the others train or not."""
    arrays = training(name)
    y = OPERATORS[name](*arrays)
    d = torch.randn_like(y)
    whole = torch.autograd.grad(y, arrays, d, retain_graph=True)
    expected = [whole[i] for i in some]
    asked = torch.autograd.grad(y, [arrays[i] for i in some], d, create_graph=create_graph)
    agree(list(asked), expected, 1e-12)
    alone = [x.detach().requires_grad_(i in some) for i, x in enumerate(arrays)]
    y = OPERATORS[name](*alone)
    agree(list(torch.autograd.grad(y, [alone[i] for i in some], d, create_graph=create_graph)), expected, 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_inference(name):
    arrays = training(name)
    expected = OPERATORS[name](*arrays)
    with torch.inference_mode():
        y = OPERATORS[name](*arrays)
        again = OPERATORS[name](*(x.clone() for x in arrays))
    assert y.is_inference()
    assert torch.equal(y, expected)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("name", AGAIN)
def test_a_gradient_that_has_one_is_the_same(name):
    """Where arrays are made of one another, none is counted twice."""
    function, *shapes = AGAIN[name]
    arrays = [draw(*shape).requires_grad_() for shape in shapes]
    y = function(*arrays)
    d = torch.randn_like(y)
    once = torch.autograd.grad(y, arrays, d, retain_graph=True)
    agree(list(torch.autograd.grad(y, arrays, d, create_graph=True)), list(once), 1e-12)
    assert torch.autograd.gradcheck(function, arrays)
    assert torch.autograd.gradgradcheck(function, arrays)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_many_outputs_at_once(name, create_graph):
    """By ``is_grads_batched`` and by ``torch.func.vmap`` of a gradient."""
    arrays = training(name)
    y = OPERATORS[name](*arrays)
    many = draw(3, *y.shape)
    columns = zip(*(torch.autograd.grad(y, arrays, d, retain_graph=True) for d in many), strict=True)
    expected = [torch.stack(column) for column in columns]
    options = dict(retain_graph=True, create_graph=create_graph)
    agree(list(torch.autograd.grad(y, arrays, many, is_grads_batched=True, **options)), expected, 1e-12)
    agree(list(torch.func.vmap(lambda d: torch.autograd.grad(y, arrays, d, **options))(many)), expected, 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_jacobian_at_once(name):
    function, arrays = OPERATORS[name], operands(name)
    expected = torch.autograd.functional.jacobian(function, arrays)
    agree(list(torch.autograd.functional.jacobian(function, arrays, vectorize=True)), list(expected), 1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, of tangents
@pytest.mark.parametrize("name", OPERATORS)
def test_tangents_of_what_a_gradient_is_taken_of(name):
    """Forward over reverse: a gradient is linear in ``d``, so that a tangent of ``d`` has the gradient as its own."""
    arrays = training(name)
    y = OPERATORS[name](*arrays)
    d, tangent = torch.randn_like(y), torch.randn_like(y)
    with forward_ad.dual_level():
        found = torch.autograd.grad(y, arrays, forward_ad.make_dual(d, tangent), retain_graph=True)
        pairs = [forward_ad.unpack_dual(x) for x in found]
        agree([x.tangent for x in pairs], list(torch.autograd.grad(y, arrays, tangent, retain_graph=True)), 1e-12)
    agree([x.primal for x in pairs], list(torch.autograd.grad(y, arrays, d)), 1e-12)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_have_gradients(name):
    function, arrays = OPERATORS[name], training(name)
    assert torch.autograd.gradcheck(function, arrays)
    assert torch.autograd.gradgradcheck(function, arrays)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
@pytest.mark.parametrize("name", OPERATORS)
def test_where_operations_are_watched_they_are_pytorchs(name, monkeypatch):
    """Forward-mode derivatives, ``torch.func`` and ``torch.compile``."""
    function, arrays = OPERATORS[name], operands(name)
    tangents = tuple(torch.randn_like(x) for x in arrays)
    expected = function(*arrays)
    monkeypatch.setattr(blocks, "run", None)
    _, forward = torch.func.jvp(function, arrays, tangents)
    _, pull = torch.func.vjp(function, *arrays)
    pulled = pull(torch.ones_like(forward))
    torch.testing.assert_close(forward.sum(), sum((x * d).sum() for x, d in zip(pulled, tangents, strict=True)))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arrays), expected)
    with pytest.raises(TypeError, match="not callable"):
        function(*arrays)


def test_autocast_changes_nothing():
    x, z, weight = draw(4, 8, dtype=torch.float32), draw(4, 8, dtype=torch.float32), draw(8, dtype=torch.float32)
    expected = norm.gated_rms_norm(x, z, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm.gated_rms_norm(x, z, weight), expected)
