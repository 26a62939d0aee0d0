"""The kernels in Triton's interpreter, on the CPU: a process of their own, since the choice is made when Triton is imported."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

if not triton.knobs.runtime.interpret:
    raise pytest.UsageError(
        "tests/triton_backend expects Triton's interpreter, and Triton was imported without it: "
        "run TRITON_INTERPRET=1 python -m pytest tests/triton_backend"
    )


@pytest.fixture(scope="session", autouse=True)
def readable_scalars():
    """Triton 3.6 turns arrays of one element into integers in a way that NumPy 2.4 refuses."""
    interpreter = sys.modules["triton.runtime.interpreter"]
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched
    yield
    interpreter._patch_lang_tensor = patch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
