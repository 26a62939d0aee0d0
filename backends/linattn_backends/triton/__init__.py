"""The Triton backend: kernels for NVIDIA GPUs."""

from .backend import TritonBackend

__all__ = ["TritonBackend"]
