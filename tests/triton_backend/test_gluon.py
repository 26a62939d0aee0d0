"""Kernels for Hopper, on NumPy, against the oracle: what they compute, and how their warpgroups wait for one another."""

from __future__ import annotations

from types import SimpleNamespace

import gluon_on_numpy
import linattn
import numpy as np
import pytest
import torch
from linattn.gates import Softplus
from linattn_backends.triton.delta import call as delta_call
from linattn_backends.triton.delta.config import DeltaVariant
from linattn_backends.triton.diagonal import resident_launch
from linattn_backends.triton.diagonal.config import DiagonalVariant
from linattn_backends.triton.host.walks import goes_through_many
from linattn_backends.triton.runtime import launch, replay
from test_input_maps import check as check_raw
from test_input_maps import raw
from test_ssd import arrays as state_space
from test_ssd import check as check_ssd
from triton.experimental.gluon._runtime import GluonJITFunction
from triton_cases import BACKEND, arrays, check, check_forward, fill_with_least, place_of, pretend

SCAN = "diagonal/resident_sm90.py:diagonal_scan_sm90"
SCAN_WIDE = "diagonal/resident_wide_sm90.py:diagonal_scan_wide_sm90"
GRADIENTS = "diagonal/gradients_sm90.py:diagonal_scalar_gradients_bwd_sm90"
DELTA_GRADIENTS = "delta/gradients_sm90.py:delta_gradients_bwd_sm90"
DELTA_SCORES = "delta/scores_sm90.py:delta_scores_fwd_sm90"
DELTA_FUSED = "delta/fused_sm90.py:delta_fused_fwd_sm90"
DPLR_FUSED = "delta/dplr_fused_sm90.py:delta_dplr_fused_fwd_sm90"
DPLR_FUSED_BWD = "delta/dplr_fused_bwd_sm90.py:delta_dplr_fused_bwd_sm90"
KDA_GRADIENTS = "delta/vector_sm90.py:delta_vector_gradients_bwd_sm90"
KDA_STRONG = "delta/vector_sm90.py:delta_vector_scores_strong_fwd_sm90"
DPLR = {f"delta/dplr_sm90.py:delta_dplr_{stage}_sm90" for stage in ("scores_fwd", "gradients_bwd")}
DPLR_WALKS = {f"delta/state_sm90.py:delta_state_{way}_sm90" for way in ("fwd", "bwd")}
"""Of heads of 128 only, as wide as keys and as values."""
DPLR_CHUNKS = {"delta/dplr_gradients_sm90.py:delta_dplr_chunk_bwd_sm90", "delta/dplr_strong_sm90.py:delta_dplr_strong_bwd_sm90"}
"""Of heads of 64 only: all gradients of a chunk at once."""
GLA_STRONG = {f"diagonal/vector_sm90.py:diagonal_vector_{stage}_sm90" for stage in ("scores_strong_fwd", "intra_strong_bwd")}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The kernels in Gluon that were launched, by file and name."""
    names, start = set(), launch.start

    def start_on_numpy(kernel, count, device, args, config):
        if isinstance(kernel, GluonJITFunction):
            names.add(place_of(kernel))
            gluon_on_numpy.run(kernel, count, args, config)
        else:
            start(kernel, count, device, args, config)

    monkeypatch.setattr(launch, "start", start_on_numpy)
    pretend(monkeypatch, not_hopper=None)
    return names


def call(family, K=64, V=64, **sizes):
    given = arrays(family, K=K, V=V, dtype=torch.bfloat16, **sizes)
    if "beta" in given:
        given["beta"] = given["beta"].bfloat16()
    check(family, given)


@pytest.mark.parametrize("kind", ["weak", "strong", "-inf", "mixed"])
def test_a_scalar_gate(kind, launched):
    call("simple_gla", T=200, kind=kind)
    assert launched == {SCAN, GRADIENTS}


def test_no_gate(launched):
    call("linear_attn", T=130, V=128)
    assert launched == {SCAN}


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_heads_and_packed_sequences(family, launched):
    call(family, T=140, K=128, H=1, HV=2)
    call(family, T=180, cu=[0, 0, 5, 5, 140, 180, 180])
    call(family, T=0, cu=[0, 0, 0])
    assert launched


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_a_first_sequence_of_one_token(family, launched):
    """Of which nothing before it is read."""
    call(family, T=300, cu=[0, 1, 174])
    assert launched == ({SCAN, GRADIENTS} if family == "simple_gla" else {SCAN})


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_split_sequences(family, launched, monkeypatch):
    """Into segments of more chunks than are loaded ahead."""
    monkeypatch.setattr(DiagonalVariant, "segment", lambda *sizes: 4)
    call(family, T=600, kind="weak", cu=[0, 3, 3, 600])
    assert launched


@pytest.mark.parametrize(("family", "kind"), [("linear_attn", None), ("simple_gla", "weak"), ("simple_gla", "mixed")])
def test_two_programs_share_a_walk(family, kind, launched, monkeypatch):
    pretend(monkeypatch, num_sms=4)
    call(family, T=700, HV=2, H=2, kind=kind or "plain")
    assert launched == ({SCAN, GRADIENTS} if family == "simple_gla" else {SCAN})


@pytest.mark.parametrize(("family", "kind"), [("linear_attn", "plain"), ("simple_gla", "weak"), ("simple_gla", "mixed")])
def test_two_programs_share_a_walk_of_packed_sequences(family, kind, launched, monkeypatch):
    """Whose lengths differ, so that there may be nothing for one of them, or for both."""
    pretend(monkeypatch, num_sms=8)
    monkeypatch.setattr(DiagonalVariant, "shares", lambda self, T, busy: self.shareable)
    call(family, T=700, HV=1, cu=[0, 0, 5, 69, 197, 690], kind=kind)
    assert launched == ({SCAN, GRADIENTS} if family == "simple_gla" else {SCAN})


@pytest.fixture
def programs(monkeypatch):
    """Of each kernel that has several sequences a program, in the diagonal core three, how many programs there are."""
    found, start = set(), launch.start

    def counted(kernel, count, device, args, config):
        if config.get("MANY"):
            found.add((kernel.__name__, count))
        start(kernel, count, device, args, config)

    monkeypatch.setattr(launch, "start", counted)
    monkeypatch.setattr(
        resident_launch, "sequences_together", lambda run, stage, *_: 3 if goes_through_many(stage.kernel) else 1
    )
    return found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(T=320, cu=[0, 70, 70, 75, 203, 267, 268, 300, 310]), 3),  # eight: three, three and two; tokens behind
        (dict(T=210, cu=[0, 0, 0, 0, 130, 131, 200, 200]), 3),
        (dict(B=5, T=66, H=2, HV=2), 2 * 2),
        (dict(B=4, T=66, H=1, HV=2), 2 * 2),
    ],
)
@pytest.mark.parametrize(("family", "kind"), [("linear_attn", "plain"), ("simple_gla", "weak"), ("simple_gla", "mixed")])
def test_a_program_scans_several_sequences(family, kind, sizes, expected, launched, programs):
    call(family, V=128, kind=kind, **sizes)
    scans = {("diagonal_scan_sm90", expected * 2)}  # of two tiles of 64 value channels
    if family == "linear_attn":
        scans |= {("diagonal_scan_sm90", expected)} if sizes.get("H") != 1 else set()  # of dq and dk, in bfloat16
    elif sizes.get("H") != 1:
        scans |= {("diagonal_scalar_gradients_bwd_sm90", expected)}
    assert programs == scans


def test_sequences_of_a_program_lie_apart():
    walks = gluon_on_numpy.on_numpy("linattn_backends.triton.diagonal.walks_sm90")
    many, given = SimpleNamespace(MANY=True), [SimpleNamespace(i=i, N=8, STEP=3) for i in range(3)]
    found = [[walks["segment_of"](walk, m) for m in range(walks["segments_of"](many, walk))] for walk in given]
    assert found == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_program_scans_several_sequences_of_weighted_values(launched, programs):
    check_ssd(state_space(T=300, H=1, HV=2, K=64, V=64, dtype=torch.bfloat16, z=None, cu=[0, 70, 70, 75, 203, 267, 290]))
    assert programs == {("diagonal_scan_sm90", 2 * 2)}


@pytest.mark.parametrize(
    "sizes", [dict(K=128), dict(z=None), dict(K=128, H=2, T=300, z=None, cu=[0, 5, 290]), dict(z=None, D=2)]
)
def test_weights_of_values(sizes, launched):
    """``ssd``, whose step sizes and skip are the core's."""
    check_ssd(state_space(**dict(T=140, H=1, HV=2, K=64, V=64, dtype=torch.bfloat16) | sizes))
    assert launched == {SCAN}


