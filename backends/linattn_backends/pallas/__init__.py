"""Pallas kernels for TPUs."""

from .backend import PallasBackend

__all__ = ["PallasBackend"]
