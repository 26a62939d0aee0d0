"""The kernels in Triton's interpreter, on the CPU. Without Triton, or on a machine where it compiles instead, these skip."""

from __future__ import annotations

import os
import sys

import pytest

# The interpreter is chosen when kernels are defined. In a process that already imported Triton without it, the tests skip.
if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
backend_module = pytest.importorskip("linattn_backends.triton.backend")

collect_ignore_glob: list[str] = [] if backend_module.INTERPRETED else ["test_*"]


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
