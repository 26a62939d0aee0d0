"""Trains a Transformer of bytes, then converts it to linear attention with the program of :mod:`.smollm`.

Of a model whose training is known: how much of what it learned in minutes survives, by feature map, when its softmax is
replaced (Zhang et al. 2024, §5.4, where that of a GPT-2 is). Text is that of the standard library and of installed packages.
Needs a GPU: five minutes of an H200.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy

from . import smollm, tasks
from .record import LABELS, Record, Tables, options
from .smollm import Arrays, Conversion, Decoder, Descent, Found, Pace, Sizes, perplexity, softmax, windows

DEFAULTS: dict[str, Any] = {
    **{name: x for name, x in smollm.DEFAULTS.items() if name not in ("tokens", "documents")},
    "weights": "",
    "maps": "softmax;hedgehog;hedgehog, eq. 3;hedgehog, softmax;t2r;t2r, not distilled;relu;elu1;cosformer;performer",
    "layers": 8, "heads": 8, "hidden": 1408, "packages": 1, "test_tokens": 65536, "rank": 0,
    "train_steps": 2500, "train_seconds": 100.0, "train_length": 1024, "train_batch": 32, "train_rate": 1e-3,
    "distil_steps": 600, "distil_seconds": 15.0, "distil_rate": 1e-2,
    "tune_steps": 600, "tune_seconds": 22.0, "tune_length": 1024, "tune_batch": 16, "tune_rate": 3e-4,
}  # fmt: skip
SMALL = {
    "device": "cpu", "maps": "softmax;elu1;hedgehog", "tuned": "softmax;elu1;hedgehog", "layers": 2, "heads": 2, "hidden": 128,
    "packages": 0, "length": 64, "long": 128, "test_tokens": 1024, "rank": 4, "train_steps": 20, "train_length": 64,
    "train_batch": 4, "distil_steps": 10, "distil_length": 64, "distil_batch": 2, "tune_steps": 10, "tune_length": 64,
    "tune_batch": 4,
}  # fmt: skip
"""What ``--small 1`` sets: a try of the program in seconds, on a CPU."""
K = 64


def collected(parts: dict[str, Any]) -> dict[str, Any]:
    """What :mod:`.smollm` makes of the parts of a run, and bits of a byte by map, stage and length of context."""
    found = smollm.collected(parts)
    scored = {name: {stage: of[stage] for stage in smollm.STAGES if stage in of} for name, of in found["maps"].items()}
    found["bits"] = {
        name: {stage: {n: bits(x) for n, x in figures.items()} for stage, figures in of.items()} for name, of in scored.items()
    }
    return found


def bits(perplexity: float | None) -> float | None:
    """Bits of a byte from a perplexity; none of what diverged."""
    return None if perplexity is None else math.log2(perplexity)


def fresh(sizes: Sizes, hidden: int, device: str) -> Arrays:
    """Untrained weights, by the names of :class:`.smollm.Decoder`."""
    width = sizes.heads * sizes.K

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, device=device) * scale * columns**-0.5

    deep = (2 * sizes.layers) ** -0.5  # what each of so many terms of the residual stream is scaled by
    found = {"token_embd": matrix(tasks.Text.symbols, width), "output_norm": torch.ones(width, device=device)}
    for layer in range(sizes.layers):
        at = f"blk.{layer}."
        found |= {f"{at}{name}_norm": torch.ones(width, device=device) for name in ("attn", "ffn")}
        found |= {f"{at}attn_{name}": matrix(width, width) for name in "qkv"}
        found |= {f"{at}ffn_{name}": matrix(hidden, width) for name in ("gate", "up")}
        found |= {f"{at}attn_output": matrix(width, width, deep), f"{at}ffn_down": matrix(width, hidden, deep)}
    return found


def pretrain(
    arrays: Arrays, sizes: Sizes, data: Tensor, pace: Pace, batch: int, rate: float, score: Callable[[Arrays], float]
) -> Found:
    """All weights, by predicting the next byte; products are of bfloat16 on a GPU, weights of float32."""
    descent = Descent(arrays, rate, pace)

    def step(ids: Tensor) -> Tensor:
        logits = rounded(descent.arrays, sizes)(ids[:, :-1], softmax)
        loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return descent.run(step, data, batch, 2, score, lambda share: None)


def rounded(arrays: Arrays, sizes: Sizes) -> Decoder:
    half = arrays["token_embd"].is_cuda
    return Decoder({name: x.bfloat16() if half else x for name, x in arrays.items()}, sizes)


def trained(record: Record, chosen: Any, training: Tensor, test: Tensor) -> Decoder:
    """The model, with softmax: trained once, and kept."""
    sizes = Sizes(chosen.layers, chosen.heads, chosen.heads, K, 1e4, 1e-5)
    pace = Pace(chosen.train_steps, chosen.train_seconds, chosen.marks, bool(chosen.graphs))

    def score(arrays: Arrays) -> float:
        return perplexity(rounded(arrays, sizes), Conversion("softmax", {}), test)

    def work() -> Found:
        arrays, data = fresh(sizes, chosen.hidden, chosen.device), windows(training, chosen.train_length)
        return pretrain(arrays, sizes, data, pace, chosen.train_batch, chosen.train_rate, score)

    arrays, _ = record.arrays(f"pretrained softmax{smollm.COURSE}", work)
    return rounded({name: x.to(chosen.device) for name, x in arrays.items()}, sizes)


def main() -> None:
    chosen: argparse.Namespace = options(__doc__, **DEFAULTS)
    vars(chosen).update(SMALL if chosen.small else {})
    torch.manual_seed(chosen.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)
    parts = tasks.read(bool(chosen.packages))
    training, held_out = (parts[part].long().to(chosen.device) for part in ("training", "test"))
    held_out = held_out[: chosen.test_tokens]
    record = Record("ours", chosen, shown)
    decoder = trained(record, chosen, training, windows(held_out, chosen.length))
    smollm.run(record, chosen, decoder, training, held_out, collected)


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    """Bits of a byte by map and stage, and the divergence of its weights from softmax's before finetuning."""
    _, figure = smollm.shown(results, chosen)
    lengths = list(results["bits"]["softmax"]["converted"])
    columns = [(stage, n) for stage in smollm.STAGES for n in lengths]
    rows = [
        (
            f"`{LABELS.get(name, name)}`",
            results["maps"][name].get("kl", ""),
            *(smollm.told(of[stage][n]) if stage in of else "" for stage, n in columns),
        )
        for name, of in results["bits"].items()
    ]
    return {"": (["attention", "KL", *(f"{stage}, {n}" for stage, n in columns)], rows)}, figure


if __name__ == "__main__":
    main()
