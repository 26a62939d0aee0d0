"""Chunk form of the families whose gate is diagonal, or absent."""
