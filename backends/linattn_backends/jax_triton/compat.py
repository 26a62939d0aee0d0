"""The few places where releases of jax-triton and JAX differ, or may, or leave something behind."""

from __future__ import annotations

import os
from typing import Any

from ..pallas.compat import alike

__all__ = ["alike", "triton_call", "varying"]


def varying(x: Any, *like: Any) -> Any:
    """``x``, marked as differing between the devices of a ``shard_map`` wherever one of ``like`` does."""
    return alike((x, *like))[0]


def triton_call(*args: Any, **options: Any) -> Any:
    """``jax_triton.triton_call``. Its import empties ``TRITON_CACHE_DIR``, which Triton's own kernels cache by."""
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    if before is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton.triton_call(*args, **options)
