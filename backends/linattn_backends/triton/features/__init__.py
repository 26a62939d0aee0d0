"""Hedgehog's map of queries and keys."""

from .op import features

__all__ = ["features"]
