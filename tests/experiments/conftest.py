"""Makes ``examples/`` importable, and keeps PyTorch to one thread: tests run side by side.

Programs that have a CPU flush subnormal numbers to zero do so for as long as they run; the tests that follow get them back.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def one_thread():
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def subnormal_numbers():
    yield
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)
