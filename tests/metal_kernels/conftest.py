from pathlib import Path

import pytest
from emulator import Emulator
from linattn_backends.mlx.metal import launch


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """Where kernels are built, once a session."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def emulated(programs, monkeypatch):
    """Makes the CPU run Metal kernels; call it with what to do to their sources first."""

    def start(**options) -> Emulator:
        emulator = Emulator(programs, **options)
        monkeypatch.setattr(launch, "run", emulator)
        return emulator

    return start
