"""The convolution and the norm by blocks of rows: the same as by plain operations, whatever a block holds."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from linattn_backends import companions  # noqa: E402
from linattn_backends.torch import blocks, conv, norm  # noqa: E402

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


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


def second_derivatives() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    given = draw(1, 9, 2), draw(2, 3), draw(2), draw(1, 2, 2)
    return {
        "convolution": (lambda x, w, b, s: conv.short_conv(x, w, b, activation="silu", initial_state=s)[0], given),
        "norm": (lambda x, z, w: norm.gated_rms_norm(x, z, w), (draw(3, 4), draw(3, 4), draw(4))),
    }


@pytest.mark.parametrize("name", second_derivatives())
def test_gradients_have_gradients(name):
    function, arrays = second_derivatives()[name]
    arrays = tuple(x.requires_grad_() for x in arrays)
    assert torch.autograd.gradcheck(function, arrays)
    assert torch.autograd.gradgradcheck(function, arrays)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
@pytest.mark.parametrize("name", second_derivatives())
def test_where_operations_are_watched_they_are_pytorchs(name, monkeypatch):
    """Forward-mode derivatives, ``torch.func`` and ``torch.compile``."""
    function, arrays = second_derivatives()[name]
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
