"""Answers worked by hand, with ``scale=1``. Where ``V = 1`` the state is written as a row: ``[S_1, S_2]``."""

import numpy as np
import pytest
from linattn_backends.numpy import forward

HALF, FULL, NONE = np.log(0.5), 0.0, -np.inf  # gates that keep a half, all, nothing


def tokens(*rows):
    """``[1, T, 1, ...]`` from one entry a token."""
    return np.array(rows, dtype=float)[None, :, None]


def run(op, arrays, **options):
    """``o`` by token, and the state of the only head."""
    o, S = forward(op, arrays, {"scale": 1.0, "output_final_state": True, **options})
    return o[0, :, 0].tolist(), S[0, 0].tolist()


# k₁ = [1, 2], v₁ = 3 leave S₁ = [3, 6] behind, whatever the gate of the first token.
Q, K, V = tokens([1, 1], [2, -1]), tokens([1, 2], [0, 1]), tokens([3], [2])


def test_linear_attn():
    # S₁ = [3, 6]            o₁ = 1·3 + 1·6 = 9
    # S₂ = [3, 6 + 2]        o₂ = 2·3 − 1·8 = −2
    assert run("linear_attn", {"q": Q, "k": K, "v": V}) == ([[9], [-2]], [[3], [8]])


def test_linear_attn_scale():
    assert run("linear_attn", {"q": Q, "k": K, "v": V}, scale=0.5) == ([[4.5], [-1]], [[3], [8]])
    o, _ = run("linear_attn", {"q": Q, "k": K, "v": V}, scale=None)
    assert o == [[pytest.approx(9 / 2**0.5)], [pytest.approx(-2 / 2**0.5)]]


def test_linear_attn_normalized():
    # z₁ = [1, 2]  q₁·z₁ = 3    o₁ = 9 / 3 = 3
    # z₂ = [1, 3]  q₂·z₂ = −1   o₂ = −2 / −1 = 2
    # z₃ = [1, 3]  q₃·z₃ = 3 − 3 = 0, so o₃ = 0, although q₃ S₃ = 9 − 8 = 1
    q, k, v = tokens([1, 1], [2, -1], [3, -1]), tokens([1, 2], [0, 1], [0, 0]), tokens([3], [2], [5])
    assert run("linear_attn", {"q": q, "k": k, "v": v}, normalize=True, scale=7.0) == (
        [[3], [2], [0]],
        [[3, 1], [8, 3]],
    )


def test_linear_attn_resumes_normalized():
    # Before: S = [3, 8], z = [1, 3]. Then k = [1, 0], v = 5: S = [8, 8], z = [2, 3], o = (8 + 8) / (2 + 3)
    state = np.array([[[[3.0, 1.0], [8.0, 3.0]]]])
    arrays = {"q": tokens([1, 1]), "k": tokens([1, 0]), "v": tokens([5]), "initial_state": state}
    assert run("linear_attn", arrays, normalize=True) == ([[16 / 5]], [[8, 2], [8, 3]])


def test_simple_gla_normalized():
    # S₂ = ½ [3, 6] + [0, 2] = [1.5, 5]   z₂ = ½ [1, 2] + [0, 1] = [0.5, 2]   o₂ = (3 − 5) / (1 − 2)
    arrays = {"q": Q, "k": K, "v": V, "g": tokens(NONE, HALF)}
    assert run("simple_gla", arrays, normalize=True) == ([[3], [2]], [[1.5, 0.5], [5, 2]])


def test_gla_normalized_leaves_the_normaliser_out_of_the_value_gate():
    # S₂ = ½ ½ [3, 6] + [0, 2] = [0.75, 3.5]   z₂ = ½ [1, 2] + [0, 1] = [0.5, 2]   o₂ = (1.5 − 3.5) / (1 − 2)
    arrays = {"q": Q, "k": K, "v": V, "g": tokens([NONE] * 2, [HALF] * 2), "gv": tokens([NONE], [HALF])}
    assert run("gla", arrays, normalize=True) == ([[3], [2]], [[0.75, 0.5], [3.5, 2]])


def test_linear_attn_not_causal():
    # Both read S₂ = [3, 8], or divide by q·z₂ with z₂ = [1, 3]: 3 + 8 = 11, 6 − 8 = −2; 11 / 4, −2 / −1
    arrays = {"q": Q, "k": K, "v": V}
    assert forward("linear_attn", arrays, {"scale": 1.0, "causal": False})[0].ravel().tolist() == [11, -2]
    o, _ = forward("linear_attn", arrays, {"normalize": True, "causal": False})
    assert o.ravel().tolist() == [11 / 4, 2]


def test_simple_gla():
    # S₂ = ½ [3, 6] + [0, 2] = [1.5, 5]      o₂ = 3 − 5 = −2
    assert run("simple_gla", {"q": Q, "k": K, "v": V, "g": tokens(NONE, HALF)}) == ([[9], [-2]], [[1.5], [5]])
    # Fixed decay: the same numbers, since the first token finds nothing to forget.
    assert run("simple_gla", {"q": Q, "k": K, "v": V, "g": np.array([HALF])}) == ([[9], [-2]], [[1.5], [5]])


