# jax-linear-attention 0.1.0: after a gate of -1e4 chunked plain JAX loses the small gates of the same chunk. Runs on a CPU.
import jax
import jax.numpy as jnp
from jla.ops import linear_attention

q, k, v = (jax.random.normal(jax.random.key(i), (1, 64, 1, 32)) for i in range(3))
g = (-jax.random.uniform(jax.random.key(3), (1, 64, 1)) / 8).at[:, 20].set(-1e4)
chunk, token = (linear_attention("simple_gla", q, k, v, g=g, impl=impl)[0] for impl in ("chunked", "reference"))
print("relative difference:", jnp.linalg.norm(chunk - token) / jnp.linalg.norm(token))  # about 1e-6 is expected of float32
