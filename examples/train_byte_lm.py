"""Trains the byte-level GLA language model that ``linattn demo`` runs, in some ten minutes of one CPU core.

    python examples/train_byte_lm.py                      # trains, then writes the weights and the record into the package
    python examples/train_byte_lm.py --resume             # goes on from the last checkpoint
    python examples/train_byte_lm.py --out /tmp/lm --epochs 2

The text is ``pydoc_data.topics`` of the running Python: what ``help("topics")`` prints. Whole topics are held out, by a
fixed rule, and a paragraph that occurs in several topics is kept in one part only, so that nothing held out was trained on.
One text, cut into equal streams, is read from start to end in every epoch: each segment starts from the state that the one
before it returned, so the model learns to carry its state further than one segment.

The record holds the bits per byte of the shipped float16 weights on the test part, each topic scored on its own, beside
those of interpolated n-gram models whose one parameter per order is tuned on the validation part.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import linattn
import numpy as np
import torch
from linattn.demo import model
from linattn.progress import bars

PACKAGE = Path(model.__file__).parent
LN2 = math.log(2.0)


def split(texts: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Training, validation and test texts, one per topic.

    The CRC-32 of a topic's name modulo 8 decides: 1 is test, 2 validation. A paragraph, compared without its white space,
    stays only where it comes first in the order test, validation, training.
    """
    seen: set[str] = set()
    parts: dict[str, list[str]] = {"test": [], "validation": [], "training": []}
    place = {1: "test", 2: "validation"}
    for part, kept in parts.items():
        for name in sorted(texts):
            if place.get(zlib.crc32(name.encode()) % 8, "training") == part:
                fresh = list(_fresh(texts[name], seen))
                kept += ["\n\n".join(fresh)] if fresh else []
    return parts["training"], parts["validation"], parts["test"]


def _fresh(text: str, seen: set[str]) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if key not in seen:
            seen.add(key)
            yield paragraph


# -- the baseline ----------------------------------------------------------------------------------------------------