@pytest.mark.parametrize("K", [64, 128])
def test_two_programs_that_share_a_walk_of_weighted_values(K, launched, monkeypatch):
    pretend(monkeypatch, num_sms=4)
    check_ssd(state_space(T=600, HV=2, K=K, V=64, z=None, dtype=torch.bfloat16))
    assert launched == {SCAN}


@pytest.mark.parametrize(("family", "kind"), [("linear_attn", "plain"), ("simple_gla", "weak"), ("simple_gla", "mixed")])
def test_wide_heads(family, kind, launched):
    call(family, T=140, K=256, V=192, H=1, HV=2, kind=kind)
    call(family, T=180, K=256, kind=kind, cu=[0, 0, 5, 5, 140, 180, 180])
    call(family, T=70, K=64, V=192, kind=kind)
    assert launched == {SCAN, SCAN_WIDE}


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_delta_families(family, launched):
    call(family, T=140, kind="weak")
    assert len(launched) > 2


@pytest.mark.parametrize("whole", [128, 200])
@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_packed_delta_families_in_segments(family, whole, launched, monkeypatch):
    """One sequence has no token, one is a segment, and two are cut, or none is, because none is long enough."""
    monkeypatch.setattr(DeltaVariant, "segment", lambda *sizes: 1)
    monkeypatch.setattr(DeltaVariant, "whole", lambda self, length: whole)
    call(family, T=310, kind="weak", cu=[0, 100, 100, 300, 310])
    assert len(launched) > 2


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda", "simple_gla"])
@pytest.mark.parametrize("strength", [0.001, 2.0])
def test_stages_between_which_ranks_talk(family, strength, launched):
    """Of gates that forget nothing of a sequence, and of others, of which most chunks are not read."""
    given = arrays(family, T=300, HV=2, K=64, V=64, dtype=torch.bfloat16, state=False)
    if "g" in given:
        given["g"] = -strength * (0.5 + torch.rand_like(given["g"]))
    inputs, stages = BACKEND.stages(family, given, cu_seqlens=None, offsets=(), scale=None, chunk_size=None)
    exact = {name: x.double() for name, x in given.items()}
    start = torch.zeros(1, 2, 64, 64, dtype=torch.float64, requires_grad=True)
    o, end = getattr(linattn, f"chunk_{family}")(**exact, initial_state=start, output_final_state=True, backend="torch")
    do = torch.randn_like(o).bfloat16()
    (wanted,) = torch.autograd.grad(o, start, do.double())
    made = stages.begin(inputs)
    A, b = stages.summary(inputs, made)
    found, _, kept = stages.finish(inputs, made, start.detach().float(), False)
    d = stages.adjoint(inputs, stages.begin(inputs, kept), do, None, None)
    for one, other in ((found, o), (b, end), (d, wanted)):
        assert (one.double() - other).norm() < 0.02 * other.norm()
    assert A.any() == (strength < 1 or family == "delta_rule")
    assert launched


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda", "dplr"])
def test_value_heads_that_take_turns(family, launched):
    call(family, T=80, HV=2, V=128, kind="mixed", cu=[0, 0, 30, 80])
    assert launched & {DELTA_GRADIENTS, KDA_GRADIENTS, *DPLR}


