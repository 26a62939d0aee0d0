"""Gated RMS norms in the interpreter, forward and backward, against the formulas in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linattn_backends.triton.norm import gated_rms_norm, op
from linattn_backends.triton.runtime import launch
from linattn_backends.triton.runtime.device import standing_in
from linattn_backends.triton.runtime.precompile import Rehearsal, without_memory
from triton_cases import pretend

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the interpreter truncates to bfloat16
FORMS = [("silu", True), ("silu", False), ("sigmoid", True), ("sigmoid", False)]


def exact(x):
    return x.detach().double().numpy()


def gate_and_slope(z, activation):
    s = 1 / (1 + np.exp(-z))
    return (z * s, s + z * s * (1 - s)) if activation == "silu" else (s, s * (1 - s))


def reference(x, z, weight, dy, eps, activation, norm_before_gate, group_size):
    """``y``, and the gradients of ``x``, ``z`` and ``weight``."""
    grouped = (*x.shape[:-1], x.shape[-1] // group_size, group_size)
    a, slope = gate_and_slope(z, activation)
    u = (x if norm_before_gate else x * a).reshape(grouped)
    r = (np.square(u).mean(-1, keepdims=True) + eps) ** -0.5
    n = (u * r).reshape(x.shape)
    e = dy * weight * (a if norm_before_gate else 1)
    along = (e * n).reshape(grouped).mean(-1, keepdims=True)
    du = (r * (e.reshape(grouped) - n.reshape(grouped) * along)).reshape(x.shape)
    rows = tuple(range(x.ndim - 1))
    if norm_before_gate:
        return n * weight * a, du, dy * n * weight * slope, (dy * n * a).sum(rows)
    return n * weight, du * a, du * x * slope, (dy * n).sum(rows)


def draw(*shape, dtype=torch.float32, other=torch.float32, seed=0):
    """Seeded ``x, z, weight``; ``other`` is the weight's dtype."""
    torch.manual_seed(seed)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(other)


def error(found, wanted, dtype=None):
    """The largest one as a part of the largest number, in units of what ``found``'s dtype, or a coarser one, allows."""
    assert found.shape == wanted.shape
    if wanted.size == 0:
        return 0.0
    tolerance = max(TOLERANCE[found.dtype], TOLERANCE[dtype or found.dtype])
    return np.abs(exact(found) - wanted).max() / max(np.abs(wanted).max(), 1e-30) / tolerance


def compare(given, activation="silu", norm_before_gate=True, group_size=None, eps=1e-5, dy=None):
    """The output and every gradient; and inputs stay as they were."""
    before = [x.clone() for x in given]
    inputs = [x if x.requires_grad else x.requires_grad_() for x in given]
    options = dict(activation=activation, norm_before_gate=norm_before_gate, eps=eps)
    y = gated_rms_norm(*inputs, group_size=group_size, **options)
    assert y.dtype == inputs[0].dtype
    dy = torch.randn(y.shape).to(y.dtype) if dy is None else dy
    found = torch.autograd.grad(y, inputs, dy)
    wanted, *grads = reference(*map(exact, (*inputs, dy)), **options, group_size=group_size or y.shape[-1])
    errors = [error(y, wanted)]
    for x, gradient, expected in zip(inputs, found, grads, strict=True):
        assert gradient.dtype == x.dtype
        errors.append(error(gradient, expected, y.dtype))
    assert max(errors) < 1, errors
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("group_size", [None, 3, 8, 12])
@pytest.mark.parametrize(("activation", "norm_before_gate"), FORMS)
def test_groups(activation, norm_before_gate, group_size):
    compare(draw(3, 5, 24), activation, norm_before_gate, group_size)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_groups_of_one_column(norm_before_gate):
    """Without an epsilon their norm would be a sign, without a gradient."""
    compare(draw(3, 5, 6), norm_before_gate=norm_before_gate, group_size=1, eps=1.0)
    compare(draw(1, 1), norm_before_gate=norm_before_gate, eps=1.0)


@pytest.mark.parametrize("shape", [(7,), (4, 1, 3, 20), (300, 5), (3, 2000), (2, 2049), (2, 9000)])
def test_shapes(shape):
    compare(draw(*shape))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 3, 8)])
def test_no_rows(shape):
    """The weight's gradient is zero."""
    compare(draw(*shape))


def test_zeros_have_a_gradient():
    x, z, weight = draw(4, 9)
    compare((0 * x, z, weight), eps=1e-3)
    compare((x, 0 * z, weight), norm_before_gate=False, eps=1e-3)


@pytest.mark.parametrize("eps", [0.0, 1e-2, 3.0])
def test_epsilon(eps):
    compare(draw(4, 9), eps=eps)


@pytest.mark.parametrize("z", [-200.0, 200.0])
@pytest.mark.parametrize(("activation", "norm_before_gate"), FORMS)
def test_gates_far_out(activation, norm_before_gate, z):
    x, _, weight = draw(4, 9)
    given = x.requires_grad_(), torch.full((4, 9), z, requires_grad=True), weight.requires_grad_()
    y = gated_rms_norm(*given, activation=activation, norm_before_gate=norm_before_gate)
    wanted, *_ = reference(*map(exact, given), np.ones((4, 9)), 1e-5, activation, norm_before_gate, 9)
    assert np.abs(exact(y) - wanted).max() < 2e-6 * max(np.abs(wanted).max(), 1)
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), given))


