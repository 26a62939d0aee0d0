"""Kernels for Hopper, on NumPy, against the oracle: what they compute, and how their warpgroups wait for one another."""

from __future__ import annotations

import gluon_on_numpy
import pytest
import torch
from linattn_backends.triton.diagonal import memory_host
from linattn_backends.triton.host import variant as selection
from linattn_backends.triton.runtime import launch
from triton_cases import arrays, check

LONG = [0, 3, 3, 1900, 2000, 2000]


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Names of the kernels in Gluon that were launched."""
    names, start = set(), launch.start

    def start_on_numpy(kernel, count, device, args, config):
        if kernel.fn.__module__.endswith("sm90") or kernel.fn.__module__.endswith("hopper"):
            names.add(kernel.__name__)
            gluon_on_numpy.run(kernel, count, args, config)
        else:
            start(kernel, count, device, args, config)

    monkeypatch.setattr(launch, "start", start_on_numpy)
    monkeypatch.setattr(selection, "hopper", lambda device: True)
    return names


def call(family, K=64, V=64, **sizes):
    given = arrays(family, K=K, V=V, dtype=torch.bfloat16, **sizes)
    if "beta" in given:
        given["beta"] = given["beta"].bfloat16()
    check(family, given)


@pytest.mark.parametrize("kind", ["weak", "strong", "-inf", "mixed"])
def test_a_scalar_gate(kind, launched):
    call("simple_gla", T=200, kind=kind)
    assert launched == {"fused", "gradients"}


def test_no_gate(launched):
    call("linear_attn", T=130, V=128)
    assert launched == {"fused"}


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_heads_and_packed_sequences(family, launched):
    call(family, T=140, K=128, H=1, HV=2)
    call(family, T=300, cu=[0, 0, 5, 5, 200, 300, 300])
    call(family, T=0, cu=[0, 0, 0])
    assert launched


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_split_sequences(family, launched, monkeypatch):
    monkeypatch.setattr(memory_host, "processors", lambda device: 8)
    call(family, T=2000, kind="weak", cu=LONG)
    assert launched


@pytest.mark.parametrize(("family", "kind"), [("linear_attn", None), ("simple_gla", "weak"), ("simple_gla", "mixed")])
def test_two_programs_share_a_walk(family, kind, launched, monkeypatch):
    monkeypatch.setattr(memory_host, "processors", lambda device: 4)
    call(family, T=700, HV=2, H=2, kind=kind or "plain")
    assert launched == {"fused", "gradients"} if kind else {"fused"}


@pytest.mark.parametrize(("family", "kind"), [("linear_attn", "plain"), ("simple_gla", "weak"), ("simple_gla", "mixed")])
def test_wide_heads(family, kind, launched):
    call(family, T=200, K=256, V=192, H=1, HV=2, kind=kind)
    call(family, T=200, K=256, V=256, kind=kind)
    call(family, T=300, K=256, kind=kind, cu=[0, 0, 5, 5, 200, 300, 300])
    call(family, T=70, K=64, V=192, kind=kind)
    assert launched == {"fused"}


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_delta_families(family, launched):
    call(family, T=140, kind="weak")
    assert len(launched) > 2


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda", "dplr"])
def test_value_heads_that_take_turns(family, launched):
    call(family, T=100, HV=2, V=128, kind="mixed", cu=[0, 0, 30, 100])
    assert launched & {"gradients", "vector_gradients"}


@pytest.mark.parametrize("kind", ["weak", "mixed"])
def test_dplr(kind, launched):
    call("dplr", T=140, kind=kind, H=1, HV=2, K=128)
    call("dplr", T=140, kind=kind, V=128, cu=[0, 0, 100, 140])
    assert launched == {"prepare", "gradients"}


@pytest.mark.parametrize(("a", "b"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_dplr_with_wider_vectors(a, b, launched):
    given = arrays("dplr", T=70, K=128, V=64, dtype=torch.bfloat16, kind="mixed")
    check("dplr", given | dict(a=given["a"].to(a), b=given["b"].to(b)))
    assert launched == {"prepare", "gradients"}


@pytest.mark.parametrize("kind", ["strong", "-inf", "mixed"])
def test_strong_gates_of_kda(kind, launched):
    call("kda", T=140, kind=kind, K=128)
    assert {"strong_prepare", "vector_gradients"} < launched


@pytest.mark.parametrize("kind", ["strong", "-inf", "mixed"])
def test_strong_gates_of_gla(kind, launched):
    call("gla", T=140, kind=kind, H=1, HV=2)
    call("gla", T=140, kind=kind, K=128, cu=[0, 0, 100, 140])
    assert launched == {"scores", "intra"}


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule"])
def test_chunks_that_do_not_fill_a_batch(family, launched):
    """``prepare`` takes four chunks a program, of whatever heads and sequences."""
    call(family, T=300, H=1, HV=3, kind="mixed", cu=[0, 0, 5, 300, 300])
    assert "prepare" in launched
