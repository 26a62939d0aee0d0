"""Backends that are wrong on purpose, one realistic fault each. The suite's own tests hold that it rejects every one.

Each is the oracle, or the PyTorch backend, with one small change. ``FAULTS`` lists those on NumPy arrays;
those on PyTorch tensors are in ``on_torch``, which needs PyTorch.
"""

from .on_numpy import FAULTS, Honest

__all__ = ["FAULTS", "Honest"]
