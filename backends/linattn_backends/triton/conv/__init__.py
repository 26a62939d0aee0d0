"""Short causal convolutions over time, a filter of its own for each channel."""

from .op import decode_short_conv, short_conv

__all__ = ["decode_short_conv", "short_conv"]