@pytest.mark.parametrize("sizes", [dict(K=128), dict(H=1, HV=2, V=128, cu=[0, 0, 30, 90, 100])])
@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_raw_projections(family, sizes, launched):
    """Strong gates, which ``kda`` has kernels for, among weak ones; 16 bits, and gates that no chunk fills."""
    given, _ = raw(family, **dict(T=100, H=2, HV=2, K=64, V=64, dtype=torch.bfloat16) | sizes)
    gate = None if family == "delta_rule" else Softplus(torch.tensor([-3.0, 3.0]), torch.randn(given["g"].shape[2:]))
    for name in {"g", "beta"} & given.keys():
        given[name] = given[name].bfloat16()
    check_raw(family, given, gate, qk_norm="l2", beta_map="sigmoid")
    assert launched >= ({KDA_STRONG, KDA_GRADIENTS} if family == "kda" else {DELTA_SCORES, DELTA_GRADIENTS})


@pytest.mark.parametrize("sizes", [dict(T=140, H=1, HV=2, K=128), dict(T=140, V=128, cu=[0, 0, 100, 140])])
def test_dplr(sizes, launched):
    call("dplr", kind="weak", **sizes)
    assert launched == DPLR


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        (dict(T=150, B=2, kind="weak"), torch.bfloat16),
        (dict(T=140, H=1, HV=2, kind="mixed"), torch.float32),
        (dict(T=230, kind="plain", cu=[0, 0, 5, 200, 230]), torch.float32),
        (dict(T=70, kind="strong"), torch.bfloat16),
    ],
)
def test_gradients_of_dplr_at_once(sizes, dtype, launched, monkeypatch):
    """Of chunks that are not strong, among others that are."""
    monkeypatch.setattr(delta_call, "many", lambda *sizes: False)
    given = arrays("dplr", K=64, V=64, dtype=torch.bfloat16, **sizes)
    check("dplr", given | {name: given[name].to(dtype) for name in "ab"})
    assert launched == {"delta/dplr_sm90.py:delta_dplr_scores_fwd_sm90"} | DPLR_CHUNKS


