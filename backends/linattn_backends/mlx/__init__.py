"""The MLX backend."""

from .backend import MlxBackend

__all__ = ["MlxBackend"]
