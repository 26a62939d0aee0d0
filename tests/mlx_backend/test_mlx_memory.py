"""What a forward and backward pass holds: linear in ``T``, and nothing for a token but inputs, outputs and gradients."""

import mlx.core as mx
import pytest
from mlx_cases import Problem


def footprint(op, T):
    """Bytes of the inputs, and the most beyond them while gradients are computed."""
    problem = Problem(op, T=T, K=32, V=32)
    mx.eval(problem.leaves)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(problem.gradient()(*problem.leaves))
    return sum(x.nbytes for x in problem.leaves), mx.get_peak_memory() - before


@pytest.mark.parametrize("op", ["gla", "kda", "mixed_attn"])
def test_memory_grows_as_the_inputs_do(op):
    """Gradients are as large as the inputs; with the output, its gradient and what the loss here keeps, up to three times more.

    A state of each token would be 16 times the inputs.
    """
    (inputs, short), (more_inputs, long) = footprint(op, 2048), footprint(op, 6144)
    assert long - short < 4.5 * (more_inputs - inputs)
