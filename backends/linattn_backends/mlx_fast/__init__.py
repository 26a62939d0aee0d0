"""MLX's own gated delta rule as a backend: an adapter, no kernels of our own."""

from .backend import MlxFastBackend

__all__ = ["MlxFastBackend"]
