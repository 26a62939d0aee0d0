"""A task for the converted sentence encoder of :mod:`experiments.minilm`: find the docstring that a summary line belongs to.

The first line of each docstring of Python's library and NumPy's is a query, what follows it is the document. The encoder is
taken as it is with softmax and with linear attention in its place, frozen but for a distilled map, and then finetuned, all of
its weights, to tell the documents of a batch apart. Reported on docstrings that were held out: how often the right document
comes first, and the mean of one over its rank. Needs what ``experiments.minilm`` needs.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from linattn.progress import bars
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from .minilm import (
    FIXED,
    LAYERS,
    LEARNED,
    SHORT,
    Attend,
    Encoder,
    distil,
    encoder_of,
    initial,
    linear_attention,
    passages,
    queries_and_keys,
    softmax,
)
from .prose import docstrings
from .record import COLOURS, LABELS, Record, Tables, axes, options
from .schedule import rise_and_fall

Pairs = list[tuple[str, str]]
Arrays = dict[str, Tensor]
TEMPERATURE = 0.05


def pairs(held_out: bool) -> Pairs:
    """Summaries and what follows them, neither of which comes twice; an eighth is held out."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for folder in (sysconfig.get_path("stdlib"), Path(np.__file__).parent):
        for text in docstrings(Path(folder)):
            summary, rest = (" ".join(part.split()) for part in text.partition("\n\n")[::2])
            if len(summary) >= 30 and len(rest) >= 100 and summary not in found and rest not in seen:
                found[summary] = rest
                seen.add(rest)
    return [pair for pair in sorted(found.items()) if (zlib.crc32(pair[0].encode()) % 8 == 0) == held_out]


class Reader:
    """Embeddings of texts by an encoder with some attention; ``learned`` are its weights, and parameters of maps."""

    def __init__(self, encoder: Encoder, name: str, learned: Arrays) -> None:
        self.encoder, self.name, self.learned = encoder, name, learned

    @property
    def attend(self) -> Attend:
        if self.name == "softmax":
            return softmax
        if self.name in FIXED:
            return linear_attention([FIXED[self.name]()] * LAYERS)
        return linear_attention([LEARNED[self.name][0](**self.map(layer)) for layer in range(LAYERS)])

    def map(self, layer: int) -> Arrays:
        """Parameters of the map of a layer."""
        prefix = f"map.{layer}."
        return {key.removeprefix(prefix): x for key, x in self.learned.items() if key.startswith(prefix)}

    def __call__(self, texts: list[str], length: int) -> Tensor:
        """Unit vectors ``[N, 384]``. Texts of a batch are of one length: the encoder has no mask, and longer ones are cut."""
        ids = [self.encoder.tokenizer.encode(text).ids[:length] for text in texts]
        found: dict[int, Tensor] = {}
        own = self.encoder.with_weights(self.encoder.w | self.learned)
        for size in sorted({len(row) for row in ids}):
            at = [i for i, row in enumerate(ids) if len(row) == size]
            rows = own.embeddings(torch.tensor([ids[i] for i in at]), self.attend)
            found.update(zip(at, rows, strict=True))
        return normalize(torch.stack([found[i] for i in range(len(texts))]), dim=-1)


@torch.no_grad()
def score(reader: Reader, of: Pairs, chosen: Any) -> dict[str, float]:
    """How often the right document is first, and the mean reciprocal rank."""
    queries, documents = zip(*of, strict=True)
    alike = reader(list(queries), chosen.query) @ reader(list(documents), chosen.document).mT
    ranks = (alike >= alike.diagonal()[:, None]).sum(1)
    return {"first": (ranks == 1).float().mean().item(), "reciprocal rank": (1 / ranks).mean().item()}


def finetune(reader: Reader, of: Pairs, chosen: Any) -> Reader:
    """All weights and maps, by which document of a batch belongs to which query."""
    learned = {key: x.detach().clone().requires_grad_() for key, x in reader.learned.items()}
    tuned = Reader(reader.encoder, reader.name, learned)
    optimiser = torch.optim.AdamW(learned.values(), lr=chosen.rate)
    generator = torch.Generator().manual_seed(chosen.seed)
    for step in range(chosen.steps):
        for group in optimiser.param_groups:
            group["lr"] = chosen.rate * rise_and_fall(step / chosen.steps)
        some = [of[i] for i in torch.randperm(len(of), generator=generator)[: chosen.batch]]
        queries, documents = zip(*some, strict=True)
        alike = tuned(list(queries), chosen.query) @ tuned(list(documents), chosen.document).mT / TEMPERATURE
        optimiser.zero_grad()
        cross_entropy(alike, torch.arange(len(some))).backward()
        torch.nn.utils.clip_grad_norm_(learned.values(), 1.0)
        optimiser.step()
    return tuned


