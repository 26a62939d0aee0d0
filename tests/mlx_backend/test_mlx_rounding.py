"""What the MLX backend must not round away: small numbers beside large ones."""

import linattn
import mlx.core as mx
import numpy as np
import pytest
from linattn import frameworks
from linattn.plugin import MixedState


def test_held_tokens_keep_the_precision_of_their_state():
    """Float16 has no number between 0 and 6e-8, and a state that goes on with float16 tokens is float32."""
    zeros = mx.zeros((1, 1, 1, 3), mx.float16)
    held = [mx.zeros((1, 2, 1, 3), mx.float32) for _ in range(3)]
    held[1][:, 0] = 1.0
    held[2][:, 0] = 1e-9
    state = MixedState(mx.zeros((1, 1, 3, 3), mx.float32), *held, mx.array([1], mx.int32))

    def written(v):
        given = dict(initial_state=state._replace(v=v), output_final_state=True, chunk_size=2, backend="mlx")
        return linattn.chunk_mixed_attn(zeros, zeros, zeros, zeros, zeros, **given)[1].kv

    np.testing.assert_allclose(np.array(written(held[2])), np.full((1, 1, 3, 3), 1e-9, np.float32))
    gradient = mx.grad(lambda v: 1e-9 * written(v).sum())(held[2])
    np.testing.assert_allclose(np.array(gradient[:, 0]), np.full((1, 1, 3), 3e-9, np.float32))


SLOPES = [(-99.0, np.exp(-99.0)), (-1.0, 1 / (1 + np.e)), (0.0, 0.5), (0.9, 1 / (1 + np.exp(-0.9))), (99.0, 1.0), (np.inf, 1.0)]


@pytest.mark.parametrize(("x", "slope"), SLOPES)
def test_the_slope_of_softplus_in_float64_is_as_exact_where_it_is_small(x, slope):
    x = mx.array([x], mx.float64)
    xp = frameworks.framework_of(x)
    with mx.stream(mx.cpu):
        found = mx.grad(lambda x: xp.softplus(x).sum())(x)
    np.testing.assert_allclose(np.array(found), slope, rtol=1e-13)


@pytest.mark.parametrize("x", [-3.0, -0.5, 0.0, 0.5, 3.0])
def test_the_curvature_of_softplus_in_float64(x):
    x = mx.array(x, mx.float64)
    xp = frameworks.framework_of(x)
    with mx.stream(mx.cpu):
        found = mx.grad(mx.grad(xp.softplus))(x)
    slope = 1 / (1 + np.exp(-np.array(x)))
    np.testing.assert_allclose(np.array(found), slope * (1 - slope), rtol=1e-12)


@pytest.mark.parametrize("x", [-np.inf, np.inf, 7.0])
def test_equal_numbers_in_float64(x):
    x = mx.array([x], mx.float64)
    found = frameworks.framework_of(x).logaddexp(x, x)
    np.testing.assert_allclose(np.array(found), np.logaddexp(np.array(x), np.array(x)), rtol=1e-15)
