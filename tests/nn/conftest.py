"""One thread for PyTorch: tests run side by side."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    torch = sys.modules.get("torch")
    if torch:
        torch.set_num_threads(1)
