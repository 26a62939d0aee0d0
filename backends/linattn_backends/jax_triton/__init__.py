"""The Triton kernels on JAX arrays."""

from .backend import JaxTritonBackend

__all__ = ["JaxTritonBackend"]
