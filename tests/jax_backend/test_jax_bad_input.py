"""Bad input that only JAX can give: the message names the argument and the way out."""

import jax
import jax.numpy as jnp
import linattn
import numpy as np
import pytest
from linattn.errors import DeviceError, DtypeError, FrameworkError, OptionError

x = jnp.ones((1, 4, 2, 3))


def test_traced_scale():
    with pytest.raises(
        OptionError, match=r"chunk_gla: scale must be float or int or None, a static Python value, got .*Tracer"
    ):
        jax.jit(lambda scale: linattn.chunk_gla(x, x, x, x, scale=scale))(0.5)


def test_array_as_a_scale():
    with pytest.raises(OptionError, match="scale must be float or int or None, a static Python value, got ArrayImpl"):
        linattn.chunk_gla(x, x, x, x, scale=jnp.float32(0.5))


def test_traced_flag():
    with pytest.raises(OptionError, match="output_final_state must be bool, a static Python value"):
        jax.jit(lambda flag: linattn.chunk_gla(x, x, x, x, output_final_state=flag))(True)


def test_numpy_array_among_jax_arrays():
    with pytest.raises(FrameworkError, match="chunk_gla: g is a numpy array but q is a jax array: convert it"):
        linattn.chunk_gla(x, x, x, np.asarray(x))


def test_numpy_float64_without_x64():
    """JAX itself makes float32 of it; between float32 operands nothing is lost silently."""
    assert jnp.asarray(np.ones((1, 4, 2, 3))).dtype == jnp.float32
    assert linattn.chunk_gla(x, x, x, jnp.asarray(np.zeros((1, 4, 2, 3))))[0].dtype == jnp.float32


def test_operands_of_two_dtypes():
    with jax.enable_x64(True), pytest.raises(DtypeError, match="v must have the dtype of q, float32, got float64"):
        linattn.chunk_gla(x, x, jnp.ones((1, 4, 2, 3), jnp.float64), x)


def test_two_devices():
    with pytest.raises(DeviceError, match="k is on cpu:1 but q is on cpu:0: move it, nothing is copied for you"):
        linattn.chunk_gla(x, _Elsewhere(x), x, x)


class _Elsewhere:
    """Stands for an array on a second CPU device, which a test process does not have."""

    def __init__(self, x):
        self.shape, self.dtype = x.shape, x.dtype

    def devices(self):
        return {type("Device", (), {"platform": "cpu", "id": 1})()}


_Elsewhere.__module__ = "jax.testing"
