"""Batch and heads over a mesh of eight devices, run by test_jax_transforms.py: every core in ``shard_map``, with gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import linattn
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_cases import convert, draw
from linattn.registry import registry
from linattn_backends.jax import JaxBackend

if "jax" not in registry.records:
    linattn.register_backend(JaxBackend)

mesh = jax.make_mesh((4, 2), ("rows", "heads"))
TOKENS, STATE = P("rows", None, "heads"), P("rows", "heads")


def place(name, x):
    return P("heads") if name in ("u", "bias") else STATE if name == "initial_state" else TOKENS


def run(op, options, arrays):
    return op(**arrays, **options)


def loss(function):
    return lambda arrays: sum(jnp.square(x).sum() for x in function(arrays))


for variant in ("gla", "kda"):
    family, arrays, options = draw(variant, 20, B=4, H=2, HV=4, K=3, V=4)
    arrays = convert(arrays, jnp.float32)
    specs = {name: place(name, x) for name, x in arrays.items()}

    call = partial(run, getattr(linattn, "chunk_" + family), options)

    shared = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=(TOKENS, STATE))
    spread = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    found = jax.jit(jax.value_and_grad(loss(shared)))(spread)
    expected = jax.jit(jax.value_and_grad(loss(call)))(arrays)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), found, expected)

# The gradient of vmap in shard_map.
_, arrays, options = draw("gla", 20, B=4, H=2, K=3, V=4, state=False)
arrays = {name: jnp.stack([x, 0.9 * x]) for name, x in convert(arrays, jnp.float32).items()}
mapped = jax.vmap(lambda a: linattn.chunk_gla(**a)[0])
gradients = jax.grad(lambda a: jnp.square(mapped(a)).sum())
tokens = P(None, *TOKENS)
shared = jax.shard_map(gradients, mesh=mesh, in_specs=(tokens,), out_specs=tokens)
spread = jax.device_put(arrays, NamedSharding(mesh, tokens))
jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4), jax.jit(shared)(spread), gradients(arrays))

# Without a state, where the first carry is no function of the inputs; and eagerly, on arrays that are spread already.
_, arrays, options = draw("mixed_attn", 20, B=4, state=False)
arrays = convert(arrays, jnp.float32)
plain = linattn.chunk_mixed_attn(**arrays, chunk_size=16)[0]
spread = jax.device_put(arrays, NamedSharding(mesh, TOKENS))
left_to_jit = jax.make_mesh((4, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
shared = jax.shard_map(
    lambda a: linattn.chunk_mixed_attn(**a, chunk_size=16)[0], mesh=mesh, in_specs=(TOKENS,), out_specs=TOKENS
)
np.testing.assert_allclose(jax.jit(shared)(spread), plain, rtol=2e-4, atol=2e-4)
spread = jax.device_put(arrays, NamedSharding(left_to_jit, TOKENS))
np.testing.assert_allclose(linattn.chunk_mixed_attn(**spread, chunk_size=16)[0], plain, rtol=2e-4, atol=2e-4)
print("equal")
