"""FLASH (Hua et al. 2022): what attention within chunks and attention across them are each worth, and what a context costs.

Byte-level models of gated attention units are trained with both, with either alone, and with one chunk for all (FLASH-Quad);
then a forward and a backward pass over as many tokens is timed in contexts of growing length. Seconds are those of the
processor, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
from linattn.progress import bars
from matplotlib.figure import Figure
from models.blocks import Attention, LanguageModel, parameter_count, transformer
from models.flash import flash, flash_quad

from .language import Text, bits_by_place, read, train, windows
from .record import COLOURS, Record, Tables, axes, numbers, options

KINDS: dict[str, Callable[[Any], LanguageModel]] = {
    "local only": lambda c: flash(256, c.width, c.units, c.chunk, keys=c.keys, linear=False),
    "global only": lambda c: flash(256, c.width, c.units, c.chunk, keys=c.keys, quadratic=False),
    "FLASH": lambda c: flash(256, c.width, c.units, c.chunk, keys=c.keys),
    "FLASH-Quad": lambda c: flash_quad(256, c.width, c.units, c.length, keys=c.keys),
}
TIMED: dict[str, Callable[[Any, int], LanguageModel]] = {
    "softmax Transformer": lambda c, T: transformer(256, c.width, c.units // 2, lambda: Attention(c.width, 4)),
    "FLASH-Quad": lambda c, T: flash_quad(256, c.width, c.units, T, keys=c.keys),
    "FLASH": lambda c, T: flash(256, c.width, c.units, 256, keys=c.keys),
}


SHOWN = dict(zip(("local only", "global only", "FLASH", "FLASH-Quad", "softmax Transformer"), COLOURS, strict=False))


def score(kind: str, text: Text, seed: int, chosen: Any, advance: Callable[[], None]) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = KINDS[kind](chosen)
    course = train(model, text.training, chosen.length, chosen.steps, chosen.batch, chosen.rate, seed, advance)
    bits = bits_by_place(model, windows(text.held_out, chosen.length, chosen.length))
    return {"bits": bits.mean().item(), "course": course, "parameters": parameter_count(model)}


def seconds(kind: str, T: int, chosen: Any) -> float:
    """Of the processor, for a forward and a backward pass over ``chosen.tokens`` in contexts of ``T``: the median of three."""
    torch.manual_seed(0)
    model, found = TIMED[kind](chosen, T), []
    ids = torch.randint(256, (chosen.tokens // T, T))
    for _ in range(4):
        start = time.process_time()
        model(ids)[0].logsumexp(-1).mean().backward()
        found.append(time.process_time() - start)
    return median(found[1:])  # the first call sets things up


def main() -> None:
    chosen = options(
        __doc__, width=96, units=4, keys=64, chunk=64, length=512, steps=250, batch=8, rate=3e-3, seeds="0,1",
        kinds=";".join(KINDS), tokens=8192, contexts="256,512,1024,2048,4096,8192",
    )  # fmt: skip
    torch.set_num_threads(1)
    record, text = Record("flash", chosen, shown), read()
    kinds = chosen.kinds.split(";")
    runs = [(kind, seed) for seed in numbers(chosen.seeds) for kind in kinds]
    scores: dict[str, list[Any]] = {kind: [] for kind in kinds}
    times: dict[str, dict[str, float]] = {kind: {} for kind in TIMED}
    with bars(count=False) as progress:
        task = progress.add_task("training", total=len(runs) * chosen.steps)
        for i, (kind, seed) in enumerate(runs):
            work = lambda k=kind, s=seed: score(k, text, s, chosen, lambda: progress.advance(task))  # noqa: E731
            scores[kind].append(record.once(f"{kind}, seed {seed}", work))
            progress.update(task, completed=(i + 1) * chosen.steps)
        for T in progress.track(numbers(chosen.contexts), description="timing"):
            for kind in TIMED:
                times[kind][str(T)] = record.once(f"{kind} at {T}", lambda k=kind, n=T: seconds(k, n, chosen))
    means = {kind: mean(one["bits"] for one in found) for kind, found in scores.items()}
    record.finish({"means": means, "runs": scores, "seconds": times})


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    means, scores, times = results["means"], results["runs"], results["seconds"]
    header = ["model", "bits per byte", *(f"seed {seed}" for seed in numbers(chosen["seeds"])), "parameters"]
    rows = [(kind, means[kind], *(one["bits"] for one in found), found[0]["parameters"]) for kind, found in scores.items()]
    latency = ["model", *(f"context {T}" for T in times["FLASH"])], [(kind, *of.values()) for kind, of in times.items()]
    return {"": (header, rows), "latency": latency}, plot(scores, times)


def plot(scores: dict[str, list[Any]], times: dict[str, dict[str, float]]) -> Figure:
    """Bits per byte of each kind, a dot for each seed and a line for their mean, and seconds by context, if there are some."""
    timed = len(times["FLASH"]) > 1
    figure, (left, *others) = axes(1 + timed, width=4.8, height=1.2 + 0.6 * len(scores))
    for place, (kind, found) in enumerate(scores.items()):
        bits = [one["bits"] for one in found]
        left.plot(bits, [place] * len(bits), "o", color=SHOWN[kind], markersize=5)
        left.plot(mean(bits), place, "|", color=SHOWN[kind], markersize=22, markeredgewidth=2)
    left.set_ylim(-0.5, len(scores) - 0.5)
    left.set_yticks(range(len(scores)), scores)
    left.set_xlabel("bits per byte of held-out text")
    if timed:
        plot_times(others[0], times)
    return figure


def plot_times(right: Any, times: dict[str, Any]) -> None:
    for kind, found in times.items():
        right.plot([int(T) for T in found], found.values(), color=SHOWN[kind], marker=".", label=kind)
    right.set_xscale("log", base=2)
    right.set_xticks([int(T) for T in found], list(found))
    right.set_xlabel("context length")
    right.set_ylabel("seconds, forward and backward")
    right.set_ylim(0)
    right.legend(frameon=False)


if __name__ == "__main__":
    main()
