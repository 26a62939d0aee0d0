"""State-space duality: the diagonal core with its step sizes, skip and gate, each side in one pass over memory."""

from .op import decode_ssd, ssd

__all__ = ["decode_ssd", "ssd"]
