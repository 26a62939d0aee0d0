"""The same array in every framework that is installed, and gradients under one spelling."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

INSTALLED = [name for name in ("numpy", "torch", "jax", "mlx") if importlib.util.find_spec(name)]
DIFFERENTIABLE = [name for name in INSTALLED if name != "numpy"]


def array(framework: str, x: np.ndarray) -> Any:
    """A float32 array."""
    x = np.asarray(x, np.float32)
    if framework == "numpy":
        return x
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy(x.copy())
    if framework == "jax":
        return pytest.importorskip("jax.numpy").asarray(x)
    return pytest.importorskip("mlx.core").array(x)


def offsets(framework: str, values: list[int]) -> Any:
    """``cu_seqlens`` of a framework, int32."""
    if framework == "numpy":
        return np.array(values, np.int32)
    if framework == "torch":
        import torch

        return torch.tensor(values, dtype=torch.int32)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.array(values, jnp.int32)
    import mlx.core as mx

    return mx.array(values, mx.int32)


def gradient(framework: str, function: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    """Gradient of ``function(x).sum()``."""
    x = array(framework, x)
    if framework == "torch":
        x.requires_grad_()
        function(x).sum().backward()
        return x.grad.numpy()
    if framework == "jax":
        import jax

        return np.asarray(jax.grad(lambda x: function(x).sum())(x))
    import mlx.core as mx

    return np.asarray(mx.grad(lambda x: function(x).sum())(x))


def compiled(framework: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``function`` as the framework traces it."""
    if framework == "torch":
        return pytest.importorskip("torch").compile(function, fullgraph=True, backend="eager")
    if framework == "jax":
        return pytest.importorskip("jax").jit(function)
    if framework == "mlx":
        return pytest.importorskip("mlx.core").compile(function)
    return function
