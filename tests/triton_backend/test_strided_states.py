"""Initial states of any strides: read where they lie, never copied, and the same numbers come out."""

from __future__ import annotations

import pytest
import torch
from linattn_backends.triton.delta.config import DeltaVariant
from linattn_backends.triton.diagonal.config import DiagonalVariant
from linattn_backends.triton.runtime import launch
from triton_cases import arrays, call

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
LAYOUTS = {
    "value channels first": lambda S: S.mT.contiguous().mT,
    "one for all heads": lambda S: S[:, :1].expand(S.shape),
    "every second of a pool": lambda S: torch.stack((S, S + 1), 1).flatten(0, 1)[::2],
    "heads last": lambda S: S.movedim(1, 3).contiguous().movedim(3, 1),
}


def results(family, given, form):
    """Outputs, final states and gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x.is_floating_point()}
    o, final = call(family, given | leaves, form, output_final_state=True, chunk_size=16)
    torch.manual_seed(1)
    loss = (o.float() * torch.randn(o.shape)).sum() + (final * torch.randn(final.shape)).sum()
    return [o, final, *torch.autograd.grad(loss, list(leaves.values()))]


def compare(monkeypatch, family, layout, form="chunk", **sizes):
    """One call with the states as they lie, and one with a copy of them."""
    given = arrays(family, **dict(B=2, T=20, HV=2, K=16, V=18) | sizes)
    S = LAYOUTS[layout](given["initial_state"])
    assert not S.is_contiguous()
    read, start = set(), launch.start

    def note(kernel, count, device, args, config):
        read.update(x.data_ptr() for x in args if isinstance(x, torch.Tensor))
        start(kernel, count, device, args, config)

    wanted = results(family, given | dict(initial_state=S.contiguous()), form)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "start", note)
        found = results(family, given | dict(initial_state=S), form)
    assert S.data_ptr() in read
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunk(family, monkeypatch):
    """No stride is that of a dense state."""
    compare(monkeypatch, family, "heads last")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla"])
def test_chunk_with_the_state_in_registers(family, layout, monkeypatch):
    compare(monkeypatch, family, layout, dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["simple_gla", "kda"])
def test_packed_and_in_segments(family, monkeypatch):
    for variant in (DiagonalVariant, DeltaVariant):
        monkeypatch.setattr(variant, "segment", lambda *sizes: 2)
    monkeypatch.setattr(DeltaVariant, "whole", lambda self, length: 0)
    compare(monkeypatch, family, "value channels first", B=1, T=90, HV=1, V=16, cu=[0, 20, 90])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gla", "dplr"])
def test_recurrent(family, layout, monkeypatch):
    compare(monkeypatch, family, layout, "recurrent", T=5)


def test_gradients_of_final_states_of_any_strides():
    given = arrays("kda", B=2, T=20, HV=2, K=16, V=18)
    leaves = [x.requires_grad_() for x in given.values()]
    _, final = call("kda", given, output_final_state=True)
    d = torch.randn(2, 2, 18, 16).mT
    strided, dense = (torch.autograd.grad(final, leaves, x, retain_graph=True) for x in (d, d.contiguous()))
    assert all(torch.equal(x, y) for x, y in zip(strided, dense, strict=True))
