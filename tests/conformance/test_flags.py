"""What the flags of an id make of a call: packings, values, dtypes, layouts, gradients."""

import numpy as np
import pytest
from linattn_conformance.adapters import adapter_for
from linattn_conformance.calls import Run, drawn, truth
from linattn_conformance.cases import every_case, named
from linattn_conformance.data import draw
from linattn_conformance.factors import LAYOUTS
from linattn_conformance.packings import KINDS, lengths

NUMPY = adapter_for("numpy", "cpu")
SIZES = "T40-K6-V5-B2-H3"


def problem(flags, op="gla", form="chunk", sizes=SIZES, dtype="fp32", check="forward"):
    return draw(named(f"{op}/{form}/{dtype}/{flags}/{sizes}/{check}"))


# -- packings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [0, 1, 2, 15, 64, 257, 4096])
def test_a_packing_has_no_more_tokens_than_there_are(kind, T):
    for seed in range(20):
        found = lengths(kind, T, np.random.default_rng(seed))
        assert found
        assert min(found) >= 0
        assert sum(found) <= T if kind in ("tail", "nothing") else sum(found) == T


def test_kinds_are_what_they_are_called():
    def of(kind, T=150):
        return lengths(kind, T, np.random.default_rng(1))

    assert 0 in of("empties")[1:-1]
    assert of("adjacent")[:2] == [0, 0]
    assert of("adjacent")[-2:] == [0, 0]
    assert of("ones").count(1) >= 2
    assert sum(of("tail")) < 150
    assert set(of("nothing")) == {0}
    assert len(of("many")) == 150
    assert all(n % 16 == 0 for n in of("chunks")[:-1])


def test_the_packing_of_a_case_is_its_offsets():
    found = problem("state-varlen.tail", sizes="T40-K6-V5-B1-H3").arrays
    assert found["cu_seqlens"][-1] < 40
    assert len(found["initial_state"]) == len(found["cu_seqlens"]) - 1


# -- values ----------------------------------------------------------------------------------------------------------


def test_dtypes_of_single_arrays():
    found = problem("fp16.g-fp64.initial_state-i64-state-varlen.one", sizes="T40-K6-V5-B1-H3").dtypes
    assert (found["q"], found["g"], found["initial_state"]) == ("float32", "float16", "float64")
    assert found["cu_seqlens"] == "int64"
    assert problem("i64-slots", form="decode").dtypes["state_indices"] == "int64"


def test_states_given_and_asked_for():
    asked = {flags: problem(flags).options["output_final_state"] for flags in ("plain", "initial", "final", "state")}
    assert asked == {"plain": False, "initial": False, "final": True, "state": True}
    given = {flags: "initial_state" in problem(flags).arrays for flags in asked}
    assert given == {"plain": False, "initial": True, "final": False, "state": True}


def test_magnitudes_are_of_values_and_states():
    plain, vast = problem("state-seed.1").arrays, problem("state-vast-seed.1").arrays
    assert np.abs(vast["v"]).mean() > 2.0**70 < np.abs(vast["initial_state"]).mean()
    assert np.abs(vast["q"]).mean() < 10 > np.abs(plain["v"]).mean()
    sums = problem("normalize-state-vast", op="linear_attn").arrays["initial_state"]
    assert np.abs(sums[..., -1]).max() < 10
    assert np.abs(sums[..., :-1]).min() > 2.0**60


@pytest.mark.parametrize(("gate", "ends"), [("Softplus", {-100.0, 100.0}), ("LogSigmoid", {-100.0}), ("NegExp", {-100.0})])
def test_some_projections_are_so_large_that_float32_does_not_hold_their_exponential(gate, ends):
    g = problem(f"gate.{gate}").arrays["g"]
    assert set(g[np.abs(g) > 10].tolist()) == ends
    assert np.mean(np.abs(g) > 10) < 0.1


def test_zeros_subnormals_and_repetition():
    zeros = problem("zeros.k").arrays["k"]
    assert (zeros[:, 1::3] == 0).all()
    assert (zeros[:, 0::3] != 0).all()
    small = np.abs(problem("subnormal.v").arrays["v"])
    assert small.min() == 3 * 2.0**-149
    repeated = problem("expanded.q").arrays["q"]
    assert (repeated == repeated[:1]).all()
    assert not (problem("plain").arrays["q"] == repeated[:1]).all()


