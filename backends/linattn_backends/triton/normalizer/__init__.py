"""The normaliser of families with a diagonal gate: sums of weights, and outputs divided by them."""

from .op import normalized

__all__ = ["normalized"]
