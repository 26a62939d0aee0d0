# jax-linear-attention 0.1.0: a gate of -inf, a hard reset, gives NaN in the Mosaic kernels and in chunked plain JAX.
import jax
import jax.numpy as jnp
from jla.ops import linear_attention

q, k, v = (jax.random.normal(jax.random.key(i), (1, 64, 1, 128), jnp.bfloat16) for i in range(3))
g = jnp.full((1, 64, 1), -0.1).at[:, 20].set(-jnp.inf)
for impl in ("auto", "chunked", "reference"):  # three zeros are expected; on Hopper, auto takes the Mosaic kernels
    print(impl, jnp.isnan(linear_attention("simple_gla", q, k, v, g=g, impl=impl)[0]).sum())
