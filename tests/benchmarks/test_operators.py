"""Rows: every family runs, what is wrong is found out, what is not called says why."""

from __future__ import annotations

import json

import linattn
import pytest
from linattn.plugin import Backend, Unsupported
from linattn_benchmarks import ceilings, checks, environment, fresh
from linattn_benchmarks.cases import TIMED
from linattn_benchmarks.operators import STATUS, succeeded
from linattn_benchmarks.subjects import Linattn

torch = pytest.importorskip("torch")


class Off(Backend):
    """The PyTorch backend's GLA with one fault: ``output``, ``gradient``, ``nan`` or ``shape``."""

    name, api, frameworks = "off", ">=1,<2", ("torch",)
    fault = "output"

    def supports(self, call):
        return Unsupported("T must be even") if call.T % 2 else None

    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        if self.fault == "gradient":
            q = q + (0.1 * (q - q.detach()))
        o, state = linattn.chunk_gla(q, k, v, g, backend="torch", output_final_state=output_final_state)
        if self.fault == "output":
            o = torch.cat((o[:, :-1], 1.1 * o[:, -1:]), 1)
        if self.fault == "nan":
            o = o.masked_fill(o == o[0, 0, 0, 0], torch.nan)
        if self.fault == "raises":
            raise ZeroDivisionError("tile of no rows")
        return o, state


@pytest.fixture
def off():
    def register(fault):
        linattn.register_backend(type("Off", (Off,), {"fault": fault}))

    return register


@pytest.mark.parametrize("family", list(TIMED))
def test_every_family_is_timed_and_right(case, rows, family):
    cases = [case(f"chunk_{family}", what, T=33) for what in ("fwd", "fwdbwd")] + [case(f"recurrent_{family}", "decode")]
    cases += [case(f"decode_{family}", "decode", T=2)] if family != "mixed_attn" else []
    for row in rows(cases, ["torch"]):
        assert row["status"] == "ok", row["reason"]
        assert row["ran"].startswith("torch.")
        assert row["error"]["worst"] < 1e-4
        assert row["ratio"] == pytest.approx(row["ms"]["median"] / row["floor"]["ms"])


def test_checked_outputs(case, rows):
    both, decode = rows([case("chunk_gla", "fwdbwd"), case("recurrent_gla", "decode")], ["torch"])
    assert set(both["error"]["outputs"]) == {"o", "dq", "dk", "dv", "dg"}
    assert set(decode["error"]["outputs"]) == {"o", "final_state"}


def test_grouped_heads(case, rows):
    (row,) = rows([case("chunk_gla", "fwdbwd", H=3, HV=6)], ["torch"])
    assert row["status"] == "ok"
    assert row["error"]["heads"] == 4


def test_long_sequences_are_held_against_torch(case, rows, monkeypatch):
    monkeypatch.setattr(checks, "ORACLE_TOKENS", {"cpu": 16})
    (row,) = rows([case("chunk_gla", "fwdbwd")], ["torch"])
    assert (row["status"], row["error"]["reference"]) == ("ok", "torch, float64")


def test_numpy_has_no_gradient_and_says_so(case, rows):
    forward, both = rows([case("chunk_gla"), case("chunk_gla", "fwdbwd")], ["numpy"])
    assert forward["status"] == "ok"
    assert (both["status"], both["reason"]) == ("skipped", "NumPy arrays carry no gradient")


@pytest.mark.parametrize(("fault", "what"), [("output", "fwd"), ("gradient", "fwdbwd"), ("nan", "fwd")])
def test_a_wrong_backend_is_found_out(case, rows, off, fault, what):
    off(fault)
    (row,) = rows([case("chunk_gla", what)], ["off"])
    assert row["status"] == "wrong"
    assert not row["error"]["ok"]
    assert row["ms"] is not None
    assert not succeeded([row])
    if fault == "gradient":
        assert [name for name, error in row["error"]["outputs"].items() if error > row["error"]["bound"]] == ["dq"]
    if fault == "nan":
        assert row["error"]["worst"] is None


def test_refusals_and_failures(case, rows, off):
    off("raises")
    refused, failed = rows([case("chunk_gla", T=7), case("chunk_gla", T=8)], ["off"])
    assert refused["status"] == "skipped"
    assert "T must be even" in refused["reason"]
    assert (failed["status"], failed["reason"]) == ("failed", "ZeroDivisionError: tile of no rows")
    assert not succeeded([refused, failed])


def test_auto_says_what_ran(case, rows):
    (row,) = rows([case("gla")], ["auto"])
    assert row["ran"] == "torch.chunk_gla"


def test_every_row_has_every_field_and_is_json(case, rows, tmp_path):
    found = rows([case("chunk_gla"), case("recurrent_gla", "decode")], ["torch"], peers=True)
    assert {row["status"] for row in found} <= set(STATUS)
    assert len({tuple(row) for row in found}) == 1
    path = tmp_path / "rows.json"
    environment.write(path, "operators", {"ceilings": {}, "rows": found})
    document = environment.read(path)
    assert (document["schema"], document["benchmark"]) == (environment.SCHEMA, "operators")
    assert document["environment"]["packages"]["torch"]
    assert document["results"]["rows"] == json.loads(json.dumps(found))
    assert set(found[0]) == {
        *("operator", "what", "library", "version", "backend", "ran", "case", "label", "status", "reason", "note"),
        *("ms", "graph_ms", "floor", "ratio", "error", "first_call_s", "peak_bytes", "peak_of"),
    }


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "mlx"])
def test_ceilings_by_any_framework(monkeypatch, framework):
    pytest.importorskip(framework)
    monkeypatch.setattr(ceilings, "FRAMEWORKS", {"cpu": (framework,)})
    measured = ceilings.measure("cpu", "float32")
    assert measured["measured_with"] == framework
    assert measured["copy_bytes_per_s"] > 0
    assert measured["matmul_flops_per_s"] > 0


def test_first_call_in_a_fresh_process(case):
    found = fresh.first_call(case("chunk_gla"), Linattn("numpy"))
    assert 0 < found["first_call_s"] < 60
    assert (found["peak_of"] is None) == (found["peak_bytes"] is None)


def test_a_fresh_process_that_fails_gives_no_figures(case):
    assert fresh.first_call(case("chunk_gla"), Linattn("nobody", "numpy")) == fresh.nothing()
