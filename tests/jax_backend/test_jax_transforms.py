"""What JAX does to functions, done to calls of linattn on the public API."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import linattn
import numpy as np
import pytest
from jax import export
from jax_cases import convert, draw, error


def small(variant="gla", T=20, **how):
    """``(arrays, options)`` in float32: few tokens, so that little is compiled."""
    _, arrays, options = draw(variant, T, K=3, V=4, **how)
    return convert(arrays, jnp.float32), options


def call(arrays, options):
    return linattn.chunk_simple_gla(**arrays, **options)


def loss(arrays, options):
    o, state = call(arrays, options)
    return jnp.square(o).sum() + jnp.sin(state).sum()


def test_auto_runs_jax():
    arrays, options = small("simple_gla")
    assert linattn.explain("chunk_simple_gla", **arrays, **options).backend == "jax"


def test_jit_and_eval_shape():
    arrays, options = small("simple_gla")
    eager = call(arrays, options)
    jitted = jax.jit(lambda arrays: call(arrays, options))(arrays)
    assert error(jitted, jax.tree.map(lambda x: np.asarray(x, np.float64), eager)) < 1e-6
    shapes = jax.eval_shape(lambda arrays: call(arrays, options), arrays)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), eager)


def test_traced_offsets_compile_once():
    arrays, options = small("simple_gla", lengths=(3, 0, 17))
    traces = []

    @jax.jit
    def packed(arrays):
        traces.append(None)
        return call(arrays, options)

    for lengths in ((3, 0, 17), (0, 20, 0), (7, 7, 6)):
        arrays["cu_seqlens"] = jnp.cumsum(jnp.array((0, *lengths), jnp.int32), dtype=jnp.int32)
        o, state = packed(arrays)
        start = 0
        for n, length in enumerate(lengths):
            one = {name: x[:, start : start + length] for name, x in arrays.items() if name in ("q", "k", "v", "g")}
            alone, last = linattn.recurrent_simple_gla(
                **one, initial_state=arrays["initial_state"][n : n + 1], output_final_state=True
            )
            np.testing.assert_allclose(o[:, start : start + length], alone, atol=1e-5)
            np.testing.assert_allclose(state[n : n + 1], last, atol=1e-5)
            start += length
    assert len(traces) == 1


def test_gradient_with_concrete_offsets():
    """Differentiated arguments are traced while others are not."""
    arrays, options = small("simple_gla", lengths=(3, 0, 17))
    offsets = arrays.pop("cu_seqlens")
    assert jnp.isfinite(jax.grad(lambda arrays: loss({**arrays, "cu_seqlens": offsets}, options))(arrays)["g"]).all()


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.parametrize("variant", ["simple_gla", "gla", "delta_rule"])
def test_vmap(variant):
    arrays, options = small(variant, kind="harsh")
    op = getattr(linattn, "chunk_" + variant)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x[::-1] / 2]), arrays)  # a half of -inf is -inf
    gradient = jax.grad(lambda arrays: jnp.square(op(**arrays, **options)[0]).sum())
    found = jax.jit(jax.vmap(gradient))(stacked)
    single = jax.jit(gradient)
    for i in range(2):
        expected = jax.tree.map(lambda x: np.asarray(x, np.float64), single(row(stacked, i)))
        assert error(row(found, i), expected) < 1e-5


def test_gradient_of_vmap_has_no_nan():
    """Under ``vmap`` both ways through a gate are computed: the one not taken must not spoil the other's gradient."""
    arrays, options = small("gla", kind="harsh", state=False)

    def loss(arrays):
        return jnp.square(
            jax.vmap(lambda a: linattn.chunk_gla(**a, **options)[0])(jax.tree.map(lambda x: x[None], arrays))
        ).sum()

    plain = jax.grad(lambda arrays: jnp.square(linattn.chunk_gla(**arrays, **options)[0]).sum())(arrays)
    assert error(jax.grad(loss)(arrays), jax.tree.map(lambda x: np.asarray(x, np.float64), plain)) < 1e-5


