"""Activations of kernels, and their slopes, in float32."""

import triton
import triton.language as tl

from .gates import LOG2E
from .tiles import INTERPRETED


@triton.jit
def sigmoid(x):
    """``1 / (1 + e^-x)``, by a reciprocal root squared: one instruction, where a division takes four."""
    e = -LOG2E * x
    if INTERPRETED:  # where an overflow to infinity, which is right, is a warning
        e = tl.minimum(e, 127.0, propagate_nan=tl.PropagateNan.ALL)
    root = tl.rsqrt(1.0 + tl.exp2(e))
    return root * root


@triton.jit
def silu_slope(x, s):
    """``d silu / dx``, from ``s = sigmoid(x)``."""
    return s + x * s * (1.0 - s)
