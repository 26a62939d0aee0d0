"""The models of bytes and operations against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from linattn_benchmarks.cases import Case, complete
from linattn_benchmarks.floors import floor, traffic, work

TOKEN_HEADS = 4 * 4096 * 16


def large(operator: str, what: str, gate_dtype: str = "bfloat16") -> Case:
    sizes = complete({"B": 4, "T": 4096, "H": 16, "K": 128, "V": 128})
    return Case(operator, what, tuple(sizes.items()), dtype="bfloat16", gate_dtype=gate_dtype)


@pytest.mark.parametrize(
    ("operator", "gate_dtype", "forward", "both"),
    [
        # fwd q k v o, bwd k v do dq + q k v do dk dv; no gate, so dq is not read again
        ("chunk_linear_attn", "bfloat16", 4 * 256, 4 * 256 + 4 * 256 + 6 * 256),
        # g is as large as k: read in all three, written once; dq is read again for dg
        ("chunk_gla", "bfloat16", 5 * 256, 5 * 256 + 5 * 256 + 9 * 256),
        ("chunk_gla", "float32", 6 * 256, 6 * 256 + 6 * 256 + 11 * 256),
        # two gates of one number
        ("chunk_gated_delta_rule", "float32", 1024 + 8, 1024 + 8 + 1024 + 8 + 1792 + 16),
        ("chunk_kda", "float32", 1536 + 4, 1536 + 4 + 1536 + 4 + 2816 + 8),
    ],
)
def test_bytes_per_token_and_head(operator, gate_dtype, forward, both):
    assert traffic(large(operator, "fwd", gate_dtype)) == forward * TOKEN_HEADS
    assert traffic(large(operator, "fwdbwd", gate_dtype)) == both * TOKEN_HEADS


@pytest.mark.parametrize(
    ("operator", "forward", "backward"),
    [
        ("chunk_gla", 4 * 128 * 128 + 2 * 64 * 256, 10 * 128 * 128 + 6 * 64 * 256),
        ("parallel_simple_gla", 98_304, 262_144),
        ("chunk_gated_delta_rule", 6 * 128 * 128 + 2 * 64 * 5 * 128 + 2 * 64 * 64, 524_288),
    ],
)
def test_operations_per_token_and_head(operator, forward, backward):
    assert work(large(operator, "fwd")) == forward * TOKEN_HEADS
    assert work(large(operator, "fwdbwd")) == (forward + backward) * TOKEN_HEADS


def test_decoding_reads_and_writes_the_state(case):
    one = case("recurrent_gla", "decode", B=3, H=2, K=4, V=5)
    token = 4 * (4 + 4 + 5 + 4 + 5)
    state = 4 * 4 * 5
    assert traffic(one) == 3 * 2 * (token + 2 * state)
    assert work(one) == 3 * 2 * (4 * 4 * 5 + 2 * (4 + 5))


def test_grouped_heads_share_queries_and_keys(case):
    grouped = case("chunk_simple_gla", T=1, H=1, HV=4, K=8, V=6)
    assert traffic(grouped) == 4 * (8 + 8 + 4 * 6 + 4 + 4 * 6)
    assert work(grouped) == 4 * (4 * 8 * 6 + 2 * (8 + 6))


def test_mixed_attention_has_chunks_of_its_own(case):
    mixed = case("chunk_mixed_attn", T=64, H=1, K=8, L=4, V=6, C=16)
    assert work(mixed) == 64 * (4 * 4 * 6 + 2 * 16 * (8 + 6))
    assert work(replace(mixed, what="fwdbwd")) == 64 * (14 * 4 * 6 + 8 * 16 * (8 + 6))


def test_floor_is_the_slower_of_both():
    slow_copy = {"copy_bytes_per_s": 4.27e12, "matmul_flops_per_s": 740e12}
    found = floor(large("chunk_gla", "fwd"), slow_copy)
    assert found["bound"] == "bytes"
    assert found["ms"] == found["bytes_ms"] == pytest.approx(0.0786, rel=1e-3)
    slow_product = floor(large("chunk_gla", "fwd"), slow_copy | {"matmul_flops_per_s": 1e12})
    assert slow_product["bound"] == "flops"
    assert slow_product["ms"] == slow_product["flops_ms"] == pytest.approx(25.77, rel=1e-3)
