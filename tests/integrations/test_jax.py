"""The function of ``linattn.integrations.jax`` against the recurrence written out."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
import linattn
from linattn.integrations.jax import jax_chunk_gated_delta_rule

B, S, H, HV, K, V = 2, 37, 2, 4, 8, 6


def arrays():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(B, S, H, K)), rng.normal(size=(B, S, H, K)) / K**0.5, rng.normal(size=(B, S, HV, V))
    g, beta = -rng.uniform(0, 2, (B, S, HV)), rng.uniform(0, 1, (B, S, HV))
    return [q, k, v, g, beta], rng.normal(size=(B, HV, K, V))


def rule(q, k, v, g, beta, state, unit=False):
    """Yang et al. 2025, eq. 10, token by token: ``S = e^g S⁻ + β k (v − kᵀ e^g S⁻)``, ``o = S qᵀ / √K``."""
    if unit:
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    state, o = state.copy(), np.zeros((B, S, HV, V))
    for b, t, h in np.ndindex(B, S, HV):
        key, query = k[b, t, h // (HV // H)], q[b, t, h // (HV // H)]
        kept = np.exp(g[b, t, h]) * state[b, h]
        state[b, h] = kept + beta[b, t, h] * np.outer(key, v[b, t, h] - key @ kept)
        o[b, t, h] = query @ state[b, h] / K**0.5
    return o, state


@pytest.mark.parametrize("unit", [False, True], ids=["as they are", "unit length"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_it_is_the_recurrence(unit, chunk_size):
    given, start = arrays()
    options = dict(chunk_size=chunk_size, use_qk_norm_in_gdn=unit)
    o, final = jax.jit(lambda *x: jax_chunk_gated_delta_rule(*x[:5], initial_state=x[5], **options))(*given, start)
    eo, efinal = rule(*given, start, unit)
    np.testing.assert_allclose(o, eo, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(final, efinal, rtol=1e-4, atol=1e-4)


def test_without_a_state_there_is_none_after():
    given, start = arrays()
    o, final = jax_chunk_gated_delta_rule(*map(jnp.asarray, given))
    assert final is None
    np.testing.assert_allclose(o, rule(*given, np.zeros_like(start))[0], rtol=1e-4, atol=1e-4)


def test_it_has_gradients():
    given, start = arrays()
    weight = np.random.default_rng(1).normal(size=(B, S, HV, V))

    def loss(g):
        x = [jnp.asarray(a) for a in (*given[:3],)]
        return (jax_chunk_gated_delta_rule(*x, g, jnp.asarray(given[4]), initial_state=jnp.asarray(start))[0] * weight).sum()

    slope = jax.grad(loss)(jnp.asarray(given[3]))
    for at in ((0, 3, 1), (1, 30, 3)):
        up, down = ([x.copy() for x in given] for _ in range(2))
        up[3][at] += 1e-5
        down[3][at] -= 1e-5
        expected = ((rule(*up, start)[0] - rule(*down, start)[0]) * weight).sum() / 2e-5
        np.testing.assert_allclose(slope[at], expected, rtol=1e-3, atol=1e-3)


def test_outputs_have_the_dtype_of_the_queries_and_states_are_float32():
    given, start = arrays()
    q, k, v, g, beta = (jnp.asarray(x, jnp.bfloat16) for x in given)
    o, final = jax_chunk_gated_delta_rule(q, k, v.astype(jnp.float32), g, beta, 64, jnp.asarray(start), False, jnp.bfloat16)
    assert (o.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)


def test_heads_before_time_are_refused():
    q, k, v, g, beta = (jnp.asarray(x) for x in arrays()[0])
    with pytest.raises(linattn.errors.ShapeError) as error:
        jax_chunk_gated_delta_rule(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), g, beta)
    assert str(error.value) == (
        "jax_chunk_gated_delta_rule: query must be [B, S, H, K] and g [B, S, HV], got (2, 2, 37, 8) and (2, 37, 4): "
        "move heads behind time and put groups of them together"
    )
