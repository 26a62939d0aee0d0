"""Hedgehog's map in the interpreter, forward and backward, against the formulas in float64 NumPy."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
import torch
from linattn.feature_maps import Elu1, Hedgehog
from linattn_backends.triton.features import features

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the interpreter truncates to bfloat16


def exact(x):
    return x.detach().double().numpy()


def softmax(y):
    e = np.exp(y - y.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference(x, W, b, dout, normed, signs):
    """Features, and the gradients of ``x``, ``W`` and ``b``."""
    y = np.einsum("...hk,hkd->...hd", x, W) + b
    dy = 0
    halves = []
    for sign, d in zip(signs, np.split(dout, len(signs), -1), strict=True):
        made = softmax(sign * y) if normed else np.exp(sign * y)
        halves.append(made)
        dy = dy + sign * made * (d - ((d * made).sum(-1, keepdims=True) if normed else 0))
    rows = (-1, *x.shape[-2:])
    dW = np.einsum("mhk,mhd->hkd", x.reshape(rows), dy.reshape(-1, *dy.shape[-2:]))
    return np.concatenate(halves, -1), np.einsum("...hd,hkd->...hk", dy, W), dW, dy.reshape(-1, *dy.shape[-2:]).sum(0)


def compare(x, W, b, normed=False, negation=True):
    """The features and every gradient; and inputs stay as they were."""
    given = [a.clone().requires_grad_() for a in (x, W, b) if a is not None]
    phi = Hedgehog(given[1], given[2] if b is not None else None, softmax=normed, negation=negation)
    out = features(phi, given[0])
    assert out is not None
    assert out.dtype == x.dtype
    dout = torch.randn(out.shape).to(out.dtype)
    bias = torch.zeros(W.shape[0], W.shape[2]) if b is None else b
    wanted = reference(*map(exact, (x, W, bias, dout)), normed, (1, -1) if negation else (1,))
    found = (out, *torch.autograd.grad(out, given, dout))
    for made, expected, like in zip(found, wanted, (x, *given), strict=False):
        assert made.dtype == like.dtype
        tolerance = max(TOLERANCE[made.dtype], TOLERANCE[x.dtype])
        assert np.abs(exact(made) - expected).max() <= tolerance * np.abs(expected).max()
    assert all(torch.equal(a, was) for a, was in zip(given, (one for one in (x, W, b) if one is not None), strict=True))


def draw(*shape, H=2, K=8, D=8, dtype=torch.float32, other=torch.float32):
    """Seeded ``x [..., H, K]``, ``W`` and ``b``."""
    torch.manual_seed(sum(shape) + K + D)
    return torch.randn(*shape, H, K).to(dtype), (torch.randn(H, K, D) / K**0.5).to(other), (torch.randn(H, D) / 2).to(other)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("sizes", [dict(K=8, D=8), dict(K=20, D=5), dict(K=1, D=1), dict(K=64, D=64), dict(K=33, D=128)])
def test_sizes(sizes, normed):
    compare(*draw(2, 35, **sizes), normed)


def test_many_blocks_of_rows():
    compare(*draw(1, 700, H=1, K=4, D=4))


@pytest.mark.parametrize("normed", [False, True])
def test_without_a_bias(normed):
    x, W, _ = draw(1, 20)
    compare(x, W, None, normed)


@pytest.mark.parametrize("normed", [False, True])
def test_without_the_negated_half(normed):
    compare(*draw(1, 20), normed, negation=False)


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, other):
    compare(*draw(1, 40, K=16, D=16, dtype=dtype, other=other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exponents_are_held_and_beyond_no_gradient_passes(dtype):
    """As the map has it, on every framework."""
    x = torch.tensor([-1e30, -36, -34, 0.5, 34, 36, 1e30, torch.nan], dtype=dtype).reshape(8, 1, 1).requires_grad_()
    phi = Hedgehog(torch.ones(1, 1, 1))
    found, wanted = features(phi, x), phi(x)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    gradients = (torch.autograd.grad(y, x, torch.ones_like(y))[0].flatten() for y in (found, wanted))
    torch.testing.assert_close(*gradients, equal_nan=True, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0)
    assert (next(iter(torch.autograd.grad(features(phi, x), x, torch.ones_like(found))))[[0, 1, 5, 6]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_are_held_and_below_no_gradient_passes(dtype):
    """As the map has it, where the gradient of a share that is held is 10^15 of the others', as behind a normaliser."""
    x = torch.tensor([[20, 0, -14, -16], [20, 18, -90, -1e30], [0, 1, torch.nan, 2]], dtype=dtype)[:, None].requires_grad_()
    phi = Hedgehog(torch.eye(4)[None], softmax=True)
    found, wanted = features(phi, x), phi(x)
    torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=0)
    torch.manual_seed(0)
    dout = torch.where(wanted < 1e-15, 1e15, torch.randn(wanted.shape)).to(dtype)
    gradients = (torch.autograd.grad(y, x, dout)[0] for y in (found, wanted))
    torch.testing.assert_close(*gradients, equal_nan=True, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_rows_are_read_where_they_lie():
    """Heads of one projection, and tokens in the reverse order of memory."""
    x, W, b = draw(2, 30, H=6, K=8)
    compare(x[:, :, 2:4], W[2:4], b[2:4])
    compare(x.transpose(0, 1)[..., :2, :], W[:2], b[:2])
    compare(x.mT.contiguous().mT, W, b)


def test_what_is_left_to_the_map():
    x, W, b = draw(2, 5)
    assert features(Elu1(), x) is None
    assert features(Hedgehog(W, b), x.double()) is None
    assert features(Hedgehog(W[:1], b), x) is None  # refused by the map, in its own words
    assert features(Hedgehog(W, b[:, :1]), x) is None
    assert features(Hedgehog(W.numpy(), b), x) is None
    assert features(Hedgehog(torch.randn(2, 8, 129)), x) is None
    assert features(Hedgehog(W, b), x[:, :0]) is None
    assert torch.func.vmap(lambda one: Hedgehog(W, b)(one) if features(Hedgehog(W, b), one) is None else one)(x).shape[-1] == 16


def test_operators_take_the_kernels_features(monkeypatch):
    """Those of the backend that runs the call, and none where another one was asked for; ``explain`` says so."""
    x, W, b = draw(1, 20, K=8)
    made = []
    monkeypatch.setattr("linattn_backends.triton.backend.features", lambda phi, x: made.append(x.shape) or features(phi, x))
    options = dict(feature_map=Hedgehog(W, b), normalize=True)
    o, _ = linattn.chunk_linear_attn(x, x, x, backend="triton", **options)
    assert len(made) == 2
    wanted, _ = linattn.chunk_linear_attn(x, x, x, backend="torch", **options)
    assert len(made) == 2
    torch.testing.assert_close(o, wanted)
    assert "\n  feature map  triton" in str(linattn.explain(linattn.chunk_linear_attn, x, x, x, backend="triton", **options))
    assert "feature map" not in str(linattn.explain(linattn.chunk_linear_attn, x, x, x, backend="torch", **options))
