"""jax-linear-attention as a backend: an adapter, no kernels of our own."""

from .backend import JlaBackend

__all__ = ["JlaBackend"]
