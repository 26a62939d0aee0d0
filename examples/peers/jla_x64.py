# jax-linear-attention 0.1.0: the Mosaic kernels of scalar gates fail to trace where 64-bit types are switched on. Needs Hopper.
import jax
import jax.numpy as jnp
from jla.ops import linear_attention

jax.config.update("jax_enable_x64", True)
x, g = jnp.ones((1, 64, 1, 128), jnp.bfloat16), -jnp.ones((1, 64, 1), jnp.float32)
print(linear_attention("simple_gla", x, x, x, g=g)[0].shape)  # TypeError: lax.div requires arguments to have the same dtypes
