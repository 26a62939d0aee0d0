"""Makes ``examples/`` importable, and keeps PyTorch to one thread: tests run side by side."""

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
