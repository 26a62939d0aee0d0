"""Chunks of quadratic attention with a state between them, and sums over whole sequences."""
