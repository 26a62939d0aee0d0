"""The kernels give the oracle's numbers."""

import mlx.core as mx
import pytest
from linattn_backends.mlx import metal
from metal_cases import GATES, VARIANTS, Options, draw

OPTIONS = Options()
CHUNK = Options(form="chunk")


def check(case, options=OPTIONS, backward=True):
    errors = case.errors(options, backward)
    assert max(errors.values()) < 1, errors


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_forward_and_backward(emulated, variant):
    emulated()
    H = 4 if variant == "dplr" else 2
    check(draw(variant, H=H))
    check(draw(variant, H=H, seed=1, T=1))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("variant", ["simple_gla", "gla_gv", "kda"])
def test_gates_from_weak_to_hard_resets(emulated, variant, kind):
    emulated()
    check(draw(variant, kind=kind, seed=2))


@pytest.mark.parametrize(("variant", "dtype"), [("gla_gv", mx.bfloat16), ("gated_delta_rule", mx.float16)])
def test_operands_of_16_bits(emulated, variant, dtype):
    emulated()
    check(draw(variant, dtype=dtype))


@pytest.mark.parametrize(("lengths", "state"), [([3, 0, 14, 2], True), ([19], True), ([0, 1, 5, 0], False), ([1] * 9, True)])
def test_packed_sequences(emulated, lengths, state):
    emulated()
    check(draw("gated_delta_rule", lengths=lengths, state=state))


@pytest.mark.parametrize("variant", ["gla_gv", "kda"])
def test_tokens_behind_the_last_sequence(emulated, variant):
    """The kernels leave them out, and the host writes zeros."""
    emulated(incomplete=True)
    check(draw(variant, lengths=[3, 0, 11], tail=5))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (3, 70), (130, 6), (520, 3)])
def test_any_width(emulated, K, V):
    emulated()
    check(draw("gla", T=5, B=1, H=1, HV=1, K=K, V=V))


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("linear_attn", dict(T=24)),
        ("simple_gla", dict(kind="harsh")),
        ("gla", dict(dtype=mx.bfloat16, V=70)),
        ("gla_shared", dict(kind="harsh", T=9)),
        ("delta_rule", dict(K=40, V=7, dtype=mx.float16)),
        ("gated_delta_rule", dict(lengths=[3, 0, 14, 2, 16])),
        ("kda", dict(K=70, kind="harsh", state=False)),
        ("kda", dict(K=256, V=9)),
    ],
)
def test_the_chunk_form(emulated, variant, sizes):
    emulator = emulated()
    check(draw(variant, **sizes), CHUNK, backward=False)
    assert "custom_kernel_linattn_chunk" in emulator.launches[-1]


@pytest.mark.parametrize("variant", ["gla_gv", "kda_by_value", "rwkv6"])
def test_what_chunks_do_not_take_runs_token_by_token(emulated, variant):
    emulator = emulated()
    check(draw(variant), CHUNK, backward=False)
    assert "custom_kernel_linattn_recurrent" in emulator.launches[-1]


def test_segments_join(emulated):
    """More tokens than a segment of the backward pass has."""
    emulated()
    check(draw("kda", T=50))
    check(draw("gated_delta_rule", lengths=[33, 1, 20, 0]))


@pytest.mark.parametrize("options", [OPTIONS, CHUNK])
def test_equal_calls_give_equal_bits_in_any_order(emulated, options):
    case, found = draw("kda"), []
    for seed in (1, 1000):
        emulated(seed=seed)
        outputs = metal.forward(case.arrays, options)
        found.append([outputs["o"], outputs["final"], *case.gradients(options).values()])
    assert all(mx.array_equal(x, y) for x, y in zip(*found, strict=True))