def test_a_gate_that_is_not_a_number_shows():
    x, z, weight = draw(2, 8)
    z[1, 3] = torch.nan
    for activation, norm_before_gate in FORMS:
        y = gated_rms_norm(x, z, weight, activation=activation, norm_before_gate=norm_before_gate)
        assert y[1, 3].isnan()
        assert y[0].isfinite().all()


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_sixteen_bits(norm_before_gate, dtype, other):
    compare(draw(9, 40, dtype=dtype, other=other), norm_before_gate=norm_before_gate)


def test_a_gate_of_another_dtype():
    x, z, weight = draw(9, 40)
    compare((x.bfloat16(), z, weight))


def heads_of(part, B=2, T=5, H=3, V=8):
    """``[B, T, H, V]`` as a part of a wide projection: heads next to each other, tokens not."""
    torch.manual_seed(part)
    wide = torch.randn(B, T, 2 * H * V + 4)
    return wide[..., part * H * V : (part + 1) * H * V].unflatten(-1, (H, V))


@pytest.mark.parametrize("group_size", [None, 4])
def test_heads_of_a_projection_are_read_where_they_lie(group_size, monkeypatch):
    x, z = heads_of(0), heads_of(1)
    assert not x.flatten(0, 1).is_contiguous()
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    compare((x, z, torch.randn(8)), group_size=group_size, dy=torch.randn(2, 5, 3, 8))


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
        lambda x: torch.stack((x, x), -1)[..., 0],
        lambda x: x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        lambda x: x.flip(0).contiguous().flip(0),
    ],
)
def test_strides(laid_out):
    x, z, weight = draw(2, 4, 3, 8)
    compare((laid_out(x), z, weight), dy=torch.randn(2, 4, 3, 8))
    compare((x, laid_out(z), torch.stack((weight, weight), 1)[:, 0]), dy=laid_out(torch.randn(2, 4, 3, 8)))


def test_an_expanded_gradient():
    x, z, weight = draw(3, 8)
    compare((x, z, weight), dy=torch.ones(()).expand(3, 8))


def test_twice_the_same_bits():
    given = [x.requires_grad_() for x in draw(700, 12)]
    results = []
    for _ in range(2):
        y = gated_rms_norm(*given, group_size=4)
        results.append((y, *torch.autograd.grad(y.square().sum(), given)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_several_programs_share_the_rows(monkeypatch):
    pretend(monkeypatch, num_sms=3)
    compare(draw(50, 3, 600), group_size=300)


def test_rows_that_lie_past_32_bits():
    """Memory is never touched but where elements are, so little of it is real."""
    far = 1 << 30
    x = torch.empty(3 * far + 8, dtype=torch.bfloat16).as_strided((4, 8), (far, 1))
    x.copy_(torch.randn(4, 8))
    weight = torch.randn(8)
    assert torch.equal(gated_rms_norm(x, x, weight), gated_rms_norm(x.clone(), x.clone(), weight))


@pytest.fixture
def poisoned(monkeypatch):
    """What is made without being filled holds NaN."""
    empty = torch.empty

    def filled(*args, **options):
        x = empty(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("group_size", [None, 3])
def test_every_output_is_written(group_size):
    compare(draw(5, 7, 81), group_size=group_size)


def test_nothing_is_read_on_the_host():
    """Arrays without data give the same launches."""
    x, z, weight = map(without_memory, draw(5, 7, 12))
    stage = Rehearsal(torch.device("cpu"))
    with standing_in(stage):
        (y,) = op.computed(x, z, weight, 1e-5, 4, True, True)
        op.backward(y, x, z, weight, 1e-5, 4, True, True)
    launched = [kernel.__name__ for kernel, *_ in stage.launches]
    assert launched == ["norm_outputs_fwd", "norm_gradients_bwd", "column_sums"]


def test_opcheck():
    given = [x.requires_grad_() for x in draw(3, 2, 8)]
    torch.library.opcheck(op.norm, (*given, 1e-5, 4, True, False))
    plain = [x.detach() for x in given]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.norm_backward, (plain[0], *plain, 1e-5, 4, True, False), test_utils=tests)


def test_transforms():
    """One call for each row under ``vmap``, gradients too."""
    x, z, weight = draw(3, 2, 8)

    def loss(x, z, weight):
        return gated_rms_norm(x, z, weight, group_size=4).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, 0, None))(x, z, weight)
    alone = [torch.func.grad(loss, (0, 1, 2))(*row, weight) for row in zip(x, z, strict=True)]
    for found, expected in zip(mapped, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_graph_has_a_node_of_ours_where_a_gradient_is_asked_for(form, gradient):
    """Else it has operations of PyTorch."""
    torch._dynamo.reset()
    nodes, options = [], dict(activation=form[0], norm_before_gate=form[1], group_size=4)

    def noted(graph, inputs):
        nodes.extend(node.target for node in graph.graph.nodes)
        return graph

    given = [x.requires_grad_(gradient) for x in draw(3, 8)]
    compiled = torch.compile(lambda *x: gated_rms_norm(*x, **options), fullgraph=True, backend=noted)
    torch.testing.assert_close(compiled(*given), gated_rms_norm(*given, **options))
    assert (torch.ops.linattn.triton_gated_rms_norm.default in nodes) == gradient


def test_a_failed_launch_names_what_failed(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(launch, "start", broken)
    with pytest.raises(RuntimeError, match="out of resources") as caught:
        gated_rms_norm(*draw(3, 8))
    (note,) = caught.value.__notes__
    assert note.startswith("linattn triton: kernel norm_outputs_fwd of gated_rms_norm failed on")
