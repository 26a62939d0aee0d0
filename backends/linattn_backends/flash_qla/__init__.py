"""FlashQLA as a backend: an adapter, no kernels of our own."""

from .backend import FlashQlaBackend

__all__ = ["FlashQlaBackend"]
