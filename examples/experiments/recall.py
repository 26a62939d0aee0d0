"""Multi-query associative recall (Arora et al. 2023), a model for it, and its training.

``key value key value …``, then every key again in another order, each followed by its value: at the second coming of a key the
model is to say the value. Keys, values and orders are drawn afresh for every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from models.blocks import Block
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .schedule import one_cycle


class Task(NamedTuple):
    """``pairs`` of ``symbols`` keys and as many values: sequences of ``4 · pairs`` tokens."""

    pairs: int
    symbols: int = 32

    def draw(self, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``ids [B, 4·pairs]``, and for the second half's keys the values ``[B, pairs]``, which follow them in ``ids``."""
        chances = torch.rand(batch, self.symbols, generator=generator)
        keys = chances.argsort(1)[:, : self.pairs]
        values = self.symbols + torch.randint(self.symbols, keys.shape, generator=generator)
        order = torch.rand(keys.shape, generator=generator).argsort(1)
        asked, answers = keys.gather(1, order), values.gather(1, order)
        told = torch.stack([keys, values], 2).flatten(1)
        return torch.cat([told, torch.stack([asked, answers], 2).flatten(1)], 1), answers


class Recaller(nn.Module):
    """Blocks over embeddings that a convolution has mixed with those of the token before.

    The convolution, channel by channel, tells a value its key; what is left to the mixers is to recall.
    """

    def __init__(self, task: Task, width: int, mixers: list[nn.Module]) -> None:
        super().__init__()
        self.task = task
        self.embed = nn.Embedding(2 * task.symbols, width)
        self.here, self.before = (nn.Parameter(torch.randn(width)) for _ in range(2))
        self.blocks, self.norm = nn.ModuleList(Block(width, mixer) for mixer in mixers), nn.RMSNorm(width)
        self.head = nn.Linear(width, 2 * task.symbols, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[B, pairs, 2·symbols]`` at the second coming of each key."""
        x = self.embed(ids)
        x = self.here * x + self.before * torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x[:, 2 * self.task.pairs :: 2]))


def train(model: Recaller, steps: int, batch: int, rate: float, seed: int, advance: Callable[[], None]) -> dict[str, Any]:
    """Train, and return accuracy on fresh sequences, its course, and the steps taken; stop once all is recalled."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = one_cycle(optimiser, rate, steps)
    course: list[float] = []
    step = 0
    for step in range(1, steps + 1):
        ids, answers = model.task.draw(batch, generator)
        logits = model(ids)
        loss = cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        advance()
        if step % 50 == 0:
            course.append(accuracy(model, 64, seed + step))
            if course[-1] > 0.995:
                break
    return {"accuracy": accuracy(model, 256, seed + 10**6), "course": course, "steps": step}


@torch.no_grad()
def accuracy(model: Recaller, sequences: int, seed: int) -> float:
    """The share of values recalled, on sequences of their own."""
    ids, answers = model.task.draw(sequences, torch.Generator().manual_seed(seed + 7))
    return (model(ids).argmax(-1) == answers).float().mean().item()
