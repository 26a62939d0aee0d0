"""The plain JAX backend."""

from .backend import JaxBackend

__all__ = ["JaxBackend"]
