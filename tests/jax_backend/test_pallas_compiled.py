"""The third and fourth rungs: Mosaic's lowering, and the whole compiler for every generation. Neither needs a TPU."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from figures import tpu_static
from jax_cases import draw
from linattn_backends.pallas import PallasBackend
from linattn_backends.pallas.calls import longest_chunk

backend = PallasBackend()
WITH_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not WITH_LIBTPU, reason="libtpu is not installed: NOTHING WAS COMPILED FOR A TPU")


@pytest.fixture
def flags_of_tpu(monkeypatch):
    """None: libtpu refuses those that tests compile with for the CPU."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def call(variant, form, dtype, **how):
    """A function of float arrays, its gradients included, and the arrays."""
    family, arrays, options = draw(variant, **how)
    given = {name: jnp.asarray(x, dtype if x.dtype.kind == "f" else jnp.int32) for name, x in arrays.items()}
    offsets = {"cu_seqlens": given.pop("cu_seqlens")} if "cu_seqlens" in given else {}

    def both(x, offsets):
        found, pull = jax.vjp(lambda x: getattr(backend, f"{form}_{family}")(**x, **offsets, **options), x)
        return found, pull(found)

    return both, given, offsets


@pytest.mark.parametrize(
    ("variant", "dtype"), [("kda", jnp.float32), *((v, jnp.bfloat16) for v in (*tpu_static.FAMILIES, "fixed_decay"))]
)
def test_lowering(variant, dtype):
    """Packed sequences with traced offsets, odd widths, and one token."""
    for form, how in (("chunk", dict(lengths=(5, 0, 40))), ("recurrent", dict(T=1))):
        run, given, offsets = call(variant, form, dtype, **how)
        text = jax.jit(run).trace(given, offsets).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == (3 if form == "chunk" else 1)


def test_export():
    run, given, offsets = call("kda", "chunk", jnp.float32, T=20)
    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(given, offsets)
    assert exported.platforms == ("tpu",)


def test_shard_map_lowers(tmp_path):
    """Over a mesh of eight, batch and heads, with gradients: kernels say which axes their results differ along."""
    script = tmp_path / "mesh.py"
    script.write_text(MESH)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3", "3", "3", "3", "1", "1"]


MESH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from linattn_backends.pallas import PallasBackend

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("batch", "heads"))
tokens, states, heads = P("batch", None, "heads"), P("batch", "heads"), P("heads")


def kernels(name, specs, shapes, state=None):
    def run(*x):
        x, S = (x, None) if state is None else (x[:-1], x[-1])
        S = jnp.broadcast_to(S, (x[0].shape[0], *S.shape)) if S is not None and S.ndim == 3 else S
        return getattr(PallasBackend(), name)(*x, initial_state=S, output_final_state=True)

    specs, shapes = [*specs, *([state[0]] if state else [])], [*shapes, *([state[1]] if state else [])]
    sharded = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=(tokens, states))
    loss = lambda *x: sum(y.sum() for y in sharded(*x))
    gradient = jax.value_and_grad(loss, range(len(shapes)))
    text = jax.jit(gradient).trace(*map(jnp.ones, shapes)).lower(lowering_platforms=("tpu",)).as_text()
    print(text.count("@tpu_custom_call"))


