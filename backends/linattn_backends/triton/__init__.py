"""The Triton backend: kernels for NVIDIA GPUs."""

from .backend import TritonBackend
from .runtime.interpreter import read_scalars

__all__ = ["TritonBackend"]

read_scalars()
