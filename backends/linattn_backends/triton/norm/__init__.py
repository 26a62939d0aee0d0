"""RMS norm of rows, or of groups of their columns, with a gate."""

from .op import gated_rms_norm

__all__ = ["gated_rms_norm"]
