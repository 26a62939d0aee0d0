"""The gated delta rule of mlx-lm as a backend: an adapter, no kernels of our own."""

from .backend import MlxLmBackend

__all__ = ["MlxLmBackend"]
