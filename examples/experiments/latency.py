"""What a context costs FLASH, its quadratic form and softmax (Hua et al. 2022, figure 1): a forward and a backward pass.

As many bytes, cut into contexts of growing length; seconds of the processor on one thread, or of the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from linattn.progress import bars
from matplotlib.figure import Figure
from torch import nn

from .frame import of
from .protocol import Setting
from .record import COLOURS, Record, Tables, axes, numbers, options
from .studies import rows
from .studies.flash import mixed_chunk, quad, units
from .tasks import Text

KINDS: dict[str, Callable[[Setting, Any], nn.Module]] = {
    "softmax Transformer": of(rows.softmax),
    "FLASH-Quad": of(quad),
    "FLASH": of(partial(units, chunk_size=256)),
    "MC-TFM++": of(partial(mixed_chunk, chunk_size=256)),
}


def seconds(kind: str, T: int, chosen: Any) -> float:
    """For a forward and a backward pass over ``chosen.tokens`` in contexts of ``T``: the median of three."""
    torch.manual_seed(0)
    setting = Setting(width=chosen.width, depth=chosen.depth, heads=4, length=T, convolution=False)
    model, found = KINDS[kind](setting, Text(T, 1)).to(chosen.device), []
    ids = torch.randint(256, (chosen.tokens // T, T), device=chosen.device)
    cuda = chosen.device == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    for _ in range(4):
        start = clock()
        model(ids, {})[0].logsumexp(-1).mean().backward()
        if cuda:
            torch.cuda.synchronize()
        found.append(clock() - start)
    return median(found[1:])  # the first call sets things up


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = options(__doc__, device=device, width=96, depth=2, tokens=8192, contexts="256,512,1024,2048,4096,8192")
    torch.set_num_threads(1)
    record = Record("latency", chosen, shown)
    times: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    with bars(count=False) as progress:
        for T in progress.track(numbers(chosen.contexts), description="timing"):
            for kind in KINDS:
                times[kind][str(T)] = record.once(f"{kind} at {T}", lambda k=kind, n=T: seconds(k, n, chosen))
    record.finish(times)


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    contexts = list(next(iter(results.values())))
    header = ["model", *(f"context {T}" for T in contexts)]
    return {"": (header, [(kind, *of.values()) for kind, of in results.items()])}, plot(results)


def plot(results: dict[str, dict[str, float]]) -> Figure:
    """Seconds by context."""
    figure, (ax,) = axes(1, width=5.2)
    for colour, (kind, found) in zip(COLOURS, results.items(), strict=False):
        ax.plot([int(T) for T in found], found.values(), color=colour, marker=".", label=kind)
    ax.set_xscale("log", base=2)
    ax.set_xticks([int(T) for T in found], list(found))
    ax.set_xlabel("context length")
    ax.set_ylabel("seconds, forward and backward")
    ax.set_ylim(0)
    ax.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
