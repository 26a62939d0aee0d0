"""What ``None`` stands for among the options that multiply, in every backend of JAX arrays."""

from __future__ import annotations

from .compat import Array


def scale_of(q: Array, scale: float | None) -> float:
    """``scale``, or ``K ** -0.5``."""
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def mixed_scale(chunk_size: int, scale: float | None) -> float:
    """``quad_scale`` or ``lin_scale`` of ``mixed_attn``, or ``1 / C``."""
    return 1.0 / chunk_size if scale is None else float(scale)
