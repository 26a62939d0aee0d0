"""Which kernels run: what ``explain`` says."""

from __future__ import annotations

import linattn
import pytest
import torch
from linattn.plugin import Call
from linattn_backends.triton import TritonBackend, backend
from triton_cases import pretend, with_states


def described(
    op="kda",
    form="chunk",
    dtype="bfloat16",
    K=128,
    V=64,
    HV=2,
    beta="B T HV",
    needs_grad=False,
    vectors=(),
    T=256,
    N=None,
    **options,
):
    arrays = [("q", "B T H K"), ("k", "B T H K"), ("v", "B T HV V")]
    arrays += [("g", "B T HV" if op == "simple_gla" else "B T HV K")] if op not in ("linear_attn", "delta_rule") else []
    arrays += [("beta", beta)] if op in ("kda", "delta_rule") else []
    dims = dict(B=1, T=T, N=N or 1, H=2, HV=HV, K=K, V=V)
    given = [(name, shape, dtype) for name, shape in arrays] + ([("cu_seqlens", "N+1", "int32")] if N else [])
    given += [(name, "B T HV K", wide) for name, wide in zip("ab", vectors, strict=False)]
    return Call(op, form, "torch", "cuda:0", tuple(given), tuple(dims.items()), tuple(options.items()), needs_grad)


KDA = "delta_vector_scores_fwd_sm90, delta_vector_scores_strong_fwd_sm90, delta_state_fwd_sm90"
KDA_PLAIN = "delta_vector_scores_fwd, delta_solve_fwd, delta_state_fwd"
KDA_GRADIENTS = "delta_vector_scores_fwd_sm90, delta_state_fwd_sm90, delta_state_bwd_sm90, delta_vector_gradients_bwd_sm90"
KDA_GRADIENTS_PLAIN = "delta_vector_rows_fwd, delta_state_fwd, delta_state_bwd, delta_scores_bwd, delta_vector_gradients_bwd"
DPLR = "delta_dplr_scores_fwd_sm90, delta_vector_scores_fwd, delta_solve_fwd, delta_state_fwd"
DPLR_GRADIENTS = (
    "delta_dplr_scores_fwd_sm90, delta_state_fwd_sm90, delta_state_bwd_sm90, delta_scores_bwd, delta_dplr_gradients_bwd_sm90, "
    "delta_vector_gradients_bwd, delta_vector_values_bwd"
)
GLA = "diagonal_sum_matrices_fwd, diagonal_vector_scores_fwd, diagonal_vector_scores_strong_fwd_sm90, diagonal_vector_scan"
GLA_PLAIN = "diagonal_sum_matrices_fwd, diagonal_vector_scores_fwd, diagonal_vector_scan"
GLA_GRADIENTS_PLAIN = (
    "diagonal_states, diagonal_vector_scan, diagonal_vector_inter_bwd, diagonal_sum_matrices_fwd, diagonal_vector_intra_bwd"
)
SUMS = "diagonal_running_sums_fwd"

