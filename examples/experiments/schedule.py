"""How the rate of learning goes in every experiment that trains a model."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR


def one_cycle(optimiser: Optimizer, rate: float, steps: int) -> OneCycleLR:
    """Up to ``rate`` in a tenth of the steps, then down to nothing as a cosine."""
    return OneCycleLR(optimiser, rate, total_steps=max(steps, 2), pct_start=max(0.1, 1.5 / max(steps, 2)))


def rise_and_fall(share: float) -> float:
    """The same as a part of the highest rate, after a ``share`` of the way: for training that ends by the clock."""
    low, phase = (0.04, 1 - share / 0.1) if share < 0.1 else (0.0, (share - 0.1) / 0.9)
    return low + (1 - low) * (1 + math.cos(math.pi * phase)) / 2
