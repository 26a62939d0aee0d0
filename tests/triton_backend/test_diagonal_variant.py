"""Which kernels of the diagonal core run at each stage, and why."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from linattn_backends.triton.diagonal.call import Segments
from linattn_backends.triton.diagonal.config import backward_variant, forward_variant
from linattn_backends.triton.diagonal.resident_launch import sequences_together
from linattn_backends.triton.host.variant import Facts
from linattn_backends.triton.runtime.device import Properties
from triton_cases import place_of

BF16, FULL = torch.bfloat16, torch.float32
HOPPER, AMPERE = Properties(132, True, None), Properties(108, False, "compute capability 8.0")
SUMS, STATES = "diagonal/gate.py:diagonal_running_sums_fwd", "diagonal/memory.py:diagonal_states"
SCAN, OUTPUTS = "diagonal/resident.py:diagonal_scan", "diagonal/memory.py:diagonal_outputs"
SCAN_SM90, SCAN_WIDE = (f"diagonal/resident{x}_sm90.py:diagonal_scan{x}_sm90" for x in ("", "_wide"))
GRADIENTS, SCALAR_GRADIENTS = (f"diagonal/memory.py:diagonal_{x}gradients_bwd" for x in ("", "scalar_"))
SCAN_GRADIENTS = "diagonal/gradients_sm90.py:diagonal_scalar_gradients_bwd_sm90"
MATRICES = "diagonal/gate.py:diagonal_sum_matrices_fwd"
SCORES, INTER, INTRA = (
    f"diagonal/vector.py:diagonal_vector_{x}" for x in ("scores_fwd", "inter_bwd", "intra_bwd")
)  # fmt: skip
VECTOR_SCAN, VECTOR_OUTPUTS = (f"diagonal/vector.py:diagonal_vector_{x}" for x in ("scan", "outputs"))
STRONG_SCORES, STRONG_INTRA = (
    f"diagonal/vector_sm90.py:diagonal_vector_{x}_sm90" for x in ("scores_strong_fwd", "intra_strong_bwd")
)


def facts(family="simple_gla", dtype=BF16, K=64, V=64):
    return Facts(family, dtype, K, V, 32 if dtype == FULL else 64)


def kernels(variant):
    """By stage, but for those that only segments have."""
    return {name: place_of(x.kernel) for name, x in variant.stages.items() if not name.startswith("segment")}


FORWARD = [
    (facts("linear_attn"), HOPPER, (), "resident", dict(scan=SCAN_SM90), None),
    (facts(), HOPPER, (), "resident", dict(running_sums=SUMS, scan=SCAN_SM90), None),
    (facts(), HOPPER, ("v",), "resident", dict(running_sums=SUMS, scan=SCAN), "v not aligned to 16 bytes"),
    (facts(K=256), HOPPER, (), "resident", dict(running_sums=SUMS, scan=SCAN_WIDE), None),
    (
        facts(K=256), HOPPER, ("q", "k"), "memory", dict(running_sums=SUMS, states=STATES, outputs=OUTPUTS),
        "q, k not aligned to 16 bytes",
    ),
    (facts("linear_attn", V=192), HOPPER, (), "resident", dict(scan=SCAN_SM90), None),
    (facts("linear_attn"), AMPERE, (), "memory", dict(states=STATES, outputs=OUTPUTS), "compute capability 8.0"),
    (
        facts("linear_attn", FULL), HOPPER, (), "memory", dict(states=STATES, outputs=OUTPUTS),
        "operands are float32, not bfloat16",
    ),
    (
        facts("gla"), HOPPER, (), "vector",
        dict(sum_matrices=MATRICES, scores=SCORES, scores_strong=STRONG_SCORES, scan=VECTOR_SCAN), None,
    ),
    (
        facts("gla"), HOPPER, ("g",), "vector", dict(sum_matrices=MATRICES, scores=SCORES, scan=VECTOR_SCAN),
        "g not aligned to 16 bytes",
    ),
    (
        facts("rwkv6", K=256), HOPPER, (), "vector",
        dict(sum_matrices=MATRICES, scores=SCORES, states=STATES, outputs=VECTOR_OUTPUTS), "rwkv6 has none",
    ),
    (facts("gla with gv"), HOPPER, (), "memory", dict(states=STATES, outputs=OUTPUTS), "gla with gv has none"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "device", "unaligned", "algorithm", "stages", "reason"), FORWARD, ids=range(len(FORWARD)))
def test_of_a_forward_pass(call, device, unaligned, algorithm, stages, reason):
    found = forward_variant(call, call.dtype, device, unaligned)
    assert (found.algorithm, kernels(found), found.reason) == (algorithm, stages, reason)


DIRECT = dict(scan_dv=SCAN_SM90, scan_dk=SCAN_SM90, scan_dq=SCAN_SM90)
BACKWARD = [
    (facts("linear_attn"), {}, "resident", DIRECT, None),
    (facts("linear_attn"), dict(grouped=True), "resident", dict(DIRECT, scan_dk=SCAN, scan_dq=SCAN), None),
    (
        facts("linear_attn"), dict(unaligned=("v",)), "resident", dict(DIRECT, scan_dk=SCAN, scan_dq=SCAN), None,
    ),
    (facts(), {}, "resident", dict(running_sums=SUMS, scan_dv=SCAN_SM90, scan_gradients=SCAN_GRADIENTS), None),
    (
        facts(), dict(grouped=True), "resident",
        dict(running_sums=SUMS, scan_dv=SCAN_SM90, states=STATES, scalar_gradients=SCALAR_GRADIENTS), None,
    ),
    (
        facts(), dict(divides=False), "memory",
        dict(running_sums=SUMS, states=STATES, outputs=OUTPUTS, scalar_gradients=SCALAR_GRADIENTS),
        "a state's gradient cannot be divided by the scale",
    ),
    (
        facts(K=256), {}, "memory",
        dict(running_sums=SUMS, states=STATES, scan_dv=SCAN_WIDE, scalar_gradients=SCALAR_GRADIENTS), None,
    ),
    (
        facts("linear_attn", K=256), dict(do=FULL), "memory", dict(states=STATES, outputs=OUTPUTS, gradients=GRADIENTS),
        "results are float32, not bfloat16",
    ),
    (
        facts("gla with gv"), {}, "memory", dict(states=STATES, gradients=GRADIENTS, value_gradients=GRADIENTS),
        "gla with gv has none",
    ),
    (
        facts("gla"), {}, "vector",
        dict(states=STATES, scan=VECTOR_SCAN, inter=INTER, sum_matrices=MATRICES, intra=INTRA, intra_strong=STRONG_INTRA),
        None,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "algorithm", "stages", "reason"), BACKWARD, ids=range(len(BACKWARD)))
def test_of_a_backward_pass(call, given, algorithm, stages, reason):
    given = dict(do=call.dtype, grouped=False, divides=True, unaligned=()) | given
    found = backward_variant(call, device=HOPPER, **given)
    assert (found.algorithm, kernels(found), found.reason) == (algorithm, stages, reason)


def test_two_programs_share_a_scan_of_narrow_values_in_kernels_for_hopper():
    """Where pairs of programs find room, and sequences are not cut, which fills a device that has a quarter of it to do."""
    found = [forward_variant(facts(K=K, V=V), BF16, HOPPER) for K, V in ((64, 64), (128, 64), (64, 128), (256, 64))]
    assert [variant.shares(2048, 66) for variant in found] == [True, True, False, False]
    assert [found[0].shares(2048, busy) for busy in (33, 34, 66, 67)] == [False, True, True, False]
    assert [found[0].shares(1024, busy) for busy in (1, 32, 66, 67)] == [True, True, True, False]
    assert [found[0].shares(tokens, 1) for tokens in (448, 512, 1472, 1473)] == [False, True, True, False]
    assert not found[0].shares(256, 66)
    assert not forward_variant(facts(), BF16, AMPERE).shares(2048, 54)
    found = [backward_variant(facts(K=128), BF16, grouped, True, HOPPER) for grouped in (True, False)]
    assert [variant.shares(2048, 66) for variant in found] == [True, False]  # the gradients' own scan is of keys


@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "tiles", "expected"),
    [
        (128, 256, 16, 2, 8),  # as many chunks as one program is given
        (128, 256, 4, 1, 4),
        (512, 64, 16, 2, 32),
        (200, 100, 16, 1, 13),  # of 12, 272 programs would take three rounds
        (8, 1024, 32, 1, 2),
        (8, 4096, 16, 2, 1),
        (64, 64, 1, 1, 1),  # all at once
        (3, 0, 1, 1, 1),
    ],
)
def test_short_sequences_are_scanned_together_so_that_all_are_done_soonest(sequences, tokens, heads, tiles, expected):
    v = torch.empty(sequences, tokens, heads, 0)
    variant = forward_variant(facts(), BF16, HOPPER)
    run = SimpleNamespace(call=SimpleNamespace(v=v, cu=None, N=sequences), variant=variant)
    assert sequences_together(run, variant["scan"], Segments(None), tiles) == expected
    assert sequences_together(run, variant["scan"], Segments(None, shared=True), tiles) == 1
    plain = forward_variant(facts(V=96), BF16, HOPPER)["scan"]
    assert sequences_together(run, plain, Segments(None), tiles) == 1


def test_sequences_are_cut_where_heads_do_not_fill_the_device():
    variant = forward_variant(facts(), BF16, HOPPER)
    assert [variant.segment(1 << 16, busy) for busy in (1, 16, 44, 67)] == [8, 128, 342, 0]
    assert [variant.segment(tokens, 16) for tokens in (0, 1024, 2048, 8192)] == [0, 0, 4, 16]
