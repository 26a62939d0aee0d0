import linattn
import pytest
from linattn.registry import registry

pytest.importorskip("mlx.core", reason="no build of MLX for this platform")


@pytest.fixture(scope="session", autouse=True)
def registered():
    """The backend by name, where linattn is on the path but not installed."""
    from linattn_backends.mlx import MlxBackend

    if "mlx" not in registry.records:
        linattn.register_backend(MlxBackend)
