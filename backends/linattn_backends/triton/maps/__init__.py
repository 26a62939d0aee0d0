"""Log decays and writing strengths of raw projections that have one number a token and head."""

from .op import with_scalars_mapped

__all__ = ["with_scalars_mapped"]
