"""What the suite needs from an array framework: one small class each, imported only when it is chosen."""

from __future__ import annotations

import importlib

from .base import Adapter

__all__ = ["Adapter", "adapter_for"]

ADAPTERS = {"numpy": "NumpyAdapter", "torch": "TorchAdapter", "jax": "JaxAdapter", "mlx": "MlxAdapter"}


def adapter_for(framework: str, device: str) -> Adapter:
    """The adapter of a framework, for arrays on ``device``."""
    if framework not in ADAPTERS:
        raise ValueError(f"the suite has no adapter for {framework!r} yet: it has {', '.join(ADAPTERS)}")
    module = importlib.import_module(f"{__name__}.{framework}")
    return getattr(module, ADAPTERS[framework])(device)