def test_scales_groups_and_slots():
    kinds = ("given", "negative", "zero", "one", "large", "tiny")
    scales = [problem(f"scale.{kind}").options["scale"] for kind in kinds]
    assert scales[1] < 0 == scales[2]
    assert scales[3] == 1
    assert isinstance(scales[3], int)
    assert scales[4] > 1000 > 1e-9 > scales[5]
    assert problem("grouped.5").sizes["HV"] == 15
    assert problem("slots", form="decode", sizes="T1-K6-V5-B4-H2").arrays["state_indices"].tolist().count(-1) == 1
    assert -1 not in problem("slots.all", form="decode", sizes="T1-K6-V5-B4-H2").arrays["state_indices"]


def test_what_the_loss_reads():
    def fed(flags):
        return truth(named(f"gla/chunk/fp32/{flags}/T9-K6-V5-B2-H3/gradient"), NUMPY).cotangents

    assert set(fed("state")) == {"o", "final_state"}
    assert set(fed("loss.o-state")) == {"o"}
    assert set(fed("loss.state-state")) == {"final_state"}
    assert not fed("state-zeros.cotangents")["o"].any()
    assert {name: x.any() for name, x in fed("state-zeros.d_o").items()} == {"o": False, "final_state": True}
    assert {name: x.any() for name, x in fed("state-zeros.d_state").items()} == {"o": True, "final_state": False}
    assert len(set(fed("expanded.cotangents-state")["o"].ravel())) == 1


def test_which_inputs_train():
    def trained(flags):
        run = Run(named(f"gla/chunk/fp32/{flags}/T9-K6-V5-B2-H3/gradient"), NUMPY, None, None)
        return {name for name in run.values if not run.is_constant(name)}

    assert trained("state") == {"q", "k", "v", "g", "initial_state"}
    assert trained("only.k-state") == {"k"}
    assert trained("constant.k-state") == {"q", "v", "g", "initial_state"}


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_values(framework, layout):
    pytest.importorskip(framework)
    adapter = adapter_for(framework, "cpu")
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(np.float32)
    laid = getattr(adapter, layout)(adapter.from_float64(x, "float32"))
    assert (adapter.to_float64(laid) == x).all()
    index = getattr(adapter, layout)(adapter.from_float64(np.array([0, 2, 5]), "int64"))
    assert adapter.to_float64(index).tolist() == [0, 2, 5]


def test_layouts_are_what_they_are_called():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 4)).astype(np.float32)
    repeated = np.repeat(x[:1], 2, 0)
    assert NUMPY.expanded(repeated).strides[0] == 0
    assert all(stride < 0 for stride in NUMPY.reversed(x.copy()).strides)
    assert not NUMPY.readonly(x.copy()).flags.writeable
    assert NUMPY.misaligned(x).ctypes.data % 4
    assert NUMPY.misaligned(x[:0]).size == 0


def test_torch_layouts_are_what_they_are_called():
    torch = pytest.importorskip("torch")
    adapter = adapter_for("torch", "cpu")
    assert adapter.expanded(torch.ones(2, 3)).stride() == (0, 0)
    assert adapter.misaligned(torch.ones(2, 3)).storage_offset() == 1


def test_one_array_is_laid_out_or_all():
    def strides(flags):
        run = Run(named(f"gla/chunk/fp32/{flags}/{SIZES}/forward"), NUMPY, None, None)
        return {name for name, x in run.arrays().items() if not x.flags.c_contiguous}

    assert strides("strided.k") == {"k"}
    assert strides("strided") == {"q", "k", "v", "g"}
    assert strides("plain") == set()


def test_values_of_a_case_are_those_of_its_id():
    """Whatever the form and the check, so that its truth serves them all; and of no other id."""
    case = next(
        case for case in every_case() if case.within == "full" and case.op == "gla" and case.applies("numpy", "cpu", 0.0)
    )
    values = drawn(case, NUMPY)
    again = drawn(named(case.id), NUMPY)
    assert all((values[name] == again[name]).all() for name in values)
