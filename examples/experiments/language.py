"""What the experiments with byte-level language models share: the text, the training and the scores.

The text is Python's topics, as ``train_byte_lm.py`` splits them: whole topics are held out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from models.blocks import LanguageModel
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_byte_lm import split

from .schedule import one_cycle


class Text(NamedTuple):
    """Bytes as one stream each."""

    training: Tensor
    held_out: Tensor


def read() -> Text:
    training, validation, test = split(topics)
    return Text(*(torch.tensor(list("\n\n".join(texts).encode())) for texts in (training, validation + test)))


def windows(stream: Tensor, length: int, stride: int) -> Tensor:
    """``[N, length]``: a window begins every ``stride`` bytes."""
    return stream.unfold(0, length, stride)


def train(
    model: LanguageModel,
    stream: Tensor,
    length: int,
    steps: int,
    batch: int,
    rate: float,
    seed: int,
    advance: Callable[[], None],
) -> list[float]:
    """Adam on random windows of ``length`` bytes, which know nothing of what came before them.

    Returns the bits per byte of every tenth of the steps.
    """
    generator, losses = torch.Generator().manual_seed(seed), []
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = one_cycle(optimiser, rate, steps)
    for _ in range(steps):
        starts = torch.randint(len(stream) - length, (batch, 1), generator=generator)
        rows = stream[starts + torch.arange(length + 1)]
        logits, _ = model(rows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item() / math.log(2))
        advance()
    tenth = max(steps // 10, 1)
    return [sum(part) / len(part) for part in (losses[i : i + tenth] for i in range(0, steps, tenth))]


@torch.no_grad()
def bits_by_place(model: LanguageModel, rows: Tensor) -> Tensor:
    """Bits that each byte but the first costs, averaged over ``rows [N, T]``: ``[T - 1]``. Some 16384 are read at a time."""
    total = torch.zeros(rows.shape[1] - 1)
    for some in rows.split(max(16384 // rows.shape[1], 1)):
        logits, _ = model(some[:, :-1])
        total += cross_entropy(logits.mT, some[:, 1:], reduction="none").sum(0)
    return total / len(rows) / math.log(2)
