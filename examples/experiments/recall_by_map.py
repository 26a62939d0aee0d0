"""Associative recall by feature map (Zhang et al. 2024, figures 3 and 4): does a map with spikier weights recall more?

One model of two layers of normalised linear attention, trained with each map from scratch, and the entropy of the weights
that the trained model gives where it has to recall.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import linattn
import torch
from linattn import feature_maps
from linattn.feature_maps import Cosformer, Exp, FeatureMap, Hedgehog, Performer
from linattn.progress import bars
from matplotlib.figure import Figure
from models.blocks import Attention, rotary
from torch import Tensor, nn

from .recall import Recaller, Task, train
from .record import COLOURS, Record, Tables, axes, options


class MapAttention(nn.Module):
    """Normalised linear attention with rotary positions; keeps the weights of its last call when asked to."""

    def __init__(self, width: int, heads: int, make: Callable[..., FeatureMap], initial: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.make, self.watch = heads, make, False
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.map = nn.ParameterDict({name: torch.from_numpy(x) for name, x in initial.items()})
        self.weights = torch.empty(0)

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.q, self.k, self.v))
        q, k, phi = rotary(q, position), rotary(k, position), self.make(**self.map)
        if self.watch:
            self.weights = feature_maps.attention_weights(phi, q, k)
        return self.out(linattn.linear_attn(q, k, v, feature_map=phi, normalize=True)[0].flatten(2)), None


class SoftmaxAttention(Attention):
    """The reference, whose weights can be looked at too."""

    watch, weights = False, torch.empty(0)

    def forward(self, x: Tensor, state: Any = None, position: int = 0) -> tuple[Tensor, Any]:
        if self.watch:
            q, k = (rotary(linear(x).unflatten(-1, (self.heads, -1))).transpose(1, 2) for linear in (self.q, self.k))
            unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            self.weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(unseen, float("-inf")).softmax(-1)
        return super().forward(x, state, position)


MAPS: dict[str, tuple[Callable[..., FeatureMap], bool]] = {
    "elu1": (feature_maps.Elu1, False),
    "relu": (feature_maps.Relu, False),
    "performer": (lambda: Performer(scale=0.5), False),
    "cosformer": (lambda: Cosformer(M=256), False),
    "exp, t=1": (Exp, False),
    "exp, t=2": (lambda: Exp(t=2.0), False),
    "taylor2": (feature_maps.Taylor2, False),
    "hedgehog": (Hedgehog, True),
}


def run(name: str, chosen: Any, advance: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(chosen.seed)

    def mixer() -> nn.Module:
        if name == "softmax":
            return SoftmaxAttention(chosen.width, chosen.heads)
        make, learned = MAPS[name]
        initial = Hedgehog.init(chosen.heads, chosen.width // chosen.heads) if learned else {}
        return MapAttention(chosen.width, chosen.heads, make, initial)

    model = Recaller(Task(chosen.pairs), chosen.width, [mixer() for _ in range(2)])
    found = train(model, chosen.steps, chosen.batch, chosen.rate, chosen.seed, advance)
    return found | {"entropy": entropies(model, chosen.seed)}


@torch.no_grad()
def entropies(model: Recaller, seed: int) -> list[float]:
    """Of the weights of each layer at the places where a value is asked for, in nats, for the spikiest head."""
    for block in model.blocks:
        block.mixer.watch = True
    model(model.task.draw(32, torch.Generator().manual_seed(seed + 99))[0])
    found = []
    for block in model.blocks:
        w = block.mixer.weights[:, :, 2 * model.task.pairs :: 2].clamp_min(1e-12)
        found.append(-(w * w.log()).sum(-1).mean((0, 2)).min().item())
    return found


def main() -> None:
    chosen = options(__doc__, pairs=8, width=64, heads=4, steps=900, batch=32, rate=5e-3, seed=0)
    torch.set_num_threads(1)
    record = Record("recall_by_map", chosen, shown)
    names = ["softmax", *MAPS]
    results = {}
    with bars(count=False) as progress:
        task = progress.add_task("training", total=len(names) * chosen.steps)
        for i, name in enumerate(names):
            advance = lambda: progress.advance(task)  # noqa: E731
            results[name] = record.once(name, lambda m=name, a=advance: run(m, chosen, a))
            progress.update(task, completed=(i + 1) * chosen.steps)
    record.finish(results)


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    ordered = sorted(results, key=lambda name: results[name]["accuracy"])
    header = ["map", "accuracy", "steps", "entropy, layer 1", "entropy, layer 2"]
    rows = [(f"`{name}`", results[name]["accuracy"], results[name]["steps"], *results[name]["entropy"]) for name in ordered]
    return {"": (header, rows)}, plot(results)


def plot(results: dict[str, Any]) -> Figure:
    """Accuracy in the course of training, and at its end against the entropy of the spikiest head."""
    figure, (left, right) = axes(2, width=5.2)
    shown = (*COLOURS, "#222222", "#6ab0de", "#b5bd00")
    for colour, (name, of) in zip(shown, results.items(), strict=True):
        left.plot([50 * (i + 1) for i in range(len(of["course"]))], of["course"], color=colour, label=name, marker=".")
        right.scatter(min(of["entropy"]), of["accuracy"], color=colour)
        below = -11 if name == "relu" else 3  # cosformer is at the same place
        right.annotate(name, (min(of["entropy"]), of["accuracy"]), xytext=(4, below), textcoords="offset points", fontsize=8)
    left.set_xlabel("steps")
    left.set_ylabel("values recalled")
    right.set_xlabel("entropy of the spikiest head (nats)")
    left.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


if __name__ == "__main__":
    main()
