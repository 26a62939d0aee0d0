"""Backends that are wrong on purpose, one realistic fault each. The suite must reject every one; its own tests hold that it does.

Each is the oracle, or the PyTorch backend, with one small change. ``FAULTS`` lists the NumPy ones; those on PyTorch are in
:mod:`.on_torch`, which imports it.
"""

from .on_numpy import FAULTS, Honest

__all__ = ["FAULTS", "Honest"]
