"""The functions of ``linattn.integrations.mlx_lm`` against their recurrences written out, and mlx-lm's own layers on them."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="no build of MLX for this platform")

import linattn
import mlx.core as mx
from linattn.integrations import mlx_lm as ours

B, T, Hk, Hv, K, V, P, N = 2, 21, 2, 4, 32, 6, 5, 7


def numbers(*shape):
    return np.random.normal(size=shape).astype(np.float32)


def softplus(x):
    return np.log1p(np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def delta_rule(q, k, v, decay, beta, state, live):
    """Yang et al. 2025, eq. 10, states ``[V, K]``: ``S = S⁻ α (1 − β k kᵀ) + β v kᵀ``, and ``S⁻`` where a token is none."""
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, decay, beta))
    state, y = np.array(state, np.float64), np.zeros((*v.shape,))
    for b, t, h in np.ndindex(*v.shape[:3]):
        if live[b, t]:
            key, query = (x[b, t, h // (v.shape[2] // k.shape[2])] for x in (k, q))
            S = state[b, h] * decay[b, t, h]
            S = S + beta[b, t, h] * np.outer(v[b, t, h] - S @ key, key)
            state[b, h], y[b, t, h] = S, S @ query
    return y, state


def arrays(channels=False):
    """Arguments of ``gated_delta_update``."""
    q, k = numbers(B, T, Hk, K) / K**0.5, numbers(B, T, Hk, K)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    a, bias = (numbers(B, T, Hv, K), numbers(Hv, K)) if channels else (numbers(B, T, Hv), numbers(Hv))
    return [q, k, numbers(B, T, Hv, V), a, numbers(B, T, Hv), numbers(Hv, 1) if channels else numbers(Hv), bias]


def expected_update(q, k, v, a, b, A_log, dt_bias, state=None, live=None, lower_bound=None, twice=1):
    rate = np.exp(A_log)
    if lower_bound is None:
        g = -rate * softplus(a + dt_bias)
    else:
        g = lower_bound * sigmoid(rate * (a + dt_bias))
    state = np.zeros((B, Hv, V, K)) if state is None else state
    live = np.ones((B, T), bool) if live is None else live
    return delta_rule(q, k, v, np.exp(g), twice * sigmoid(b), state, live)


def close(got, expected, tolerance=2e-4):
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("channels", [False, True], ids=["a decay a head", "a decay a channel"])
@pytest.mark.parametrize("options", [{}, dict(lower_bound=-5.0), dict(allow_neg_eigval=True)], ids=str)
def test_an_update_is_the_recurrence_on_raw_projections(channels, options):
    given, state = arrays(channels), numbers(B, Hv, V, K)
    y, final = ours.gated_delta_update(*map(mx.array, given), mx.array(state), use_kernel=False, **options)
    bound, twice = options.get("lower_bound"), 2 if options.get("allow_neg_eigval") else 1
    ey, efinal = expected_update(*given, state, lower_bound=bound, twice=twice)
    close(y, ey)
    close(final, efinal)


@pytest.mark.parametrize("channels", [False, True], ids=["a decay a head", "a decay a channel"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_masked_token_changes_no_state(channels, side):
    given, state = arrays(channels), numbers(B, Hv, V, K)
    live = np.arange(T)[None] >= np.array([[0], [8]]) if side == "left" else np.arange(T)[None] < np.array([[T], [13]])
    y, final = ours.gated_delta_update(*map(mx.array, given), mx.array(state), mx.array(live))
    ey, efinal = expected_update(*given, state, live)
    close(y, ey)
    close(final, efinal)


@pytest.mark.parametrize("function", [ours.gated_delta_ops, ours.gated_delta_kernel])
def test_decay_factors_may_be_zero_and_have_gradients(function):
    q, k, v = arrays()[:3]
    decay, beta, state = sigmoid(numbers(B, T, Hv) + 2), sigmoid(numbers(B, T, Hv)), numbers(B, Hv, V, K)
    decay[:, 9] = 0
    y, final = function(*map(mx.array, (q, k, v, decay, beta, state)))
    ey, efinal = delta_rule(q, k, v, decay, beta, state, np.ones((B, T), bool))
    close(y, ey)
    close(final, efinal)
    weight = numbers(B, T, Hv, V)

    def loss(decay):
        return (function(*map(mx.array, (q, k, v)), decay, mx.array(beta), mx.array(state))[0] * mx.array(weight)).sum()

    slope = np.array(mx.grad(loss)(mx.array(decay)))
    for at in ((0, 3, 1), (1, 15, 2)):
        step = np.zeros_like(decay)
        step[at] = 1e-4
        live = np.ones((B, T), bool)
        up, down = ((delta_rule(q, k, v, decay + s * step, beta, state, live)[0] * weight).sum() for s in (1, -1))
        np.testing.assert_allclose(slope[at], (up - down) / 2e-4, rtol=1e-2, atol=1e-3)
    assert np.isfinite(slope).all()


def test_tokens_one_by_one_go_on_from_the_state():
    given = arrays()
    y, final = ours.gated_delta_update(*map(mx.array, given))
    state, parts = None, []
    for t in range(T):
        one = [x[:, t : t + 1] for x in given[:5]]
        part, state = ours.gated_delta_update(*map(mx.array, (*one, *given[5:])), state)
        parts.append(part)
    close(mx.concatenate(parts, 1), np.array(y))
    close(state, np.array(final))


def test_dtypes_are_those_of_the_queries_and_of_the_state():
    given = [mx.array(x).astype(mx.bfloat16) for x in arrays()]
    y, final = ours.gated_delta_update(*given)
    assert (y.dtype, final.dtype) == (mx.bfloat16, mx.float32)
    y, final = ours.gated_delta_update(*given, final.astype(mx.bfloat16))
    assert (y.dtype, final.dtype) == (mx.bfloat16, mx.bfloat16)


# -- Mamba-2 ----------------------------------------------------------------------------------------------------------


def ssm(x, A_log, Bs, C, D, dt, bias, state, limit, live):
    """Dao & Gu 2024, eq. 2, with states ``[P, N]`` and ``S = e^{ΔA} S⁻ + Δ x Bᵀ``; ``S⁻`` where a token is none."""
    x, Bs, C = (np.asarray(a, np.float64) for a in (x, Bs, C))
    delta = np.clip(softplus(dt.astype(np.float64) + bias), *limit)
    state, y = np.array(state, np.float64), np.zeros(x.shape)
    for b, t, h in np.ndindex(*x.shape[:3]):
        group = h // (x.shape[2] // Bs.shape[2])
        if live[b, t]:
            step = delta[b, t, h]
            state[b, h] = np.exp(-np.exp(A_log[h]) * step) * state[b, h] + step * np.outer(x[b, t, h], Bs[b, t, group])
        y[b, t, h] = state[b, h] @ C[b, t, group] + D[h] * x[b, t, h]
    return y, state


@pytest.mark.parametrize("function", [ours.ssm_update, ours.ssm_attn])
@pytest.mark.parametrize("padding", [None, "mask", "lengths", "both"])
def test_a_state_space_model_is_the_recurrence(function, padding):
    given = [
        numbers(B, T, Hv, P),
        numbers(Hv),
        numbers(B, T, Hk, N),
        numbers(B, T, Hk, N),
        numbers(Hv),
        numbers(B, T, Hv),
        numbers(Hv),
    ]
    state, lengths = numbers(B, Hv, P, N), np.array([T, 13])
    live = np.arange(T)[None] < lengths[:, None] if padding else np.ones((B, T), bool)
    options = dict(mask=mx.array(live)) if padding in ("mask", "both") else {}
    options |= dict(lengths=mx.array(lengths)) if padding in ("lengths", "both") else {}
    y, final = function(*map(mx.array, given), mx.array(state), (0.1, 1.5), **options)
    ey, efinal = ssm(*given, state, (0.1, 1.5), live)
    close(y, ey)
    close(final, efinal)


def test_bad_input_is_named():
    with pytest.raises(linattn.errors.ShapeError) as error:
        ours.gated_delta_update(*map(mx.array, arrays()), None, mx.ones((T,), mx.bool_))
    assert str(error.value) == "gated_delta_update: mask must be [B, T] = (2, 21), got (21,)"


# -- mlx-lm's own layers ----------------------------------------------------------------------------------------------


@pytest.fixture
def layer():
    """A recurrent layer of Qwen3-Next, in training."""
    qwen = pytest.importorskip("mlx_lm.models.qwen3_next", reason="mlx-lm is not installed")
    args = qwen.ModelArgs(
        model_type="qwen3_next", hidden_size=64, num_hidden_layers=1, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, num_experts=0, num_experts_per_tok=1, decoder_sparse_step=1,
        shared_expert_intermediate_size=64, mlp_only_layers=[0], moe_intermediate_size=64, rms_norm_eps=1e-6, vocab_size=64,
        rope_theta=1e4, partial_rotary_factor=0.25, max_position_embeddings=64,
    )  # fmt: skip
    made = qwen.Qwen3NextGatedDeltaNet(args)
    made.train()
    return made


def training_step(layer, x):
    """Output, gradients, and the most memory beyond what there was."""
    nn = pytest.importorskip("mlx.nn")
    from mlx.utils import tree_flatten

    mx.eval(x, layer.parameters())
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loss, grads = nn.value_and_grad(layer, lambda model, x: model(x).square().sum())(layer, x)
    mx.eval(loss, grads)
    return loss.item(), dict(tree_flatten(grads)), mx.get_peak_memory() - before


def test_a_layer_that_was_built_before_trains_on_ours_with_the_same_gradients_in_a_tenth_of_the_memory(layer):
    x = mx.array(numbers(1, 256, 64))
    loss, grads, memory = training_step(layer, x)
    with ours.enable():
        our_loss, our_grads, our_memory = training_step(layer, x)
    assert training_step(layer, x)[0] == loss, "theirs is not given back"
    np.testing.assert_allclose(our_loss, loss, rtol=1e-4)
    for name, grad in grads.items():
        close(our_grads[name], np.array(grad), tolerance=2e-3)
    assert our_memory < memory / 10, (our_memory, memory)


def test_models_that_are_imported_later_get_ours_too():
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    code = """
from linattn.integrations import mlx_lm
mlx_lm.enable()
from mlx_lm.models import kimi_linear, nemotron_h
from linattn.integrations.seams import stood_for
print(stood_for(kimi_linear.gated_delta_update).__module__, stood_for(nemotron_h.ssm_update).__module__)
mlx_lm.disable()
print(stood_for(kimi_linear.gated_delta_update), stood_for(nemotron_h.ssm_update))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["mlx_lm.models.gated_delta mlx_lm.models.ssm", "None None"]


def test_the_backend_that_adapts_mlx_lm_keeps_its_functions():
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    code = """
import linattn, mlx.core as mx
from linattn.integrations import mlx_lm
mlx_lm.enable()
q = k = mx.ones((1, 4, 1, 32)) / 32**0.5
v, g, beta = mx.ones((1, 4, 1, 8)), -mx.ones((1, 4, 1)), mx.ones((1, 4, 1))
print(linattn.recurrent_gated_delta_rule(q, k, v, g, beta, backend="mlx_lm")[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(1, 4, 1, 8)\n"
