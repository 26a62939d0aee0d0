"""Triton's interpreter with NumPy 2.4, which no longer turns an array of one element and one dimension into an integer.

The interpreter keeps its scalars in such arrays and asks just that of them, wherever a kernel counts in a loop.
"""

from __future__ import annotations

import sys
from typing import Any

from .device import INTERPRETED

__all__ = ["read_scalars"]


def read_scalars() -> None:
    """Let the interpreter read its scalars in a way that every NumPy takes; without the interpreter, nothing."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if not INTERPRETED or patch is None or hasattr(patch, "reads_scalars"):
        return

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    patched.reads_scalars = True
    interpreter._patch_lang_tensor = patched
