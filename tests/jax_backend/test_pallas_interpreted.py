"""The Pallas kernels in the interpreter against the oracle: the first rung, and the second, which looks for races."""

import jax
import jax.numpy as jnp
import linattn
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax_cases import _compiled, compare, draw
from linattn_backends.pallas import PallasBackend
from linattn_backends.pallas import backend as module
from linattn_backends.pallas.backend import FAMILIES

backend = PallasBackend()
PACK = (0, 3, 30, 0, 1, 33, 3, 0)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", True)


@pytest.mark.parametrize("variant", [*FAMILIES, "fixed_decay"])
def test_packed_under_harsh_gates(variant):
    """Hard resets, empty sequences, sequences that end inside a chunk, several in a row of chunks, grouped heads."""
    compare("chunk", variant, 2e-5, jnp.float32, backend, lengths=PACK, kind="harsh")


@pytest.mark.parametrize("variant", ["gla", "gated_delta_rule"])
def test_rows_without_a_state(variant):
    compare("chunk", variant, 2e-5, jnp.float32, backend, T=70, state=False, kind="weak")


@pytest.mark.parametrize("variant", FAMILIES)
def test_bfloat16(variant):
    """Operands of products are rounded to bfloat16, as on the device: the inverse and the state are not."""
    compare("chunk", variant, 3e-2, jnp.bfloat16, backend, T=33, kind="ordinary")


@pytest.mark.parametrize("variant", [*FAMILIES, "fixed_decay"])
def test_one_token(variant):
    compare("recurrent", variant, 2e-6, jnp.float32, backend, T=1, kind="harsh")


@pytest.mark.parametrize("chunk_size", [1, 32, 128, 1000])
def test_any_chunk_size(chunk_size):
    _, arrays, options = draw("gated_delta_rule", T=130, B=1, H=1, HV=1)
    given = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    found, state = backend.chunk_gated_delta_rule(**given, **options, chunk_size=chunk_size)
    expected, last = backend.chunk_gated_delta_rule(**given, **options)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


def test_nothing_to_do():
    _, arrays, _ = draw("gla", T=3)
    q, k, v, g = (jnp.asarray(arrays[name], jnp.float32) for name in "qkvg")
    S = jnp.asarray(arrays["initial_state"], jnp.float32)
    o, state = backend.chunk_gla(q[:, :0], k[:, :0], v[:, :0], g[:, :0], initial_state=S, output_final_state=True)
    assert o.shape == (2, 0, 4, 7)
    np.testing.assert_array_equal(state, S)


def test_vmap_and_checkpoint():
    _, arrays, options = draw("gla", T=20, H=1, HV=1)
    x = {name: jnp.asarray(y, jnp.float32) for name, y in arrays.items()}
    loss = lambda x: backend.chunk_gla(**x, **options)[0].sum()  # noqa: E731
    one, two = jax.grad(loss)(x), jax.grad(loss)(jax.tree.map(lambda y: y / 2, x))
    both = jax.vmap(jax.grad(jax.checkpoint(loss)))(jax.tree.map(lambda y: jnp.stack([y, y / 2]), x))
    for name in x:
        np.testing.assert_allclose(both[name], jnp.stack([one[name], two[name]]), rtol=1e-5, atol=1e-6)


def test_no_second_derivatives():
    x = jnp.ones((1, 16, 1, 8))
    with pytest.raises(NotImplementedError, match="the pallas backend has first derivatives only: pass backend='jax'"):
        jax.grad(lambda x: jax.grad(lambda q: backend.chunk_gla(q, x, x, -x)[0].sum())(x).sum())(x)


def test_no_forward_mode():
    x = jnp.ones((1, 16, 1, 8))
    wanted = "the pallas backend has no forward-mode derivatives: pass backend='jax' for jvp and jacfwd"
    with pytest.raises(NotImplementedError, match=wanted):
        jax.jvp(lambda q: backend.chunk_gla(q, x, x, -x)[0], (x,), (x,))


INSIDE = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda loss: lambda x: jax.lax.cond(x.sum() > 0, loss, loss, x),
    "scan": lambda loss: lambda x: jax.lax.scan(lambda x, _: (x, loss(x)), x, None, length=1)[1].sum(),
}


@pytest.mark.parametrize("name", INSIDE)
def test_forward_mode_of_what_is_inside_another_transform(name):
    """The kernels see no tangents there, and docs/jax.md says so."""
    x = jnp.ones((1, 16, 1, 8))

    def loss(chosen):
        return INSIDE[name](lambda x: linattn.chunk_linear_attn(x, x, x, backend=chosen)[0].sum())

    with pytest.raises(TypeError, match=r"can't apply forward-mode .* custom_vjp function"):
        jax.jvp(loss("pallas"), (x,), (x,))
    value, tangent = jax.jvp(loss("jax"), (x,), (x,))
    np.testing.assert_allclose(tangent, 3 * value, rtol=1e-5)


@pytest.mark.parametrize(("form", "variant"), [("chunk", "rwkv6"), ("chunk", "kda"), ("recurrent", "kda")])
def test_no_races(form, variant, monkeypatch):
    """The second rung: memory and its copies emulated, accesses out of bounds raise, and unordered ones are found."""
    monkeypatch.setattr(module, "INTERPRETED", pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"))
    _compiled.clear()  # what other tests compiled was not for this interpreter
    monkeypatch.setattr(interpret_pallas_call, "races", None)
    how = dict(T=1) if form == "recurrent" else dict(lengths=(0, 17, 3), H=1, HV=2)
    compare(form, variant, 2e-5, jnp.float32, backend, kind="harsh", **how)
    assert not interpret_pallas_call.races.races_found


def test_races_are_found():
    """That rung has teeth: two cores that write one place."""
    from jax.experimental import pallas as pl

    def kernel(x, o, shared, sem):
        copy = pltpu.make_async_copy(x, shared, sem)
        copy.start()
        o[...] = shared[...]  # before the copy is waited for
        copy.wait()

    x = jnp.ones((8, 128), jnp.float32)
    pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True),
    )(x)
    assert interpret_pallas_call.races.races_found