NORMALIZER = "normalizer_sums, normalizer_carries, normalizer_outputs_fwd"
CASES = [
    (dict(), KDA),
    (dict(op="linear_attn"), "diagonal_scan_sm90"),
    (dict(op="simple_gla", HV=4), f"{SUMS}, diagonal_scan_sm90"),
    (
        dict(op="simple_gla", needs_grad=True),
        f"{SUMS}, diagonal_scan_sm90; gradients {SUMS}, diagonal_scan_sm90, diagonal_scalar_gradients_bwd_sm90",
    ),
    (
        dict(op="simple_gla", HV=4, needs_grad=True),
        f"{SUMS}, diagonal_scan_sm90; gradients {SUMS}, diagonal_scan_sm90, diagonal_states, diagonal_scalar_gradients_bwd",
    ),
    (dict(op="simple_gla", K=256, V=512), f"{SUMS}, diagonal_scan_wide_sm90"),
    (
        dict(op="linear_attn", V=192, needs_grad=True),
        "diagonal_scan_sm90; gradients diagonal_states, diagonal_scan_sm90, diagonal_gradients_bwd",
    ),
    (
        dict(op="linear_attn", V=192, needs_grad=True, form="recurrent"),
        "recurrent_tokens_fwd; gradients diagonal_states, diagonal_scan_sm90, diagonal_gradients_bwd",
    ),
    (dict(op="linear_attn", T=33), "diagonal_scan_sm90"),
    (dict(op="linear_attn", K=96), "diagonal_scan (none for Hopper: K is 96, not 64, 128 or 256)"),
    (dict(op="simple_gla", V=96), f"{SUMS}, diagonal_scan (none for Hopper: V is 96, not a multiple of 64)"),
    (dict(op="gla", V=96), GLA),
    (dict(K=96), f"{KDA_PLAIN} (none for Hopper: K is 96, not 64 or 128)"),
    (dict(op="gla", K=96), f"{GLA_PLAIN} (none for Hopper: K is 96, not 64 or 128)"),
    (dict(V=256), f"{KDA_PLAIN} (none for Hopper: V is 256, not 64 or 128)"),
    (dict(dtype="float16"), f"{KDA_PLAIN} (none for Hopper: operands are float16, not bfloat16)"),
    (dict(chunk_size=32), f"{KDA_PLAIN} (none for Hopper: chunks have 32 tokens, not 64)"),
    (dict(chunk_size=50), KDA),
    (
        dict(beta="B T HV V"),
        "delta_vector_scores_fwd, delta_state_fwd (none for Hopper: beta has one number a value channel)",
    ),
    (dict(op="delta_rule", V=128, N=25, HV=4), "delta_fused_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=3, HV=44), "delta_scores_fwd_sm90, delta_state_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=4, HV=44), "delta_scores_fwd_sm90, delta_state_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=6, HV=44), "delta_fused_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=4, HV=24), "delta_fused_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=4, HV=23), "delta_scores_fwd_sm90, delta_state_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=4, HV=48), "delta_scores_fwd_sm90, delta_state_fwd_sm90"),
    (dict(op="delta_rule", V=128, HV=100), "delta_fused_fwd_sm90"),
    (dict(op="delta_rule", V=128, N=25, HV=2), "delta_scores_fwd_sm90, delta_state_fwd_sm90"),
    (dict(op="delta_rule", V=64, N=25, HV=4), "delta_scores_fwd_sm90, delta_state_fwd_sm90"),
    (
        dict(op="delta_rule", V=128, N=25, HV=4, needs_grad=True),
        "delta_scores_fwd_sm90, delta_state_fwd_sm90; gradients delta_state_fwd_sm90, delta_state_bwd_sm90, "
        "delta_gradients_bwd_sm90",
    ),
    (dict(op="linear_attn", normalize=True), f"diagonal_scan_sm90, {NORMALIZER}"),
    (
        dict(op="linear_attn", normalize=True, needs_grad=True),
        f"diagonal_scan_sm90, {NORMALIZER}; gradients normalizer_quotients_bwd, diagonal_scan_sm90, normalizer_sums, "
        "normalizer_carries, normalizer_gradients_bwd",
    ),
    (
        dict(op="simple_gla", normalize=True, needs_grad=True),
        f"{SUMS}, diagonal_states, diagonal_outputs, {NORMALIZER}; gradients normalizer_quotients_bwd, {SUMS}, "
        "diagonal_states, diagonal_outputs, diagonal_gradients_bwd, normalizer_sums, normalizer_carries, "
        "normalizer_gradients_bwd (none for Hopper: operands are float32, not bfloat16)",
    ),
    (
        dict(op="gla", normalize=True, dtype="float16"),
        f"{GLA_PLAIN}, {NORMALIZER} (none for Hopper: operands are float16, not bfloat16)",
    ),
    (dict(op="linear_attn", normalize=True, form="recurrent"), f"recurrent_tokens_fwd, {NORMALIZER}"),
    (dict(op="linear_attn", normalize=True, form="decode"), "recurrent_tokens_fwd"),
    (dict(op="linear_attn", causal=False), "mixed_sums_fwd, mixed_states_fwd, mixed_outputs_fwd"),
    (dict(op="dplr", vectors=("bfloat16", "bfloat16")), DPLR),
    (dict(op="dplr", vectors=("bfloat16", "float32")), DPLR),
    (dict(op="dplr", vectors=("bfloat16", "float32"), K=64, V=128), DPLR),
    (dict(op="dplr", vectors=("bfloat16", "float32"), K=64, V=64, N=31, HV=4), DPLR),
    (dict(op="dplr", vectors=("bfloat16", "float32"), K=64, V=64, N=32, HV=4), "delta_dplr_fused_fwd_sm90"),
    (
        dict(op="dplr", vectors=("bfloat16", "float32"), K=64, V=64, N=32, HV=4, needs_grad=True),
        "delta_dplr_fused_fwd_sm90; gradients delta_dplr_fused_bwd_sm90, delta_dplr_chunk_bwd_sm90, delta_dplr_strong_bwd_sm90",
    ),
    (dict(op="dplr", vectors=("bfloat16", "float32"), V=128, needs_grad=True), f"{DPLR}_sm90; gradients {DPLR_GRADIENTS}"),
    (
        dict(op="dplr", dtype="float16", vectors=("float32", "float32")),
        f"{KDA_PLAIN} (none for Hopper: operands are float16, not bfloat16)",
    ),
    (dict(op="rwkv6"), f"{GLA_PLAIN} (none for Hopper: rwkv6 has none)"),
    (dict(form="recurrent"), "recurrent_tokens_fwd"),
    (dict(form="recurrent", needs_grad=True), f"recurrent_tokens_fwd; gradients {KDA_GRADIENTS}"),
    (
        dict(op="gla", form="recurrent", needs_grad=True),
        f"recurrent_tokens_fwd; gradients {GLA_GRADIENTS_PLAIN}, diagonal_vector_intra_strong_bwd_sm90",
    ),
    (
        dict(op="rwkv6", form="recurrent", needs_grad=True),
        f"recurrent_tokens_fwd; gradients {GLA_GRADIENTS_PLAIN} (none for Hopper: rwkv6 has none)",
    ),
    (
        dict(form="recurrent", needs_grad=True, K=96),
        f"recurrent_tokens_fwd; gradients {KDA_GRADIENTS_PLAIN} (none for Hopper: K is 96, not 64 or 128)",
    ),
]


