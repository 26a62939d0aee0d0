"""What the delta families say they can run, and how they behave under PyTorch's tracers."""

from __future__ import annotations

import pytest
import torch
from linattn.plugin import Call
from linattn_backends.triton import TritonBackend
from linattn_backends.triton.delta.call import DeltaCall, Kept
from linattn_backends.triton.delta.op import delta, delta_backward, delta_call
from linattn_backends.triton.maps.op import scalars
from triton_cases import arrays, call, place_of, pretend

NAMES = ("q", "k", "v", "g", "beta", "a", "b", "A_log", "bias", "initial_state", "cu_seqlens")
NO_MAPS = (0, 0.0, False)


def test_a_key_too_wide_is_named():
    dims = (("B", 1), ("T", 8), ("H", 1), ("HV", 1), ("K", 257), ("V", 16))
    given = (
        ("q", "B T H K", "float32"),
        ("k", "B T H K", "float32"),
        ("v", "B T HV V", "float32"),
        ("beta", "B T HV", "float32"),
    )
    complaint = TritonBackend().supports(Call("delta_rule", "chunk", "torch", "cpu", given, dims, (), None))
    assert str(complaint) == "K must be at most 256, got 257"


@pytest.mark.parametrize(("family", "form"), [("delta_rule", "chunk"), ("kda", "chunk"), ("dplr", "recurrent")])
def test_opcheck(family, form):
    given = arrays(family, T=5, K=4, V=4)
    for x in given.values():
        x.requires_grad_()
    torch.library.opcheck(delta, (*(given.get(name) for name in NAMES), form, 0.5, 16, True, *NO_MAPS, True))


def test_opcheck_with_maps():
    given = arrays("kda", T=5, K=4, V=4) | dict(A_log=torch.zeros(1), bias=torch.randn(1, 4))
    for x in given.values():
        x.requires_grad_()
    torch.library.opcheck(delta, (*(given.get(name) for name in NAMES), "chunk", 0.5, 16, True, 1, 0.0, True, True))
    torch.library.opcheck(scalars, (torch.randn(1, 5, 2), None, torch.zeros(2).requires_grad_(), None, 1, 0.0, 0.0))


def test_opcheck_backward():
    given = arrays("gated_delta_rule", T=5, K=4, V=4)
    arguments = (given["v"], given["initial_state"], *Kept(), *(given.get(name) for name in NAMES), 0.5, 16, *NO_MAPS)
    with torch.no_grad():
        torch.library.opcheck(delta_backward, arguments, test_utils=("test_schema", "test_faketensor"))


def test_compiles_without_a_break():
    torch._dynamo.reset()
    given = arrays("kda", T=9)

    def loss(*x):
        o, final = call("kda", dict(zip(given, x, strict=True)), output_final_state=True, chunk_size=16)
        return o.sum() + final.sum()

    inputs = [x.requires_grad_() for x in given.values()]
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs), inputs)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_gradients_under_vmap():
    given = arrays("gated_delta_rule", B=2, T=9, state=False)
    rows = [x.detach()[:, None] for x in given.values()]

    def loss(*x):
        return call("gated_delta_rule", dict(zip(given, x, strict=True)), chunk_size=16)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3, 4)))(*rows)
    inputs = [x.requires_grad_() for x in given.values()]
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x[:, 0], y)


@pytest.mark.parametrize(("name", "change"), [
    (None, None),
    ("head of the batch", dict(k=lambda x: x[:, :, :, 1:].as_strided(x.shape, x.stride(), 1))),
    ("rows", dict(q=lambda x: torch.empty(1, 64, 2, 136, dtype=x.dtype)[..., :128])),
    ("dtype", {name: lambda x: x.float() for name in "qkv"}),
    ("width", {name: lambda x: x[..., :96].contiguous() for name in "qk"}),
    ("strength", dict(beta=lambda x: x[..., None].expand(1, 64, 2, 128).contiguous())),
])  # fmt: skip
def test_kernels_for_hopper_take_whole_aligned_rows(monkeypatch, name, change):
    """All others go to the plain ones, which the interpreter tests."""
    pretend(monkeypatch, not_hopper=None)
    given = {x: torch.zeros(1, 65, 2, 128, dtype=torch.bfloat16)[:, :64] for x in "qkv"}
    given["beta"] = torch.zeros(1, 64, 2, dtype=torch.bfloat16)
    for x, changed in (change or {}).items():
        given[x] = changed(given[x])
    call = DeltaCall.of(given["q"], given["k"], given["v"], None, given["beta"], None, None, None, None, 1.0, 0)
    wanted = "delta/state.py:delta_state_fwd" if change else "delta/state_sm90.py:delta_state_fwd_sm90"
    assert place_of(call.forward_variant(1)["state_fwd"].kernel) == wanted, name


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiled_with_offsets_whose_number_nobody_knows():
    """Boundaries that are found among the tokens: a tracer cannot tell how many sequences there are."""
    x = (0.2 * torch.randn(1, 32, 1, 16)).requires_grad_()
    g, marks = -torch.rand(1, 32, 1, 16), torch.zeros(33, dtype=torch.bool)
    marks[[0, 10, 32]] = True

    def run(x, marks):
        cu = torch.nonzero(marks)[:, 0].to(torch.int32)
        torch._check(cu.shape[0] >= 2)
        return delta_call(x, x, x, g, None, -x, x, None, None, None, cu, "chunk", 1.0, 0, False, 0, 0.0, False)[0]

    (wanted,) = torch.autograd.grad(run(x, marks).sum(), x)
    (found,) = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(x, marks).sum(), x)
    assert torch.equal(found, wanted)
