"""flash-linear-attention without a GPU: its kernels in Triton's interpreter, one configuration each.

``TRITON_INTERPRET=1 PYTHONPATH=examples/peers linattn conformance --backend in_interpreter:FlaBackend``

The interpreter computes what a kernel's source says, products in full precision; what a compiler makes of it is not tried. It
takes no cast of a loop's index (``i_t.to(tl.int64)``): such casts must be removed from a copy of the library. Needs NumPy
before 2.4.
"""

from __future__ import annotations

from dataclasses import replace

import first_configuration
from linattn.plugin import Call, Unsupported

__all__ = ["FlaBackend"]


class FlaBackend(first_configuration.FlaBackend):
    """As on a GPU."""

    def supports(self, call: Call) -> Unsupported | None:
        """What the library states of CUDA devices."""
        return super().supports(replace(call, device="cuda"))