@pytest.mark.parametrize("sizes", [dict(T=200, H=1, HV=2), dict(T=230, kind="mixed", cu=[0, 0, 5, 200, 230])])
def test_walks_of_dplr(sizes, launched):
    """Two writers; through more chunks than are loaded ahead."""
    call("dplr", **dict(K=128, V=128, kind="weak") | sizes)
    assert launched == DPLR | DPLR_WALKS


def test_walks_of_dplr_in_segments(launched, monkeypatch):
    """What segments end as is made by plain kernels, and then goes into these."""
    monkeypatch.setattr(DeltaVariant, "segment", lambda *sizes: 2)
    monkeypatch.setattr(DeltaVariant, "whole", lambda self, length: 0)
    call("dplr", T=300, K=128, V=128, kind="weak", cu=[0, 3, 3, 300])
    assert launched == DPLR | DPLR_WALKS


@pytest.mark.parametrize(("a", "b"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_dplr_with_wider_vectors(a, b, launched):
    """A weak chunk in these kernels, and then a strong one, for which there is none."""
    given = arrays("dplr", T=70, K=128, V=64, dtype=torch.bfloat16, kind="weak")
    given["g"][:, 64:] *= 2000
    check("dplr", given | dict(a=given["a"].to(a), b=given["b"].to(b)))
    assert launched == DPLR


@pytest.mark.parametrize("kind", ["strong", "-inf", "mixed"])
def test_strong_gates_of_kda(kind, launched):
    call("kda", T=140, kind=kind, K=128)
    assert {KDA_STRONG, KDA_GRADIENTS} < launched


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_of_kda_in_16_bits(dtype, launched):
    """Whose terms go where they were copied to."""
    given = arrays("kda", T=140, K=128, V=64, dtype=torch.bfloat16, kind="weak")
    given["beta"] = given["beta"].bfloat16()
    given["g"][:, 64:] *= 500
    check("kda", given | dict(g=given["g"].to(dtype)))
    assert {KDA_STRONG, KDA_GRADIENTS} < launched


def test_weak_gates_of_softplus_are_not_lost():
    """Where ``1 + e^x`` is rounded, which a sum over many tokens would tell."""
    x = np.linspace(-40, 40, 4001, dtype=np.float32)
    gates = gluon_on_numpy.on_numpy("linattn_backends.triton.lib.sm90_gates")
    found = gluon_on_numpy.numbers(gates["log2_of_one_and_exp2"](gluon_on_numpy.Value(x)))
    np.testing.assert_allclose(found, np.logaddexp2(x.astype(np.float64), 0.0), rtol=2e-5)


@pytest.mark.parametrize("kind", ["strong", "-inf", "mixed"])
def test_strong_gates_of_gla(kind, launched):
    call("gla", T=70, kind=kind, H=1, HV=2)
    call("gla", T=100, kind=kind, K=128, cu=[0, 0, 70, 100])
    assert launched == GLA_STRONG


@pytest.mark.parametrize("family", ["gla", "kda", "dplr", "gated_delta_rule"])
def test_chunks_that_no_sequence_has(family, monkeypatch, launched):
    """There is room for 21, and what stands in the place of their marks says of all that their gates are strong."""
    fill_with_least(monkeypatch)
    call(family, T=70, kind="mixed", cu=[0, *[5] * 20, 70])
    assert launched


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule"])
def test_chunks_that_do_not_fill_a_batch(family, launched):
    """``delta_scores_fwd_sm90`` takes four chunks a program, of whatever heads and sequences."""
    call(family, T=300, H=1, HV=3, kind="mixed", cu=[0, 0, 5, 300, 300])
    assert DELTA_SCORES in launched


@pytest.mark.parametrize(
    ("family", "sizes", "kernel"),
    [("linear_attn", {}, SCAN), ("simple_gla", {}, GRADIENTS), ("simple_gla", dict(K=256), SCAN_WIDE), ("kda", {}, None)],
)
def test_initial_states_with_value_channels_first(family, sizes, kernel, launched):
    given = arrays(family, **dict(T=140, K=64, V=64, dtype=torch.bfloat16) | sizes)
    given |= {"beta": given["beta"].bfloat16()} if "beta" in given else {}
    check(family, given | dict(initial_state=given["initial_state"].mT.contiguous().mT))
    assert kernel is None or kernel in launched


MANY = [
    dict(T=140, B=2, kind="mixed"),
    dict(T=300, H=1, HV=2, kind="weak", cu=[0, 0, 5, 300, 300]),
    dict(T=1, kind="strong", state=False),
    dict(T=192, kind="-inf"),
    dict(T=0, cu=[0, 0, 0, 0, 0]),
]


@pytest.mark.parametrize("options", [{}, dict(scale=0.5, qk_norm="l2")])
@pytest.mark.parametrize("sizes", MANY, ids=range(len(MANY)))
@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule"])
def test_many_heads_in_one_kernel(family, sizes, options, launched):
    """One multiprocessor, as the tests' device has, is filled by one head."""
    given = arrays(family, K=128, V=128, dtype=torch.bfloat16, **sizes)
    given["beta"] = given["beta"].bfloat16()
    check_forward(family, given, "chunk", **options)
    assert launched == {DELTA_FUSED}


@pytest.mark.parametrize("options", [{}, dict(qk_norm="l2")])
@pytest.mark.parametrize(
    ("sizes", "num_sms", "expected"),
    [
        (dict(T=330, cu=[0, 0, 70, 70, 70, 140, 141, 205, 290]), 1, 1),
        (dict(T=330, H=1, HV=2, cu=[0, 0, 70, 70, 70, 140, 141, 205, 290]), 4, 4),
        (dict(T=330, cu=[0, 64, 128, 192, 256, 320]), 1, 1),
        (dict(B=5, T=64, kind="mixed"), 1, 1),
        (dict(B=3, T=70, H=1, HV=2, state=False), 2, 2),
    ],
)
def test_a_program_walks_several_sequences(sizes, num_sms, expected, options, launched, programs, monkeypatch):
    """Some of them empty; of some the numbers of the first chunk are known, and of those behind an empty one not."""
    pretend(monkeypatch, num_sms=num_sms)
    given = arrays("gated_delta_rule", K=128, V=128, dtype=torch.bfloat16, **sizes)
    given["beta"] = given["beta"].bfloat16()
    check_forward("gated_delta_rule", given, "chunk", **options)
    assert programs == {("delta_fused_fwd_sm90", expected)}


@pytest.mark.parametrize(
    ("family", "sizes", "tiles"),
    [
        ("gated_delta_rule", dict(T=330, H=1, HV=2, cu=[0, 0, 70, 70, 70, 140, 141, 205, 290]), 2 * 2),
        ("delta_rule", dict(B=5, T=64, kind="mixed", state=False), 2),
        ("kda", dict(B=3, T=70, H=1, HV=2, kind="mixed"), 2 * 2),
        ("kda", dict(T=330, kind="strong", cu=[0, 64, 64, 128, 192, 300, 330]), 2),
        ("dplr", dict(T=330, cu=[0, 64, 64, 128, 192, 300, 330]), 2),
    ],
)
def test_a_program_carries_the_states_of_several_sequences(family, sizes, tiles, launched, programs):
    """Forward and back: all, for one multiprocessor."""
    call(family, K=128, V=128, **sizes)
    assert {(f"delta_state_{way}_sm90", tiles) for way in ("fwd", "bwd")} <= programs


@pytest.mark.parametrize("how", ["strided", "unit rows", "states with value channels first"])
def test_what_a_program_of_several_sequences_reads(how, launched, programs):
    """Where it lies, in forward passes with and without gradients and in backward passes."""
    B, T = (3, 80) if how == "strided" else (1, 200)
    cu = None if how == "strided" else [0, 64, 64, 130, 200]
    given = arrays("gated_delta_rule", B=B, T=T, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16, cu=cu)
    given["beta"] = given["beta"].bfloat16()
    if how == "strided":  # heads are some of more
        given |= {name: torch.cat((given[name], given[name]), 2)[:, :, : given[name].shape[2]] for name in "qkv"}
    elif how != "unit rows":
        given["initial_state"] = given["initial_state"].mT.contiguous().mT
    options = dict(qk_norm="l2") if how == "unit rows" else {}
    check_forward("gated_delta_rule", given, "chunk", **options)
    assert ("delta_fused_fwd_sm90", 4) in programs
    check("gated_delta_rule", given, **options)
    assert {(f"delta_state_{way}_sm90", 4 * 2) for way in ("fwd", "bwd")} <= programs


def test_sequences_of_a_batch_that_do_not_lie_one_after_the_other(launched, programs):
    """A program has one of them."""
    given = arrays("gated_delta_rule", K=128, V=128, B=3, T=80, state=False, dtype=torch.bfloat16)
    given["beta"] = given["beta"].bfloat16()
    check_forward("gated_delta_rule", {name: x[:, :70] for name, x in given.items()}, "chunk")
    assert launched == {DELTA_FUSED}
    assert not programs


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [
        ("plain", dict(T=150, B=2, H=1, HV=2), torch.bfloat16),
        ("weak", dict(T=64, B=2), torch.float32),
        ("strong", dict(T=130, H=2, HV=2), torch.float32),
        ("strong", dict(T=130, B=2, H=1, HV=2), torch.bfloat16),  # whose heads take turns
        ("mixed", dict(T=200, B=2), torch.bfloat16),
        ("-inf", dict(T=70, B=2, state=False), torch.float32),
        ("plain", dict(T=230, cu=[0, 5, 5, 140, 230]), torch.bfloat16),
        ("mixed", dict(T=0, cu=[0, 0, 0, 0, 0]), torch.bfloat16),
    ],
)
def test_many_heads_of_two_writers_in_one_kernel(kind, sizes, dtype, launched):
    """Strong chunks go in spans; ``a, b`` are converted as they are read, if they are in another dtype."""
    given = arrays("dplr", K=64, V=64, dtype=torch.bfloat16, kind=kind, **sizes)
    given |= {name: given[name].to(dtype) for name in "ab"}
    check_forward("dplr", given, form="chunk")
    assert launched == {DPLR_FUSED}
    check("dplr", given)
    assert launched == {DPLR_FUSED, DPLR_FUSED_BWD} | DPLR_CHUNKS


@pytest.mark.parametrize("width", [64, 65])
def test_tracers_are_told_what_is_kept_where_heads_are_many(width, launched, monkeypatch):
    """States and errors, also of arrays that do not lie as the kernel that leaves those takes them."""
    monkeypatch.setattr(replay, "OFTEN", 100)  # a rehearsal has no memory for kernels on NumPy
    torch._dynamo.reset()
    given = arrays("dplr", B=2, T=70, K=width, V=width, dtype=torch.bfloat16, state=False)
    found = []

    def outputs(*x):
        return BACKEND.chunk_dplr(*x, output_final_state=True)[0]

    for run in (outputs, torch.compile(outputs, backend="aot_eager", fullgraph=True)):
        leaves = [x[..., :64].detach().requires_grad_() for x in given.values()]
        o = run(*leaves)
        o.float().sum().backward()
        found.append([o, *(x.grad for x in leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    kernels = {DPLR_FUSED, DPLR_FUSED_BWD} | DPLR_CHUNKS
    assert launched == (kernels if width == 64 else set())