def test_gla():
    # S₂ = [½·3, 6 + 2] = [1.5, 8]           o₂ = 3 − 8 = −5
    g = tokens([FULL, FULL], [HALF, FULL])
    assert run("gla", {"q": Q, "k": K, "v": V, "g": g}) == ([[9], [-5]], [[1.5], [8]])


def test_gla_with_a_value_gate():
    # S₁ = [1, 2]ᵀ[1, 3] = [[1, 3], [2, 6]]; keys keep [½, 1], values keep [1, ½]: [[½, ¾], [2, 3]]
    # S₂ = that + [1, 0]ᵀ[2, 0] = [[2.5, ¾], [2, 3]]          o₁ = [3, 9]    o₂ = 2·[2.5, ¾] + [2, 3] = [7, 4.5]
    arrays = {
        "q": tokens([1, 1], [2, 1]),
        "k": tokens([1, 2], [1, 0]),
        "v": tokens([1, 3], [2, 0]),
        "g": tokens([FULL, FULL], [HALF, FULL]),
        "gv": tokens([FULL, FULL], [FULL, HALF]),
    }
    assert run("gla", arrays) == ([[3, 9], [7, 4.5]], [[2.5, 0.75], [2, 3]])


def test_rwkv6():
    # u = [3, 0]. o₁ = q₁ (0 + [3·1, 0]·3) = 9, S₁ = [3, 6]
    # o₂ = q₂ ([3, 6] + [0, 0·1]·2) = 6 − 6 = 0 with k₂ = [0, 1];  S₂ = [½·3, 6 + 2]
    arrays = {"q": Q, "k": K, "v": V, "g": tokens([FULL, FULL], [HALF, FULL]), "u": np.array([[3.0, 0.0]])}
    assert run("rwkv6", arrays) == ([[9], [0]], [[1.5], [8]])
    # u = [0, 5]: o₁ = [0, 10]·3 read by [1, 1] = 30;  o₂ = 0 + q₂ [0, 5]·2 = −10
    assert run("rwkv6", {**arrays, "u": np.array([[0.0, 5.0]])})[0] == [[30], [-10]]


DELTA = {
    "q": tokens([1, 1], [1, 1]),
    "k": tokens([1, 2], [1, 1]),
    "v": tokens([3], [5]),
    "beta": tokens(1, 0.5),
}  # S₁ = [3, 6], o₁ = 9


def test_delta_rule():
    # k₂ S₁ = 9, error 5 − 9 = −4, halved −2: S₂ = [3, 6] − 2·[1, 1] = [1, 4]            o₂ = 5
    assert run("delta_rule", DELTA) == ([[9], [5]], [[1], [4]])


def test_delta_rule_with_beta_by_channel():
    # Two value channels alike but for beta₂ = [½, 1]; the second ends at [3, 6] − 4·[1, 1] = [−1, 2]
    arrays = {**DELTA, "v": tokens([3, 3], [5, 5]), "beta": tokens([1, 1], [0.5, 1])}
    assert run("delta_rule", arrays) == ([[9, 9], [5, 1]], [[1, -1], [4, 2]])


def test_gated_delta_rule():
    # S' = [1.5, 3], k₂ S' = 4.5, error ½, halved ¼: S₂ = [1.75, 3.25]                    o₂ = 5
    assert run("gated_delta_rule", {**DELTA, "g": tokens(NONE, HALF)}) == ([[9], [5]], [[1.75], [3.25]])


def test_kda():
    # S' = [1.5, 0], k₂ S' = 1.5, error 3.5, halved 1.75: S₂ = [3.25, 1.75]               o₂ = 5
    g = tokens([FULL, FULL], [HALF, NONE])
    assert run("kda", {**DELTA, "g": g}) == ([[9], [5]], [[3.25], [1.75]])


def test_dplr():
    # a S₁ = 3 − 6 = −3, b of it [−6, −3]; [½·3, 6] + [−6, −3] + [1, 0]·4 = [−½, 3]       o₂ = 2·(−½) + 3 = 2
    arrays = {
        "q": tokens([1, 1], [2, 1]),
        "k": tokens([1, 2], [1, 0]),
        "v": tokens([3], [4]),
        "g": tokens([FULL, FULL], [HALF, FULL]),
        "a": tokens([7, 7], [1, -1]),  # the first finds nothing
        "b": tokens([8, 8], [2, 1]),
    }
    assert run("dplr", arrays) == ([[9], [2]], [[-0.5], [3]])


def test_initial_state():
    # S₁ = ½ [4, 2] + [3, 6] = [5, 7]        o₁ = 12
    arrays = {"q": tokens([1, 1]), "k": tokens([1, 2]), "v": tokens([3]), "g": tokens(HALF)}
    assert run("simple_gla", {**arrays, "initial_state": np.array([[[[4.0], [2.0]]]])}) == ([[12]], [[5], [7]])


