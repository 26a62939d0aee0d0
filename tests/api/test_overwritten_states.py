"""What a sequence has overwritten is not read again: one chunk of it all leaves rounding errors of the first state."""

import linattn
import numpy as np
import pytest
from frameworks_for_tests import DIFFERENTIABLE, array

T, K, V = 256, 6, 8


def arrays():
    """Keys of length one with ``beta`` 1, which overwrite all of a state within some dozens of tokens, and no values."""
    rng = np.random.default_rng(3)
    k = rng.standard_normal((1, T, 1, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q, state = rng.standard_normal((1, T, 1, K)), rng.standard_normal((1, 1, K, V))
    given = dict(q=q, k=k, v=np.zeros((1, T, 1, V)), beta=np.ones((1, T, 1)), initial_state=state)
    return {name: x.astype(np.float32) for name, x in given.items()}


@pytest.mark.parametrize("form", ["parallel", "chunk", "recurrent"])
@pytest.mark.parametrize("framework", DIFFERENTIABLE)
def test_a_state_that_was_overwritten_leaves_no_error(framework, form):
    given, options = arrays(), {} if form != "chunk" else {"chunk_size": T}
    call = getattr(linattn, f"{form}_delta_rule")
    exact, _ = linattn.recurrent_delta_rule(**{name: x.astype(np.float64) for name, x in given.items()}, backend="numpy")
    o, _ = call(**{name: array(framework, x) for name, x in given.items()}, **options, backend=framework)
    error = np.abs(np.asarray(o, np.float64) - exact)
    assert np.abs(exact[:, -32:]).max() < 1e-10
    assert error[:, -32:].max() < 1e-10
    assert error.max() < 1e-5
