"""Chunk form of the delta families and ``dplr``."""