class NGrams:
    """Byte n-gram models up to some order, each smoothed with the next lower one.

    ``p_n(b | c) = (count(c b) + λ_n p_{n-1}(b | shorter c)) / (count(c) + λ_n)`` with ``p_{-1} = 1/256`` (MacKay & Peto 1995).
    """

    def __init__(self, texts: list[str], order: int) -> None:
        self.order, self.strength = order, [1.0] * (order + 1)
        self._pairs = [
            np.unique(np.concatenate([_keys(t, n + 1) for t in texts]), return_counts=True) for n in range(order + 1)
        ]
        self._contexts = [np.unique(keys // 256, return_inverse=True) for keys, _ in self._pairs]
        self._totals = [
            np.bincount(inverse, weights=counts) for (_, inverse), (_, counts) in zip(self._contexts, self._pairs, strict=True)
        ]

    def tune(self, texts: list[str]) -> None:
        """Choose each ``λ``, lowest order first, by the bits per byte of ``texts``."""
        grid = [0.25 * 2 ** (i / 2) for i in range(20)]
        for n in range(self.order + 1):
            self.strength[n] = min(grid, key=lambda value: self._bits(texts, n, [*self.strength[:n], value]))

    def bits_per_byte(self, texts: list[str], order: int) -> float:
        """Bits per byte of ``texts`` under the model of that order."""
        return self._bits(texts, order, self.strength[: order + 1])

    def _bits(self, texts: list[str], order: int, strength: list[float]) -> float:
        bits = [-np.log2(self._probability(text, order, strength)).sum() for text in texts]
        return float(sum(bits)) / sum(len(text.encode()) for text in texts)

    def _probability(self, text: str, order: int, strength: list[float]) -> np.ndarray:
        p = np.full(len(text.encode()), 1 / 256)
        for n in range(order + 1):
            keys = _keys(text, n + 1)
            count = _look_up(self._pairs[n][0], self._pairs[n][1], keys)
            total = _look_up(self._contexts[n][0], self._totals[n], keys // 256)
            p = (count + strength[n] * p) / (total + strength[n])
        return p


def _keys(text: str, n: int) -> np.ndarray:
    """One integer for each byte and the ``n - 1`` before it; zeros come before the first."""
    data = np.frombuffer(b"\0" * (n - 1) + text.encode(), np.uint8).astype(np.int64)
    last = len(data) - n + 1
    return sum((data[i : i + last] << (8 * (n - 1 - i)) for i in range(n)), np.zeros(last, np.int64))


def _look_up(known: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, values[place], 0.0)


# -- the model -------------------------------------------------------------------------------------------------------


def bits_per_byte(weights: Mapping[str, torch.Tensor], texts: list[str]) -> float:
    """Bits per byte of ``texts``, each scored from its first byte on without anything before it."""
    nats = 0.0
    with torch.no_grad():
        for text in texts:
            data = torch.tensor(list(b"\0" + text.encode()))[None]
            logits, _ = model.forward(weights, data[:, :-1])
            nats += float(torch.nn.functional.cross_entropy(logits[0], data[0, 1:], reduction="sum"))
    return nats / LN2 / sum(len(text.encode()) for text in texts)


def segments(text: bytes, streams: int, length: int, offset: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """``(inputs, targets)``, each ``[streams, length]``, through the text rotated by ``offset``."""
    data = torch.tensor(list(text[offset:] + text[:offset]))
    steps = (len(data) - 1) // streams // length
    inputs = data[: steps * streams * length].reshape(streams, steps, length)
    targets = data[1 : steps * streams * length + 1].reshape(streams, steps, length)
    yield from ((inputs[:, i], targets[:, i]) for i in range(steps))


def dropout(rate: float, generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Zeroes numbers at random, from a generator of its own."""

    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape, generator=generator) >= rate) / (1 - rate)

    return drop


class Trainer:
    """Weights, optimiser and random numbers: all that a checkpoint holds."""

    def __init__(self, options: argparse.Namespace, text: bytes) -> None:
        self.options, self.text = options, text
        self.weights = {
            name: torch.from_numpy(array).requires_grad_()
            for name, array in model.initial_weights(model.SIZES, options.seed).items()
        }
        matrices = [w for name, w in self.weights.items() if w.ndim == 2 and "embed" not in name]
        others = [w for name, w in self.weights.items() if w.ndim == 1 or "embed" in name]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(0.9, 0.98),
        )
        self.generator = torch.Generator().manual_seed(options.seed)
        self.epoch, self.seconds, self.best = 0, 0.0, math.inf
        self.best_weights: dict[str, torch.Tensor] = {}

    @property
    def steps_per_epoch(self) -> int:
        return (len(self.text) - 1) // self.options.streams // self.options.length

    def run_epoch(self, advance: Callable[[], None]) -> float:
        """One reading of the text; returns its bits per byte in training."""
        start, total = time.perf_counter(), 0.0
        offset = int(torch.randint(len(self.text), (), generator=self.generator))
        state = None
        for i, (inputs, targets) in enumerate(segments(self.text, self.options.streams, self.options.length, offset)):
            self._set_rate(self.epoch * self.steps_per_epoch + i)
            loss, state = self._step(inputs, targets, state)
            total += loss
            advance()
        self.epoch += 1
        self.seconds += time.perf_counter() - start
        return total / self.steps_per_epoch / LN2

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor, state: Any) -> tuple[float, Any]:
        logits, state = model.forward(self.weights, inputs, state, drop=dropout(self.options.dropout, self.generator))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimiser.step()
        return loss.item(), model.State(state.recent, tuple(layer.detach() for layer in state.layers))

    def _set_rate(self, step: int) -> None:
        """A short linear rise, then a cosine down to a hundredth."""
        total = self.options.epochs * self.steps_per_epoch
        rise = min(200, total // 10)
        rate = (step + 1) / rise if step < rise else 0.505 + 0.495 * math.cos(math.pi * (step - rise) / (total - rise))
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.lr * rate

    def keep_best(self, bits: float) -> None:
        """Remember these weights if they are the best so far."""
        if bits < self.best:
            self.best, self.best_weights = bits, {name: w.detach().clone() for name, w in self.weights.items()}

    def save(self, path: Path) -> None:
        """Write a checkpoint; a broken run leaves the one before."""
        torch.save(
            {
                "options": vars(self.options) | {"out": None, "resume": None, "threads": None},
                "weights": self.weights,
                "optimiser": self.optimiser.state_dict(),
                "generator": self.generator.get_state(),
                "progress": (self.epoch, self.seconds, self.best),
                "best_weights": self.best_weights,
            },
            path.with_suffix(".new"),
        )
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint that was made with the same options."""
        saved = torch.load(path)
        mine = vars(self.options) | {"out": None, "resume": None, "threads": None}
        if saved["options"] != mine:
            raise SystemExit(f"{path} was made with other options: {saved['options']}, not {mine}")
        for name, w in self.weights.items():
            w.data.copy_(saved["weights"][name])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.generator.set_state(saved["generator"])
        self.epoch, self.seconds, self.best = saved["progress"]
        self.best_weights = saved["best_weights"]


def main() -> None:
    """Train, measure and write."""
    options = _options()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    options.out.mkdir(parents=True, exist_ok=True)
    checkpoint = options.out / "byte_lm.checkpoint"
    training, validation, test = split(topics)
    trainer = Trainer(options, "\n\n".join(training).encode())
    if options.resume and checkpoint.exists():
        trainer.load(checkpoint)
    with bars(count=False) as progress:
        total = options.epochs * trainer.steps_per_epoch
        task = progress.add_task("training", total=total, completed=trainer.epoch * trainer.steps_per_epoch)
        while trainer.epoch < options.epochs:
            trained = trainer.run_epoch(lambda: progress.advance(task))
            held = bits_per_byte(trainer.weights, validation)
            trainer.keep_best(held)
            trainer.save(checkpoint)
            told = f"{trained:.3f} bits/byte in training, {held:.3f} in validation, {trainer.seconds:.0f} s"
            print(f"epoch {trainer.epoch:3d}: {told}", flush=True)
    write(options, trainer, (training, validation, test))


def write(options: argparse.Namespace, trainer: Trainer, parts: tuple[list[str], list[str], list[str]]) -> None:
    """Write the weights, and the record of what they score beside the n-gram models."""
    training, validation, test = parts
    half = {name: w.numpy().astype(np.float16) for name, w in trainer.best_weights.items()}
    np.savez_compressed(options.out / "byte_lm.npz", **half)
    shipped = {name: torch.from_numpy(array.astype(np.float32)) for name, array in half.items()}
    ngrams = NGrams(training, 4)
    ngrams.tune(validation)
    record = {
        "corpus": "pydoc_data.topics",
        "command": "python examples/train_byte_lm.py",
        "options": {name: value for name, value in vars(options).items() if name not in ("out", "resume")},
        "bytes": {
            name: sum(len(text.encode()) for text in part)
            for name, part in zip(("training", "validation", "test"), parts, strict=True)
        },
        "parameters": sum(array.size for array in half.values()),
        "file_bytes": (options.out / "byte_lm.npz").stat().st_size,
        "bits_per_byte": {
            "validation": round(bits_per_byte(shipped, validation), 4),
            "test": round(bits_per_byte(shipped, test), 4),
            **{f"order_{n}_test": round(ngrams.bits_per_byte(test, n), 4) for n in range(5)},
        },
        "training_seconds": round(trainer.seconds),
        "versions": {
            "python": platform.python_version(),
            "linattn": linattn.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
    (options.out / "byte_lm.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record["bits_per_byte"], indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="folder of the weights, the record and the checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--epochs", type=int, default=16, help="readings of the text")
    parser.add_argument("--streams", type=int, default=8, help="streams that are read side by side")
    parser.add_argument("--length", type=int, default=256, help="bytes of a segment")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
