import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import linattn
import pytest
from linattn.registry import registry
from linattn_backends.jax import JaxBackend


@pytest.fixture(scope="session", autouse=True)
def registered():
    """The backend by name, where linattn is on the path but not installed."""
    if "jax" not in registry.records:
        linattn.register_backend(JaxBackend)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
