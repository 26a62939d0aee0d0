"""Which kernels run: what ``explain`` says."""

from __future__ import annotations

import linattn
import pytest
import torch
from linattn.plugin import Call
from linattn_backends.triton import TritonBackend, backend
from linattn_backends.triton.host import variant as selection


def described(
    op="kda", form="chunk", dtype="bfloat16", K=128, V=64, HV=2, beta="B T HV", needs_grad=False, vectors=(), **options
):
    arrays = [("q", "B T H K"), ("k", "B T H K"), ("v", "B T HV V")]
    arrays += [("g", "B T HV" if op == "simple_gla" else "B T HV K")] if op != "linear_attn" else []
    arrays += [("beta", beta)] if op == "kda" else []
    dims = dict(B=1, T=64, N=1, H=2, HV=HV, K=K, V=V)
    given = [(name, shape, dtype) for name, shape in arrays]
    given += [(name, "B T HV K", wide) for name, wide in zip("ab", vectors, strict=False)]
    return Call(op, form, "torch", "cuda:0", tuple(given), tuple(dims.items()), tuple(options.items()), needs_grad)


CASES = [
    (dict(), "Gluon kernels for Hopper"),
    (dict(op="linear_attn"), "Gluon kernels for Hopper"),
    (dict(op="simple_gla", HV=4), "Gluon kernels for Hopper"),
    (
        dict(op="simple_gla", HV=4, needs_grad=True),
        "Gluon kernels for Hopper; gradients of shared heads, plain Triton",
    ),
    (dict(op="simple_gla", K=256, V=512), "Gluon kernels for Hopper"),
    (dict(op="linear_attn", V=192, needs_grad=True), "Gluon kernels for Hopper; gradients of queries and keys, plain Triton"),
    (
        dict(op="linear_attn", V=192, needs_grad=True, form="recurrent"),
        "plain Triton; gradients of values, Gluon kernels for Hopper",
    ),
    (dict(op="linear_attn", K=96), "plain Triton (no Gluon kernels: K is 96, not 64, 128 or 256)"),
    (dict(op="simple_gla", V=96), "plain Triton (no Gluon kernels: V is 96, not a multiple of 64)"),
    (dict(op="gla", V=96), "plain Triton; under strong gates, Gluon kernels for Hopper"),
    (dict(K=96), "plain Triton (no Gluon kernels: K is 96, not 64 or 128)"),
    (dict(op="gla", K=96), "plain Triton (no Gluon kernels: K is 96, not 64 or 128)"),
    (dict(V=256), "plain Triton (no Gluon kernels: V is 256, not 64 or 128)"),
    (dict(dtype="float16"), "plain Triton (no Gluon kernels: operands are float16, not bfloat16)"),
    (dict(chunk_size=32), "plain Triton (no Gluon kernels: chunks have 32 tokens, not 64)"),
    (dict(chunk_size=50), "Gluon kernels for Hopper"),
    (dict(beta="B T HV V"), "plain Triton (no Gluon kernels: beta has one number a value channel)"),
    (dict(op="linear_attn", normalize=True), "plain Triton (no Gluon kernels: results are float32, not bfloat16)"),
    (dict(op="linear_attn", causal=False), "plain Triton (no Gluon kernels: linear_attn of both directions has none)"),
    (
        dict(op="dplr", vectors=("bfloat16", "bfloat16")),
        "Gluon kernels for Hopper; walks and strong gates, plain Triton",
    ),
    (
        dict(op="dplr", vectors=("bfloat16", "float32")),
        "Gluon kernels for Hopper; walks and strong gates, plain Triton",
    ),
    (
        dict(op="dplr", dtype="float16", vectors=("float32", "float32")),
        "plain Triton (no Gluon kernels: operands are float16, not bfloat16)",
    ),
    (dict(op="rwkv6"), "plain Triton"),
    (dict(form="recurrent"), "plain Triton"),
    (dict(form="recurrent", needs_grad=True), "plain Triton; gradients, Gluon kernels for Hopper"),
    (dict(op="gla", form="recurrent", needs_grad=True), "plain Triton; gradients under strong gates, Gluon kernels for Hopper"),
    (dict(op="rwkv6", form="recurrent", needs_grad=True), "plain Triton"),
    (dict(form="recurrent", needs_grad=True, K=96), "plain Triton (no Gluon kernels: K is 96, not 64 or 128)"),
]


@pytest.mark.parametrize(("call", "said"), CASES, ids=range(len(CASES)))
def test_says_which_kernels_run_on_hopper(call, said, monkeypatch):
    monkeypatch.setattr(selection, "not_hopper", lambda device: None)
    monkeypatch.setattr(backend, "_ARCHITECTURES", {"cuda:0": None})
    assert TritonBackend().details(described(**call)) == said


def test_says_what_is_wrong_with_the_device(monkeypatch):
    monkeypatch.setattr(selection, "not_hopper", lambda device: "the device has compute capability 8.0, not 9.0")
    monkeypatch.setattr(backend, "_ARCHITECTURES", {"cuda:0": None})
    said = "plain Triton (no Gluon kernels: the device has compute capability 8.0, not 9.0)"
    assert TritonBackend().details(described()) == said


def test_of_a_device_that_is_not_there_both_are_said(monkeypatch):
    monkeypatch.setattr(backend, "_ARCHITECTURES", {})
    assert TritonBackend().details(described()) == "Gluon kernels for Hopper, plain Triton elsewhere"


def test_explain_says_so():
    q, k, v = (torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    said = str(linattn.explain(linattn.chunk_linear_attn, q, k, v, backend="triton"))
    assert "runs         triton.chunk_linear_attn: plain Triton (no Gluon kernels: kernels are interpreted)" in said
