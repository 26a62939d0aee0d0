"""The pure PyTorch backend."""

from .backend import TorchBackend

__all__ = ["TorchBackend"]