@pytest.mark.parametrize(("call", "said"), CASES, ids=range(len(CASES)))
def test_says_which_kernels_run_on_hopper(call, said, monkeypatch):
    pretend(monkeypatch, num_sms=132, not_hopper=None)
    monkeypatch.setattr(backend, "_ARCHITECTURES", {"cuda:0": None})
    assert TritonBackend().details(described(**call)) == with_states(said)


def test_says_what_is_wrong_with_the_device(monkeypatch):
    pretend(monkeypatch, not_hopper="the device has compute capability 8.0, not 9.0")
    monkeypatch.setattr(backend, "_ARCHITECTURES", {"cuda:0": None})
    said = f"{KDA_PLAIN} (none for Hopper: the device has compute capability 8.0, not 9.0)"
    assert TritonBackend().details(described()) == said


def test_of_a_device_that_is_not_there_those_for_hopper_are_said(monkeypatch):
    monkeypatch.setattr(backend, "_ARCHITECTURES", {})
    assert TritonBackend().details(described()) == f"{KDA} (on Hopper; elsewhere plain ones)"
    assert TritonBackend().details(described(K=96)) == f"{KDA_PLAIN} (none for Hopper: K is 96, not 64 or 128)"


def test_explain_says_so():
    q, k, v = (torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    said = str(linattn.explain(linattn.chunk_linear_attn, q, k, v, backend="triton"))
    why = "(none for Hopper: kernels are interpreted)"
    assert f"runs         triton.chunk_linear_attn: diagonal_scan, states not materialised {why}" in said
    q, k, v, g = (torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    said = str(linattn.explain(linattn.chunk_gla, q, k, v, g, backend="triton"))
    assert f"diagonal_vector_scan, states not materialised; gradients {GLA_GRADIENTS_PLAIN}, states materialised {why}" in said