@pytest.mark.usefixtures("x64")
def test_forward_mode_and_second_order():
    """Not promised by a custom VJP, given by plain JAX."""
    _, arrays, options = draw("delta_rule", 5, B=1, H=1, HV=1, K=2, V=2)
    arrays = convert(arrays, jnp.float64)
    f = lambda beta: jnp.sin(linattn.chunk_delta_rule(**{**arrays, "beta": beta}, **options)[0]).sum()  # noqa: E731
    by_forward, by_reverse = jax.jacfwd(f)(arrays["beta"]), jax.grad(f)(arrays["beta"])
    np.testing.assert_allclose(by_forward, by_reverse, atol=1e-12)
    curvature = jax.jvp(jax.grad(f), (arrays["beta"],), (jnp.ones_like(arrays["beta"]),))[1]
    step = 1e-5
    numeric = (jax.grad(f)(arrays["beta"] + step) - jax.grad(f)(arrays["beta"] - step)) / (2 * step)
    np.testing.assert_allclose(curvature, numeric, atol=1e-7)


def test_checkpoint():
    arrays, options = small("simple_gla")
    plain = jax.grad(loss)(arrays, options)
    again = jax.grad(jax.checkpoint(lambda arrays: loss(arrays, options)))(arrays)
    assert error(again, jax.tree.map(lambda x: np.asarray(x, np.float64), plain)) < 1e-6


def test_export():
    arrays, options = small("gla", T=33)
    function = jax.jit(lambda arrays: linattn.chunk_gla(**arrays, **options))
    o, state = export.export(function, platforms=["cpu", "cuda", "tpu"])(arrays).call(arrays)
    np.testing.assert_allclose(o, function(arrays)[0], atol=1e-5)
    assert state.shape == (2, 4, 3, 4)


def test_bitwise_repeatable():
    arrays, options = small("gla", lengths=(3, 0, 17), kind="harsh")
    offsets = arrays.pop("cu_seqlens")
    f = jax.jit(
        jax.value_and_grad(lambda arrays: jnp.square(linattn.chunk_gla(**arrays, cu_seqlens=offsets, **options)[0]).sum())
    )
    first = f(arrays)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, f(arrays), first)


def test_nothing_kept_for_a_token():
    """Between forward and backward pass there are the inputs and one state a segment, 512 tokens."""
    K = 16

    def kept(T):
        x = jax.ShapeDtypeStruct((1, T, 1, K), jnp.float32)
        _, pull = jax.eval_shape(lambda *a: jax.vjp(lambda *a: linattn.chunk_gla(*a)[0], *a), x, x, x, x)
        return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(pull))

    assert kept(4096) - kept(2048) <= 2048 * 4 * K + 2048 // 512 * K * K


def test_shard_map_on_eight_devices():
    script = Path(__file__).with_name("sharded.py")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout


def exported(function, *shapes):
    """The result's shape, of a program for symbolic sizes."""
    scope = jax.export.SymbolicScope()
    given = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype) for shape, dtype in shapes]
    (found,) = jax.export.export(jax.jit(function))(*given).out_avals
    return found.shape


@pytest.mark.parametrize("operator", [linattn.chunk_gla, linattn.recurrent_rwkv6, linattn.parallel_linear_attn])
def test_one_program_for_any_batch(operator):
    rest = {linattn.chunk_gla: lambda x: (x,), linattn.recurrent_rwkv6: lambda x: (x, x[0, 0])}.get(operator, lambda x: ())
    shape = exported(lambda x: operator(x, x, x, *rest(x))[0], ("b, 16, 2, 8", jnp.float32))
    assert str(shape) == "(b, 16, 2, 8)"


@pytest.mark.parametrize(
    ("symbol", "tokens", "offsets"), [("T", "1, t, 2, 8", "3"), ("N", "1, 16, 2, 8", "n")], ids=["tokens", "sequences"]
)
@pytest.mark.parametrize("operator", [lambda x: (x,) * 4, lambda x: (x,) * 5], ids=["gla", "mixed_attn"])
def test_other_symbolic_sizes_are_refused(symbol, tokens, offsets, operator):
    def function(x, cu):
        given = operator(x)
        chosen = linattn.chunk_gla if len(given) == 4 else linattn.chunk_mixed_attn
        return chosen(*given, cu_seqlens=cu)[0]

    with pytest.raises(linattn.Unsupported, match=f"jax: takes no symbolic {symbol}: export a program for each size"):
        exported(function, (tokens, jnp.float32), (offsets, jnp.int32))
