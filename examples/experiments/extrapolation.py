"""Length extrapolation (Yang et al. 2024, figure 5): byte-level models trained at 512 bytes, scored on contexts to 16,384.

GLA, and RetNet with its fixed decays, against softmax attention with rotary positions. Every text is read from its start in one
call; what is reported is what bytes cost by their place in it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from linattn.progress import bars
from matplotlib.figure import Figure
from models.blocks import Attention, parameter_count, transformer
from models.gla import GatedLinearAttention, RetNet, ScalarGate, Ungated
from torch import nn

from .language import Text, bits_by_place, read, train, windows
from .record import COLOURS, Record, Tables, axes, numbers, options

MIXERS: dict[str, Callable[[int, int], nn.Module]] = {
    "softmax, RoPE": Attention,
    "RetNet": RetNet,
    "GLA": GatedLinearAttention,
    "no gate": Ungated,
    "one gate a head": ScalarGate,
}
SHOWN = dict(zip(MIXERS, COLOURS, strict=False))


def run(name: str, text: Text, seed: int, chosen: Any, advance: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = transformer(256, chosen.width, chosen.depth, lambda: MIXERS[name](chosen.width, chosen.heads))
    course = train(model, text.training, chosen.length, chosen.steps, chosen.batch, chosen.rate, seed, advance)
    bits = bits_by_place(model, windows(text.held_out, chosen.longest, chosen.longest // 4))
    return {"bits": by_octave(bits, chosen.length // 4), "course": course, "parameters": parameter_count(model)}


def by_octave(bits: torch.Tensor, first: int) -> dict[str, float]:
    """Mean bits of places up to ``first``, and from there to twice as far, and so on; by the end of each."""
    found, start, end = {}, 0, first
    while start < len(bits):
        found[str(end)] = bits[start:end].mean().item()
        start, end = end, 2 * end
    return found


def main() -> None:
    chosen = options(
        __doc__, width=96, depth=2, heads=4, length=512, longest=16384, steps=400, batch=8, rate=4e-3, seeds="0,1",
        mixers="softmax, RoPE;RetNet;GLA",
    )  # fmt: skip
    torch.set_num_threads(1)
    record, text = Record("extrapolation", chosen, shown), read()
    mixers = chosen.mixers.split(";")
    runs = [(name, seed) for seed in numbers(chosen.seeds) for name in mixers]
    results: dict[str, list[Any]] = {name: [] for name in mixers}
    with bars(count=False) as progress:
        task = progress.add_task("training", total=len(runs) * chosen.steps)
        for i, (name, seed) in enumerate(runs):
            work = lambda n=name, s=seed: run(n, text, s, chosen, lambda: progress.advance(task))  # noqa: E731
            results[name].append(record.once(f"{name}, seed {seed}", work))
            progress.update(task, completed=(i + 1) * chosen.steps)
    ends = list(results[mixers[0]][0]["bits"])
    means = {name: {end: mean(one["bits"][end] for one in found) for end in ends} for name, found in results.items()}
    record.finish({"means": means, "runs": results})


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    means = results["means"]
    header = ["model", *(f"to {end}" for end in next(iter(means.values())))]
    return {"": (header, [(name, *of.values()) for name, of in means.items()])}, plot(results["runs"], chosen["length"])


def plot(results: dict[str, list[Any]], length: int) -> Figure:
    """Bits per byte by place, a line for each seed."""
    figure, (ax,) = axes(1, width=6.0)
    for name, found in results.items():
        for i, one in enumerate(found):
            places = [int(end) for end in one["bits"]]
            ax.plot(places, one["bits"].values(), color=SHOWN[name], marker=".", label="" if i else name)
    if places[-1] > length:
        ax.axvline(length, color="#5c6b73", linestyle=":")
        ax.annotate("trained to here", (length, ax.get_ylim()[1]), xytext=(4, -10), textcoords="offset points", fontsize=8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(places, [str(place) for place in places])
    ax.set_xlabel("place in the text (bytes)")
    ax.set_ylabel("bits per byte")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


if __name__ == "__main__":
    main()