x, one = [(4, 64, 2, 64)] * 4, [(4, 1, 2, 64)] * 4
kernels("chunk_gla", [tokens] * 4, x)
kernels("chunk_gla", [tokens] * 4, x, (heads, (2, 64, 64)))  # a learned state, the same for every row
kernels("chunk_rwkv6", [tokens] * 4 + [heads], x + [(2, 64)])
kernels("chunk_simple_gla", [tokens] * 3 + [heads], x[:3] + [(2,)])
kernels("recurrent_gla", [tokens] * 4, one)
kernels("recurrent_rwkv6", [tokens] * 4 + [heads], one + [(2, 64)], (states, (4, 2, 64, 64)))
"""


@pytest.mark.parametrize("family", tpu_static.FAMILIES)
def test_no_product_loses_float32(family):
    """The interpreter computes every product exactly; the unit would round float32 operands at its default precision."""
    for kernel in (*tpu_static.KERNELS, "decode"):
        one = tpu_static.case("v5e", family, kernel, dtype="float32")
        function, arguments = tpu_static.program(one)
        products = list(dots(jax.make_jaxpr(function)(*arguments).jaxpr))
        assert bool(products) == (kernel != "decode")
        for product in products:
            exact = set(product.params["precision"]) == {jax.lax.Precision.HIGHEST}
            assert exact or {str(x.aval.dtype) for x in product.invars} == {"bfloat16"}, product


@pytest.mark.parametrize("family", ["simple_gla", "gla", "kda"])
def test_products_of_bfloat16_are_of_bfloat16(family):
    """Inverses and sums of gates are made of several."""
    function, arguments = tpu_static.program(tpu_static.case("v5e", family, "backward"))
    kinds = {(str(p.invars[0].aval.dtype), p.params["precision"]) for p in dots(jax.make_jaxpr(function)(*arguments).jaxpr)}
    default = 2 * (jax.lax.Precision.DEFAULT,)
    assert kinds == {("bfloat16", default)}


def dots(jaxpr):
    """Every product of a program, those inside kernels too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from dots(inner)


COMPILE = """
import json, sys
from figures import tpu_static

for one in json.load(sys.stdin):
    tpu_static.compile_case(one)
    print(one["kernel"])
"""


@needs_libtpu
@pytest.mark.parametrize("generation", tpu_static.TOPOLOGIES)
def test_compiles(generation, flags_of_tpu):
    """Every kernel at the default widths, and the plainest and the largest at the widest, at an odd width and in float32."""
    kernels = (*tpu_static.KERNELS, "decode")
    cases = [tpu_static.case(generation, family, kernel) for family in tpu_static.FAMILIES for kernel in kernels]
    for family in ("simple_gla", "kda"):
        for dtype, K, V in (("float32", 256, 256), ("float32", 256, 128), ("bfloat16", 256, 256)):
            C = longest_chunk(jnp.dtype(dtype), K, V)
            cases += [tpu_static.case(generation, family, kernel, C, dtype, K, V) for kernel in kernels]
        cases += [tpu_static.case(generation, family, kernel, K=24, V=129, C=16) for kernel in kernels]
        cases += [tpu_static.case(generation, family, kernel, K=64, V=64, C=64) for kernel in kernels]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(cases),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout.count(chr(10))} of {len(cases)} compiled\n{done.stderr[-3000:]}"
    assert done.stdout.split() == [one["kernel"] for one in cases]


@needs_libtpu
def test_kernels_cost_no_more_than_recorded(flags_of_tpu):
    """Bundles and VMEM of a few kernels against those in ``benchmarks/results/``; a kernel that got better wants a new file."""
    results = json.loads(tpu_static.RESULT.read_text())["results"]
    recorded = {key(row): row for row in results if "inverse" not in row}
    cases = [
        tpu_static.case("v5e", *which) for which in (("gla", "forward"), ("kda", "backward"), ("gated_delta_rule", "states"))
    ]
    for row in tpu_static.measure(cases):
        expected = recorded[key(row)]
        assert row["bundles"] <= expected["bundles"] * 1.05, (row, expected)
        assert row["vmem_bytes"] <= expected["vmem_bytes"] * 1.05, (row, expected)


def key(row):
    return tuple(row[name] for name in ("generation", "family", "kernel", "dtype", "C", "K", "V"))


def test_a_product_knows_its_dtype():
    """The check above has teeth: at the default precision a float32 product is told apart."""
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    (product,) = dots(jax.make_jaxpr(lambda x: x @ x)(x).jaxpr)
    assert product.params["precision"] != 2 * (jax.lax.Precision.HIGHEST,)
