"""The few places where releases of jax-triton and JAX differ, or may, or leave something behind."""

from __future__ import annotations

import functools
import os
from typing import Any

from jax.interpreters import mlir

from ..pallas.compat import alike, refuse_forward_mode
from .kept import keep_compiled

__all__ = ["alike", "refuse_forward_mode", "triton_call", "varying"]


def varying(x: Any, *like: Any) -> Any:
    """``x``, marked as differing between the devices of a ``shard_map`` wherever one of ``like`` does."""
    return alike((x, *like))[0]


def triton_call(*args: Any, **options: Any) -> Any:
    """``jax_triton.triton_call``. Its import empties ``TRITON_CACHE_DIR``, which Triton's own kernels cache by."""
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    _refuse_cpus()
    if before:
        os.environ["TRITON_CACHE_DIR"] = before
    else:  # the user's own import of jax-triton has emptied it, too, and there is no such folder
        os.environ.pop("TRITON_CACHE_DIR", None)
    keep_compiled()
    return jax_triton.triton_call(*args, **options)


@functools.cache
def _refuse_cpus() -> None:
    """Say what happened where a program with kernels is compiled for a CPU."""
    from jax_triton.triton_lib import triton_kernel_call_p

    mlir.register_lowering(triton_kernel_call_p, _no_kernel_for_cpus, platform="cpu")


def _no_kernel_for_cpus(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "the jax_triton backend has no kernels for a CPU, and this program is compiled for one: a traced call is taken to run"
        " on JAX's default device, a GPU. Trace it under jax.default_device('cpu'), or pass backend='jax'"
    )
