"""Peers are called under their own names, or the row says why not. Stand-ins with the peers' signatures take their place."""

from __future__ import annotations

import inspect
import sys
import types

import linattn
import pytest
from linattn_benchmarks import subjects
from linattn_benchmarks.subjects import PEERS, Fla, FlashQla

torch = pytest.importorskip("torch")

# Parameters of flash-linear-attention 0.6.0, in order, and the family's own names where they differ.
FLA = {
    ("linear_attn", "chunk_linear_attn"): "q k v scale initial_state output_final_state normalize",
    ("simple_gla", "chunk_simple_gla"): "q k v g g_gamma scale initial_state output_final_state",
    ("gla", "chunk_gla"): "q k v g scale initial_state output_final_state",
    ("rwkv6", "chunk_rwkv6"): "r k v w u scale initial_state output_final_state",
    ("delta_rule", "chunk_delta_rule"): "q k v beta scale initial_state output_final_state",
    ("gated_delta_rule", "chunk_gated_delta_rule"): "q k v g beta scale initial_state output_final_state",
    ("kda", "chunk_kda"): "q k v g beta scale initial_state output_final_state",
    ("generalized_delta_rule", "chunk_dplr_delta_rule"): "q k v a b gk scale initial_state output_final_state",
    ("linear_attn", "fused_recurrent_linear_attn"): "q k v scale initial_state output_final_state reverse normalize",
    ("simple_gla", "fused_recurrent_simple_gla"): "q k v g g_gamma scale initial_state output_final_state",
    ("gla", "fused_recurrent_gla"): "q k v gk gv scale initial_state output_final_state",
    ("rwkv6", "fused_recurrent_rwkv6"): "r k v w u scale initial_state output_final_state",
    ("delta_rule", "fused_recurrent_delta_rule"): "q k v beta scale initial_state output_final_state",
    ("gated_delta_rule", "fused_recurrent_gated_delta_rule"): "q k v g gk gv beta scale initial_state output_final_state",
    ("kda", "fused_recurrent_kda"): "q k v g beta A_log dt_bias scale initial_state output_final_state",
    ("generalized_delta_rule", "fused_recurrent_dplr_delta_rule"): "q k v a b gk scale initial_state output_final_state",
}
OURS = {"r": "q", "w": "g", "gk": "g"}


def stand_in(family: str, parameters: str):
    """A function with these parameters that computes what linattn does."""
    names = parameters.split()
    signature = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in names]
    )

    def function(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        return getattr(linattn, family)(**{OURS.get(name, name): x for name, x in given.items()}, backend="torch")

    return function


@pytest.fixture
def fla(monkeypatch):
    """A package of stand-ins, on the CPU."""
    monkeypatch.setattr(Fla, "kinds", ("cpu",))
    monkeypatch.setattr(subjects, "on_hopper", lambda: False)
    find_spec = subjects.importlib.util.find_spec
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda name: object() if name == "fla" else find_spec(name))
    for (package, name), parameters in FLA.items():
        module = sys.modules.get(f"fla.ops.{package}") or types.ModuleType(f"fla.ops.{package}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        family = name.removeprefix("chunk_").removeprefix("fused_recurrent_").replace("dplr_delta_rule", "dplr")
        setattr(module, name, stand_in(family, parameters))


@pytest.mark.parametrize("family", list(Fla.families))
def test_fla_is_called_by_its_own_names(case, rows, fla, family):
    cases = [case(f"chunk_{family}", T=20), case(f"recurrent_{family}", "decode"), case(f"decode_{family}", "decode")]
    for row in rows(cases, peers=True):
        if row["library"] == "fla":
            assert row["status"] == "ok", row["reason"]


def test_fla_refuses_a_backward_that_is_forced_and_noted(case, fla, monkeypatch):
    monkeypatch.setattr(subjects, "on_hopper", lambda: True)
    monkeypatch.setattr(subjects, "installed", lambda name: "3.6.0")
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", types.SimpleNamespace(TRITON_ABOVE_3_7_1=False))
    Fla().function(case("chunk_simple_gla", "fwdbwd"))
    assert sys.modules["fla.ops.common.chunk_o"].TRITON_ABOVE_3_7_1
    assert "check off" in Fla().note(case("chunk_simple_gla", "fwdbwd"))
    assert Fla().note(case("chunk_simple_gla", "fwd")) is None


def test_reasons(case):
    assert PEERS["fla"]().refusal(case("chunk_mixed_attn")) == "has no mixed_attn"
    assert PEERS["FlashQLA"]().refusal(case("chunk_gla")) == "has no gla"
    assert PEERS["cuDNN"]().refusal(case("recurrent_kda", "decode")) == "is not called for decode"
    assert PEERS["softmax (SDPA)"]().refusal(case("chunk_gla", K=8, V=6)) == "its fast kernels want K = V"
    assert PEERS["softmax (SDPA)"]().refusal(case("chunk_gla", HV=4)) == "is not called with grouped value heads"


@pytest.mark.parametrize("peer", [Fla, FlashQla])
def test_a_peer_that_is_missing_or_on_another_device(case, monkeypatch, peer):
    one = case("chunk_gated_delta_rule")
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda name: None)
    assert peer().refusal(one) == f"{peer.distribution} is not installed"
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda name: object())
    assert peer().refusal(one) == "runs on cuda, not on cpu"


def test_softmax_is_for_scale_and_not_checked(case, rows):
    (row,) = [row for row in rows([case("chunk_gla", "fwdbwd", V=8)], peers=True) if row["ms"]]
    assert row["library"] == "softmax (SDPA)"
    assert row["error"] is None
    assert "not checked" in row["note"]
