"""Multi-query associative recall by kind of mixer (Yang et al. 2024, figure 4): what can be kept in a state of one size.

Six mixers in one small model of two layers, with as many pairs as the state can and cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models.blocks import Attention, parameter_count
from models.delta import DeltaNet, GatedDeltaNet
from models.gla import GatedLinearAttention, RetNet, Ungated
from rich.progress import Progress
from torch import nn

from .recall import Recaller, Task, train
from .record import COLOURS, Record, axes, options

MIXERS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax": Attention,
    "ungated": Ungated,
    "RetNet": RetNet,
    "GLA": GatedLinearAttention,
    "delta rule": DeltaNet,
    "gated delta rule": GatedDeltaNet,
}


def run(name: str, pairs: int, chosen: Any, advance: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(chosen.seed)
    model = Recaller(Task(pairs), chosen.width, [MIXERS[name](chosen.width, chosen.heads) for _ in range(2)])
    found = train(model, chosen.steps, chosen.batch, chosen.rate, chosen.seed, advance)
    return found | {"parameters": parameter_count(model)}


def main() -> None:
    chosen = options(__doc__, width=64, heads=2, steps=300, batch=32, rate=5e-3, seed=0, pairs="8,16")
    torch.set_num_threads(1)
    record = Record("mqar", chosen)
    pairs = [int(n) for n in chosen.pairs.split(",")]
    runs = [(name, n) for n in pairs for name in MIXERS]
    results: dict[str, dict[int, Any]] = {name: {} for name in MIXERS}
    with Progress() as progress:
        task = progress.add_task("training", total=len(runs) * chosen.steps)
        for i, (name, n) in enumerate(runs):
            advance = lambda: progress.advance(task)  # noqa: E731
            results[name][n] = record.once(f"{name} {n}", lambda m=name, n=n, a=advance: run(m, n, chosen, a))
            progress.update(task, completed=(i + 1) * chosen.steps)
    header = ["mixer", *(f"accuracy, {n} pairs" for n in pairs), *(f"steps, {n} pairs" for n in pairs), "parameters"]
    rows = [
        (name, *(of[n]["accuracy"] for n in pairs), *(of[n]["steps"] for n in pairs), of[pairs[0]]["parameters"])
        for name, of in results.items()
    ]
    figure, found = axes(len(pairs))
    for ax, n in zip(found, pairs, strict=True):
        for colour, (name, of) in zip(COLOURS, results.items(), strict=True):
            course = of[n]["course"]
            ax.plot([50 * (i + 1) for i in range(len(course))], course, color=colour, label=name, marker=".")
        ax.set_title(f"{n} pairs", loc="left", fontsize=10)
        ax.set_xlabel("steps")
        ax.set_ylim(-0.02, 1.02)
    found[0].set_ylabel("values recalled")
    found[-1].legend(frameon=False, fontsize=8)
    record.finish(results, header, rows, figure)


if __name__ == "__main__":
    main()
