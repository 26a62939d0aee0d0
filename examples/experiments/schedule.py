"""How the rate of learning goes in every experiment that trains a model."""

from __future__ import annotations

import math


def rise_and_fall(share: float) -> float:
    """The rate as a part of the highest, after a ``share`` of the way: up in a tenth, then down to nothing as a cosine."""
    low, phase = (0.04, 1 - share / 0.1) if share < 0.1 else (0.0, (share - 0.1) / 0.9)
    return low + (1 - low) * (1 + math.cos(math.pi * phase)) / 2