def test_value_head_j_reads_head_j_div_n():
    # q·k is 1 for head 0 and 10 for head 1; four value heads of 1, 2, 3, 4.
    q = np.array([1.0, 10.0]).reshape(1, 1, 2, 1)
    v = np.arange(1.0, 5.0).reshape(1, 1, 4, 1)
    o, _ = forward("linear_attn", {"q": q, "k": np.ones_like(q), "v": v}, {"scale": 1.0})
    assert o.ravel().tolist() == [1, 2, 30, 40]


def test_packed():
    # Three sequences of 1, 0 and 2 tokens with q = k = 1, so o is the running sum of v on top of 10, 20, 30.
    ones = tokens([1], [1], [1])
    arrays = {"q": ones, "k": ones, "v": tokens([1], [2], [3]), "cu_seqlens": np.array([0, 1, 1, 3])}
    arrays["initial_state"] = np.array([10.0, 20.0, 30.0]).reshape(3, 1, 1, 1)
    o, S = forward("linear_attn", arrays, {"scale": 1.0, "output_final_state": True})
    assert (o.ravel().tolist(), S.ravel().tolist()) == ([11, 32, 35], [11, 20, 35])


MIXED = {
    "q_quad": tokens([1], [2], [1]),
    "k_quad": tokens([1], [-1], [2]),
    "q_lin": tokens([1], [1], [3]),
    "k_lin": tokens([1], [2], [5]),
    "v": tokens([2], [3], [1]),
}  # chunks of two: {0, 1}, {2}


def run_mixed(arrays, **options):
    o, S = forward("mixed_attn", arrays, {"chunk_size": 2, "quad_scale": 1.0, "lin_scale": 1.0, **options})
    return o.ravel().tolist(), S


def test_mixed_attn():
    # o₀ = relu(1·1)²·2 = 2
    # o₁ = relu(2·1)²·2 + relu(2·−1)²·3 = 8
    # o₂ = relu(1·2)²·1 + 3·(1·2 + 2·3) = 4 + 24 = 28
    o, S = run_mixed(MIXED, output_final_state=True)
    assert o == [2, 8, 28]
    # The first chunk is summed, the third token waits.
    assert S.kv.ravel().tolist() == [8]
    assert [S.k_quad.ravel().tolist(), S.k_lin.ravel().tolist(), S.v.ravel().tolist()] == [[2, 0], [5, 0], [1, 0]]
    assert (S.length.tolist(), S.length.dtype) == ([1], np.int32)


def test_mixed_attn_folds_a_chunk_as_it_fills():
    # One token more: the second chunk is full, its sum 5·1 + 1·4 joins 8, and nothing waits.
    o, S = run_mixed(MIXED, output_final_state=True)
    arrays = {
        "q_quad": tokens([1]),
        "k_quad": tokens([3]),
        "q_lin": tokens([2]),
        "k_lin": tokens([1]),
        "v": tokens([4]),
    }
    # o₃ = relu(1·2)²·1 + relu(1·3)²·4 + 2·8 = 4 + 36 + 16
    o, S = run_mixed({**arrays, "initial_state": S}, output_final_state=True)
    assert o == [56]
    assert (S.kv.ravel().tolist(), S.length.tolist()) == ([17], [0])
    assert not S.k_quad.any()
    assert not S.k_lin.any()
    assert not S.v.any()


def test_mixed_attn_bias_and_scales():
    # o₁ = relu(2 + 1)²·2 + relu(−2 + 3)²·3 = 21; the bias of row 0 is 0 for o₀, and for o₂, which is first in its chunk
    bias = np.array([[[0.0, 9.0], [1.0, 3.0]]])
    assert run_mixed({**MIXED, "bias": bias})[0] == [2, 21, 28]
    # quad_scale 2 squares to 4, before the bias; lin_scale 10: o₂ = 4·4 + 10·24
    assert run_mixed(MIXED, quad_scale=2.0, lin_scale=10.0)[0] == [8, 32, 256]
    # Both default to 1 / C: o₂ = 4 / 4 + 24 / 2
    assert run_mixed(MIXED, quad_scale=None, lin_scale=None)[0] == [0.5, 2, 13]


def test_mixed_attn_not_causal():
    # Σ over all = 8 + 5·1 = 13.  o₀ = 2 + relu(1·−1)²·3 + 13,  o₁ = 8 + 13,  o₂ = 4 + 3·13
    assert run_mixed(MIXED, causal=False)[0] == [15, 21, 43]


def test_mixed_attn_in_one_chunk():
    # FLASH-Quad: o₂ = relu(1)²·2 + relu(−1)²·3 + relu(2)²·1 = 6, and nothing from the state.
    assert run_mixed(MIXED, chunk_size=3)[0] == [2, 8, 6]
