"""Normalised calls, forward and backward, against the oracle: outputs, sums of keys in states, and every gradient."""

from __future__ import annotations

import linattn
import pytest
import torch
from linattn_backends.triton.normalizer import config
from triton_cases import arrays, call, check, positive, pretend

FAMILIES = ("linear_attn", "simple_gla", "gla")


def chunks_of(monkeypatch, tokens, together=4):
    """Let programs sum so few tokens, and carry sums over so few chunks, that short sequences take all of them."""
    from linattn_backends.triton.normalizer import launch

    monkeypatch.setattr(launch, "CHUNK", tokens)
    monkeypatch.setattr(launch, "CHUNKS", together)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_chunks(family, form, monkeypatch):
    chunks_of(monkeypatch, 4)
    check(family, positive(arrays(family, B=2, T=27, state=False)), form, normalize=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits(family, dtype):
    check(family, positive(arrays(family, T=40, dtype=dtype, state=False)), normalize=True)


@pytest.mark.parametrize(("size", "d_o"), [(1e-3, 1.0), (0.03, 100.0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_sums_in_float16(family, size, d_o):
    """Gradients that are divided by them have not its range."""
    given = positive(arrays(family, T=40, dtype=torch.float16, state=False))
    for name in ("q", "k"):
        given[name] = given[name] * size
    check(family, given, d_o=d_o, normalize=True)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_values_with_a_mean(family):
    """Which leaves the gradients of weights alone: nearly all of their parts cancels."""
    given = positive(arrays(family, T=40, dtype=torch.bfloat16, state=False))
    given["v"] = given["v"] + 4
    check(family, given, normalize=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences(family, monkeypatch):
    """One of them is empty, and tokens behind the last belong to none."""
    chunks_of(monkeypatch, 4)
    check(family, positive(arrays(family, T=40, cu=[0, 13, 13, 32], state=False)), normalize=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_share_queries(family, monkeypatch):
    chunks_of(monkeypatch, 8)
    check(family, positive(arrays(family, T=19, H=2, HV=4, K=3, V=2, state=False)), normalize=True)


@pytest.mark.parametrize("kind", ["weak", "-1e4", "-inf", "mixed"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_any_decay(family, kind, monkeypatch):
    chunks_of(monkeypatch, 8)
    check(family, positive(arrays(family, T=30, kind=kind, state=False)), normalize=True)


def test_a_gate_that_heads_share(monkeypatch):
    chunks_of(monkeypatch, 8)
    given = arrays("gla", T=19, H=2, HV=4, K=3, V=2, shape=(1, 19, 2, 3), state=False)
    check("gla", positive(given), normalize=True)


def test_a_fixed_decay():
    check("simple_gla", positive(arrays("simple_gla", T=19, H=2, HV=2, shape=(2,), state=False)), normalize=True)


def test_a_value_gate_leaves_the_sums_alone():
    check("gla", positive(arrays("gla", T=21, gv="plain", state=False)), normalize=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_wide_heads(family, monkeypatch):
    """Of more key and value channels than one tile has."""
    chunks_of(monkeypatch, 8)
    check(family, positive(arrays(family, T=9, K=70, V=65, state=False)), normalize=True)


def test_raw_decays():
    """They are mapped first, and the map's gradient has the normaliser's part."""
    given = positive(arrays("simple_gla", T=19, state=False))
    g = given.pop("g").requires_grad_()
    start = given.pop("initial_state")
    options = dict(initial_state=start, normalize=True, gate=linattn.gates.LogSigmoid(2.0))
    for backend in ("triton", "torch"):
        o, _ = linattn.chunk_simple_gla(**given, g=g, **options, backend=backend)
        (found,) = torch.autograd.grad(o, g, torch.ones_like(o).cumsum(1))
        if backend == "triton":
            made = o, found
    torch.testing.assert_close(made, (o, found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_no_tokens(form):
    check("simple_gla", positive(arrays("simple_gla", T=0, state=False)), form, normalize=True)


def test_a_scale_cancels():
    given = positive(arrays("linear_attn", T=9, state=False))
    results = [call("linear_attn", given, normalize=True, scale=scale)[0] for scale in (None, 3.0)]
    assert torch.equal(*results)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_denominator_of_zero_gives_a_zero_row(family):
    """And no gradient."""
    given = arrays(family, T=3, state=False)
    given["q"] = torch.zeros_like(given["q"])
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    o, _ = call(family, leaves, normalize=True)
    assert torch.equal(o, torch.zeros_like(o))
    for gradient in torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_sums_of_a_state_alone_have_a_gradient():
    given = positive(arrays("simple_gla", T=9))
    given["k"].requires_grad_()
    _, final = call("simple_gla", given, normalize=True, output_final_state=True)
    final[..., -1].sum().backward()
    assert given["k"].grad.abs().min() > 0


def test_tiles_follow_the_heads():
    assert config.variant(5, 7, False)["outputs"].tile[:2] == (16, 16)
    assert config.variant(128, 65, True)["gradients"].tile[:2] == (64, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_little_shared_memory(family, monkeypatch):
    pretend(monkeypatch, large_smem=False)
    check(family, positive(arrays(family, T=20, dtype=torch.bfloat16, state=False)), normalize=True)
