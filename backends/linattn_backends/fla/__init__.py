"""flash-linear-attention as a backend: an adapter, no kernels of our own."""

from .backend import FlaBackend

__all__ = ["FlaBackend"]
