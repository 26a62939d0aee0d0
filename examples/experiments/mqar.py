"""Multi-query associative recall by kind of mixer (Yang et al. 2024, figure 4): who learns to recall, and how soon.

Six mixers in one small model of two layers. At width 64 a head has twice as many channels for its keys as there are pairs, or
as many; ``--width 32 --pairs 16`` leaves it half as many.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from linattn.progress import bars
from matplotlib.figure import Figure
from models.blocks import Attention
from models.delta import DeltaNet, GatedDeltaNet
from models.gla import GatedLinearAttention, RetNet, Ungated
from torch import nn

from .recall import Recaller, Task, train
from .record import COLOURS, Record, Tables, axes, numbers, options

MIXERS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax": Attention,
    "ungated": Ungated,
    "RetNet": RetNet,
    "GLA": GatedLinearAttention,
    "delta rule": DeltaNet,
    "gated delta rule": GatedDeltaNet,
}


def run(name: str, pairs: int, seed: int, chosen: Any, advance: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(seed)
    mixers = [MIXERS[name](chosen.width, chosen.heads) for _ in range(2)]
    model = Recaller(Task(pairs, chosen.symbols), chosen.width, mixers)
    return train(model, chosen.steps, chosen.batch, chosen.rate, seed, advance)


def main() -> None:
    chosen = options(__doc__, width=64, heads=2, symbols=16, steps=600, batch=32, rate=3e-3, seeds="0,1", pairs="8,16")
    torch.set_num_threads(1)
    record, settings = Record("mqar", chosen, shown), {f"{n} pairs": n for n in numbers(chosen.pairs)}
    runs = [(name, setting, seed) for setting in settings for seed in numbers(chosen.seeds) for name in MIXERS]
    results: dict[str, dict[str, list[Any]]] = {name: {setting: [] for setting in settings} for name in MIXERS}
    with bars(count=False) as progress:
        task = progress.add_task("training", total=len(runs) * chosen.steps)
        for i, (name, setting, seed) in enumerate(runs):
            work = lambda given=(name, settings[setting], seed): run(*given, chosen, lambda: progress.advance(task))  # noqa: E731
            results[name][setting].append(record.once(f"{name}, {setting}, seed {seed}", work))
            progress.update(task, completed=(i + 1) * chosen.steps)
    means = {name: {setting: summary(found) for setting, found in of.items()} for name, of in results.items()}
    record.finish({"means": means, "runs": results})


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """Means over seeds."""
    return {"recalled": mean(one["accuracy"] for one in found), "steps": mean(one["steps"] for one in found)}


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    means = results["means"]
    header = ["mixer", *(f"{setting}: {what}" for setting in means["softmax"] for what in ("recalled", "steps"))]
    rows = [
        (name, *(x for found in of.values() for x in (found["recalled"], round(found["steps"])))) for name, of in means.items()
    ]
    return {"": (header, rows)}, plot(results["runs"])


def plot(results: dict[str, dict[str, list[Any]]]) -> Figure:
    """Accuracy in the course of training, a line for each seed."""
    settings = list(next(iter(results.values())))
    figure, found = axes(len(settings))
    for ax, setting in zip(found, settings, strict=True):
        for colour, (name, of) in zip(COLOURS, results.items(), strict=True):
            for i, one in enumerate(of[setting]):
                steps = [50 * (j + 1) for j in range(len(one["course"]))]
                ax.plot(steps, one["course"], color=colour, label="" if i else name, marker=".")
        ax.set_title(setting, loc="left", fontsize=10)
        ax.set_xlabel("steps")
        ax.set_ylim(-0.02, 1.02)
    found[0].set_ylabel("values recalled")
    found[-1].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