def main() -> None:
    chosen = options(
        __doc__, maps="softmax;hedgehog, softmax;hedgehog;t2r;performer;relu;elu1", query=24, document=64, held_out=300,
        steps=40, batch=16, rate=5e-5, distil_steps=120, distil_batch=4, distil_train=64, seed=0,
    )  # fmt: skip
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    record, encoder = Record("retrieval", chosen, shown), encoder_of()
    training, held_out = pairs(held_out=False), pairs(held_out=True)[: chosen.held_out]
    results: dict[str, Any] = {}
    with bars(count=False) as progress:
        for name in progress.track(chosen.maps.split(";"), description="attention"):
            made = {}
            if name in LEARNED:
                made = record.arrays(f"distilled {name}", lambda n=name: (maps(n, encoder, chosen), None))[0]
            frozen = Reader(encoder, name, weights(encoder) | made)

            def measure(stage: str, make: Callable[[], Reader], name: str = name) -> None:
                results.setdefault(name, {})[stage] = record.once(f"{stage} {name}", lambda: score(make(), held_out, chosen))

            measure("frozen", lambda r=frozen: r)
            measure("finetuned", lambda r=frozen: finetune(r, training, chosen))
    record.finish({"maps": results, "pairs": {"trained on": len(training), "held out": len(held_out)}})


def weights(encoder: Encoder) -> Arrays:
    """What is finetuned of the encoder itself."""
    return {key: x for key, x in encoder.w.items() if x.is_floating_point()}


def reader(name: str, encoder: Encoder, chosen: Any) -> Reader:
    """The encoder with some attention, whose map is distilled if it is learned."""
    return Reader(encoder, name, weights(encoder) | (maps(name, encoder, chosen) if name in LEARNED else {}))


def maps(name: str, encoder: Encoder, chosen: Any) -> Arrays:
    """Parameters of the distilled maps of all layers."""
    with torch.no_grad():
        read = queries_and_keys(encoder, passages(encoder, SHORT, held_out=False)[: chosen.distil_train])
    found: Arrays = {}
    for layer in range(LAYERS):
        of = distil(name, read, layer, chosen.distil_steps, chosen.distil_batch, chosen.seed)["parameters"]
        found |= {f"map.{layer}.{key}": torch.tensor(x) for key, x in of.items()}
    assert len(found) == LAYERS * len(initial(name)[0])
    return found


FIGURES = ("first", "reciprocal rank")


def shown(found: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    results = found["maps"]
    header = ["attention", *(f"{stage}: {what}" for stage in ("frozen", "finetuned") for what in (*FIGURES, "share"))]
    rows = [
        (f"`{LABELS.get(name, name)}`", *(x for stage in ("frozen", "finetuned") for x in row(results, name, stage)))
        for name in results
    ]
    figure, (ax,) = axes(1, width=5.6)
    for shift, stage, colour in ((-0.2, "frozen", COLOURS[4]), (0.2, "finetuned", COLOURS[0])):
        heights = [results[name][stage]["reciprocal rank"] for name in results]
        ax.barh([i + shift for i in range(len(results))], heights, 0.38, color=colour, label=stage)
    ax.set_yticks(range(len(results)), [LABELS.get(name, name) for name in results])
    ax.set_xlabel("mean reciprocal rank of the right document")
    ax.legend(frameon=False)
    return {"": (header, rows)}, figure


def row(results: dict[str, Any], name: str, stage: str) -> list[Any]:
    """The figures of a stage, and the share of the reciprocal rank that softmax has at it."""
    of = results[name][stage]
    return [*(of[what] for what in FIGURES), of["reciprocal rank"] / results["softmax"][stage]["reciprocal rank"]]


if __name__ == "__main__":
    main()
