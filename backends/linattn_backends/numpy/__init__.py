"""The oracle: every operator of linattn by its definition, token by token, in float64. Meant to be read.

``recurrence.py`` and ``mixed.py`` say what the operators mean, with their gradients; ``oracle.py`` makes two functions
of them, ``forward`` and ``vjp``; ``backend.py`` makes those a backend for NumPy arrays. Start with ``recurrence.py``.
"""

from .backend import NumpyBackend
from .oracle import forward, vjp

__all__ = ["NumpyBackend", "forward", "vjp"]
