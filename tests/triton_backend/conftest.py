"""The kernels in Triton's interpreter, on the CPU: a process of their own, since the choice is made when Triton is imported."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

if not triton.knobs.runtime.interpret:
    raise pytest.UsageError(
        "tests/triton_backend expects Triton's interpreter, and Triton was imported without it: "
        "run TRITON_INTERPRET=1 python -m pytest tests/triton_backend"
    )

from quick_interpreter import quicken  # noqa: E402

quicken()


@pytest.fixture(autouse=True)
def programs_of_the_test(monkeypatch):
    """The third call of every kind in a test runs a program, as the fifth does elsewhere."""
    from linattn_backends.triton.runtime import replay

    monkeypatch.setattr(replay, "OFTEN", 2)
    monkeypatch.setattr(replay, "PROGRAMS", {})


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def as_a_gpu_computes():
    """Numbers that overflow are no error: rows behind packed sequences hold anything until they become zeros.

    Of results that count, tests see that they are finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        yield
