"""Every family, form and flag against the oracle, forward and backward."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_cases import GATED, GATES, VARIANTS, backend, compare, convert, draw, error, float_outputs, method
from linattn_backends.numpy import forward

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunk(variant):
    for kind in GATES if variant in GATED else ("ordinary",):
        compare("chunk", variant, 1e-10, kind=kind)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.endswith("bidirectional") and v != "fixed_decay"])
def test_recurrent(variant):
    for kind in ("ordinary", "harsh") if variant in GATED else ("ordinary",):
        compare("recurrent", variant, 1e-10, T=7, kind=kind)


@pytest.mark.parametrize("variant", ["gla", "kda", "mixed_bias"])
def test_parallel(variant):
    for kind in ("ordinary", "harsh"):
        compare("parallel", variant, 1e-10, T=37, kind=kind)


PACKS = [(0, 3, 30, 0, 1, 33, 3, 0), (70, 0, 0, 0, 0, 0, 0, 0), (9, 9, 9, 9, 9, 9, 8, 8)]  # one compilation for all


@pytest.mark.parametrize(
    "variant", ["gla_value_gate", "kda", "dplr", "normalized", "bidirectional", "mixed_bias", "mixed_bidirectional"]
)
def test_packed(variant):
    for lengths in PACKS:
        compare("chunk", variant, 1e-10, lengths=lengths, kind="harsh")


@pytest.mark.parametrize("variant", ["simple_gla", "mixed_attn"])
def test_packed_without_state(variant):
    for lengths in PACKS[:2]:
        compare("chunk", variant, 1e-10, lengths=lengths, state=False)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
def test_narrow(dtype, bound):
    for kind in ("weak", "harsh"):
        compare("chunk", "gla", bound, dtype, kind=kind, T=15)


def test_float16():
    family, arrays, options = draw("simple_gla", T=15)
    given = convert(arrays, jnp.float16)
    o, state = backend.chunk_simple_gla(**given, **options)
    rounded = jax.tree.map(lambda x: np.asarray(x, np.float64), given)
    assert (o.dtype, state.dtype) == (jnp.float16, jnp.float32)
    assert error((o, state), forward(family, rounded, options)) < 2e-3


def test_gradient_of_chunks_of_every_size():
    """32 and 128 end in a level of two blocks; XLA 0.10.2 once crashed on the CPU in a masked sum over two of them.

    Compiled as users have it, with the fusions that other tests go without.
    """
    compiled = partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": True})
    x = jax.random.normal(jax.random.key(0), (1, 65, 2, 24), jnp.float32)
    for chunk_size in (32, 128):

        def loss(k, chunk_size=chunk_size):
            return backend.chunk_gla(x, k, x, -jnp.abs(x) * 9, chunk_size=chunk_size)[0].sum()

        def slowly(k):
            return backend.recurrent_gla(x, k, x, -jnp.abs(x) * 9)[0].sum()

        assert error(compiled(jax.grad(loss))(x), np.asarray(compiled(jax.grad(slowly))(x), np.float64)) < 1e-5


def forward_error(form, variant, **how):
    family, arrays, options = draw(variant, **how)
    expected = float_outputs(forward(family, arrays, options))
    found = float_outputs(method(form, family, options)(**convert(arrays, jnp.float64), **options))
    return error(found, expected)


@pytest.mark.parametrize("T", [1, 2, 64, 65, 129])
def test_lengths(T):
    for variant in ("simple_gla", "mixed_attn"):
        assert forward_error("chunk", variant, T=T, B=1) < 1e-10


@pytest.mark.parametrize("variant", ["gla", "kda", "normalized", "mixed_attn", "bidirectional", "mixed_bidirectional"])
def test_no_tokens(variant):
    family, arrays, options = draw(variant, T=0)
    arrays = convert(arrays, jnp.float32)
    for form in ("chunk", "parallel"):
        o, state = method(form, family, options)(**arrays, **options)
        assert o.shape == arrays["v"].shape
        if state is not None:
            for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(arrays["initial_state"]), strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
def test_no_packed_tokens(lengths):
    for variant in ("gla", "mixed_attn", "bidirectional"):
        for state in (True, False):
            assert forward_error("chunk", variant, lengths=lengths, state=state) == 0


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 9), (24, 3)])
def test_widths(K, V):
    for variant in ("gla", "gated_delta_rule"):
        assert forward_error("chunk", variant, T=33, K=K, V=V, B=1, H=1, HV=3) < 1e-10


@pytest.mark.parametrize("chunk_size", [1, 16, 100, 4096])
def test_chunk_sizes(chunk_size):
    family, arrays, options = draw("simple_gla", T=130, B=1)
    o, _ = forward(family, arrays, options)
    found, _ = backend.chunk_simple_gla(**convert(arrays, jnp.float64), **options, chunk_size=chunk_size)
    assert error(found, o) < 1e-10


@pytest.mark.parametrize("variant", ["rwkv6", "kda", "dplr", "normalized_value_gate", "mixed_bias"])  # one of each step
def test_one_token_at_a_time(variant):
    """Decoding from a state goes on where the last call stopped."""
    family, arrays, options = draw(variant, T=20, B=2)
    o, state = forward(family, arrays, options)
    arrays = convert(arrays, jnp.float64)
    step = jax.jit(lambda arrays: method("recurrent", family, options)(**arrays, **options))
    rows = []
    for t in range(20):
        now = {n: x[:, t : t + 1] if n not in ("u", "bias", "initial_state") and x.ndim > 1 else x for n, x in arrays.items()}
        row, arrays["initial_state"] = step(now)
        rows.append(row)
    found = float_outputs((jnp.concatenate(rows, 1), arrays["initial_state"]))
    assert error(found, float_outputs((o, state))) < 1e-10


def test_mixed_resumes_anywhere():
    """A prefill cut in two at every place of a chunk equals one prefill."""
    family, arrays, options = draw("mixed_bias", T=40, state=False)
    o, state = forward(family, arrays, options)
    given = convert(arrays, jnp.float64)
    for cut in (16, 33):
        part = lambda a, b: {n: x if n == "bias" else x[:, a:b] for n, x in given.items()}  # noqa: E731
        first, middle = backend.chunk_mixed_attn(**part(0, cut), **options)
        second, last = backend.chunk_mixed_attn(**part(cut, 40), **options, initial_state=middle)
        assert error(jnp.concatenate([first, second], 1), o) < 1e-10
        assert error(float_outputs((o, last)), float_outputs((o, state))) < 1e-10
        np.testing.assert_array_equal(last.length, state.length)
