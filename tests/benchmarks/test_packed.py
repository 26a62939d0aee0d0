"""Packed sequences are drawn, run, checked and handed to peers as what they are."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from linattn_benchmarks import cases, checks, fresh, packing, subjects
from linattn_benchmarks.cases import Case
from linattn_benchmarks.subjects import PEERS, FlashInfer, FlashQla, Linattn

torch = pytest.importorskip("torch")

LENGTHS = (33, 1, 20)


@pytest.fixture
def packed(case):
    """``packed("chunk_gla", "fwd")``: three sequences, in ``T`` the sum of their lengths."""

    def make(operator: str, what: str = "fwd", lengths=LENGTHS, **fields) -> Case:
        return replace(case(operator, what, T=sum(lengths), H=1, HV=4), lengths=lengths, **fields)

    return make


@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        ((8192,), "1x8192"),
        ((1024, 1024), "2x1024"),
        ((4096, 28672), "4096+28672"),
        ((5, 4, 3, 2), "5+4+3+2"),
        ((5, 4, 3, 2, 1), "5 in 15"),
    ],
)
def test_names(lengths, name):
    assert packing.name(lengths) == name
    assert packing.parsed(packing.spelled(lengths)) == lengths


def test_equal_lengths_are_counted():
    assert packing.spelled((4, 1024, 1024)) == "4+2x1024"
    assert packing.parsed("4+2x1024") == (4, 1024, 1024)


@pytest.mark.parametrize("text", ["", "8x", "x8", "0x8", "1+", "-4", "0"])
def test_lengths_that_are_none(text):
    with pytest.raises(ValueError, match="expected lengths such as 4096"):
        packing.parsed(text)


def test_a_case_of_packed_sequences(packed):
    one = packed("chunk_gla", "fwdbwd", states=True)
    assert one.offsets.tolist() == [0, 33, 34, 54]
    assert one.label == "B1 T54 H1 HV4 K8 V6, 33+1+20"
    assert one.shape(one.state[0]) == (3, 4, 8, 6)
    assert Case.from_json(json.loads(json.dumps(one.as_json()))) == one


def test_a_batch_is_written_without_fields_of_packed_sequences(case):
    assert not {"lengths", "states"} & set(case("chunk_gla").as_json())


@pytest.mark.parametrize("family", ["gated_delta_rule", "gla", "ssd"])
@pytest.mark.parametrize("tokens", [0, 10_000], ids=["by torch", "by the oracle"])
def test_outputs_states_and_gradients_are_checked(packed, monkeypatch, family, tokens):
    monkeypatch.setattr(checks, "ORACLE_TOKENS", {"cpu": tokens})
    one, ours = packed(f"chunk_{family}", "fwdbwd", states=True), Linattn("torch")
    runner, arrays, pulled = fresh.prepared(one, ours)
    found = checks.check(one, runner, arrays, pulled, fresh.call_of(one, ours, runner, arrays, pulled))
    assert found["ok"]
    gradients = {f"d{arg.name}" for arg in one.arrays}
    assert set(found["outputs"]) == {"o", "final_state", "dinitial_state", *gradients}


def test_a_batch_in_place_of_packed_sequences_is_found_out(packed):
    one, ours = packed("chunk_gla"), Linattn("torch")
    runner, arrays, _ = fresh.prepared(one, ours)
    together = fresh.call_of(replace(one, lengths=()), ours, runner, arrays, {})
    assert not checks.check(one, runner, arrays, {}, together)["ok"]


def test_tokens_repeat_where_there_are_many(packed, monkeypatch):
    monkeypatch.setattr(cases, "PERIOD", 7)
    one = packed("chunk_gla", "fwdbwd")
    assert cases.draw(one).arrays["v"].shape == (1, 7, 4, 6)
    _, arrays, pulled = fresh.prepared(one, Linattn("torch"))
    for x in (arrays["q"], arrays["g"], pulled["o"]):
        np.testing.assert_array_equal(x[:, 7:], x[:, :-7])


def test_a_quarter_of_the_heads_has_no_gate_where_they_are_mixed(packed):
    g = cases.draw(packed("chunk_gated_delta_rule", gates="mixed")).arrays["g"]
    assert (g[:, :, :3] < 0).all()
    assert not g[:, :, 3:].any()


def test_kept_outputs_can_be_differentiated(packed):
    one, ours = packed("chunk_gla"), Linattn("torch")
    runner, arrays, _ = fresh.prepared(one, ours)
    assert runner.forward_kept(ours.function(one), arrays)()["o"].requires_grad


@pytest.mark.parametrize("states", [False, True])
def test_peers_get_the_offsets(packed, rows, monkeypatch, states):
    """Stand-ins with the conventions of FlashInfer (decays, no batch, states as ``[N, HV, V, K]``) and of FlashQLA."""
    import linattn

    def flash_qla(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
        given = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
        return linattn.chunk_gated_delta_rule(q, k, v, g, beta, **given, backend="torch")

    def flashinfer(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
        assert cu_seqlens.dtype == torch.int64
        state = None if initial_state is None else initial_state.mT
        o, final = flash_qla(*(x[None] for x in (q, k, v, g.log(), beta)), state, output_final_state, cu_seqlens)
        return (o[0], final.mT) if output_final_state else o[0]

    for peer, module, function in (
        (FlashQla, "flash_qla", flash_qla),
        (FlashInfer, "flashinfer.gdn_prefill", flashinfer),
    ):
        monkeypatch.setattr(peer, "kinds", ("cpu",))
        package = module.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(chunk_gated_delta_rule=function))
    monkeypatch.setattr(subjects.importlib.util, "find_spec", lambda name: object())
    one = packed("chunk_gated_delta_rule", states=states)
    found = {row["library"]: row for row in rows([one], ["torch"], peers=True)}
    for name in ("linattn", "FlashQLA", "FlashInfer"):
        assert found[name]["status"] == "ok", found[name]["reason"]


@pytest.mark.parametrize("peer", ["jla", "softmax (SDPA)"])
def test_peers_without_packed_sequences(packed, peer):
    assert PEERS[peer]().limits(packed("chunk_gla")) == "is not called with packed sequences"


def test_cudnn_takes_no_states(packed):
    assert PEERS["cuDNN"]().limits(packed("chunk_kda", states=True)) == "is not called with states"
