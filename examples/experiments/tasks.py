"""What models are trained for: a stream of batches for each seed, and held-out data in two parts.

A batch is ``ids [B, T]`` and ``targets [B, T]``, what a model is to say at each place, −100 where nothing is asked.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import sysconfig
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor, bool]
"""Tokens, targets, and whether they begin anew."""
AHEAD = 64
"""Batches that are drawn and moved to the device at once: one by one they would take as long as the step of a small model."""
PARTS = {"validation": 10**6, "test": 2 * 10**6}
"""Seeds that nothing is trained on."""
READING = threading.Lock()
"""Held by the thread that reads the text: one read serves all."""


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (Arora et al. 2023): ``key value key value …``, then every key again in another order,
    each followed by its value: at the second coming of a key a model is to say the value.

    ``pairs`` out of so many keys and as many values; keys, values and orders are drawn afresh for every batch. Sequences of
    training have 1, 2, 4, … or ``pairs`` of them, and those with fewer ask oftener: with ``pairs`` alone, models stand for
    thousands of steps at naming any of the values.
    """

    pairs: int
    batch: int
    keys: int = 64

    text = ""
    """It reads none."""

    @property
    def symbols(self) -> int:
        return 2 * self.keys

    @property
    def tokens(self) -> int:
        return 4 * self.pairs

    def draw(self, counts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A sequence for each of ``counts``, with so many pairs: each key is asked for once, then any of them."""
        rows, places = len(counts), torch.arange(2 * self.pairs)
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = self.keys + torch.randint(self.keys, keys.shape, generator=generator)
        told = places < counts[:, None]
        order = torch.rand(keys.shape, generator=generator).masked_fill(~told[:, : self.pairs], 2).argsort(1)
        asked = places - counts[:, None]
        any_of = (torch.rand(told.shape, generator=generator) * counts[:, None]).long()
        once = order.gather(1, asked.clamp(0, self.pairs - 1))
        which = torch.where(told, places, torch.where(asked < counts[:, None], once, any_of))
        answers = values.gather(1, which)
        targets = torch.stack([answers.masked_fill(told, -100), torch.full_like(answers, -100)], 2)
        return torch.stack([keys.gather(1, which), answers], 2).flatten(1), targets.flatten(1)

    def batches(self, seed: int, device: str = "cpu") -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            octaves = torch.randint(self.pairs.bit_length(), (AHEAD * self.batch,), generator=generator)
            drawn = (x.to(device).split(self.batch) for x in self.draw(2**octaves, generator))
            yield from ((*of, True) for of in zip(*drawn, strict=True))

    def held_out(self, part: str) -> tuple[Tensor, Tensor]:
        return self.draw(torch.full((256,), self.pairs), torch.Generator().manual_seed(PARTS[part]))

    @staticmethod
    def figures(lost: Tensor, right: Tensor, targets: Tensor) -> dict[str, float]:
        """The share of values recalled."""
        return {"recalled": right[targets >= 0].float().mean().item()}


SMALL = {
    "width": 32,
    "length": 64,
    "depth": 1,
    "batch": 2,
    "steps": 4,
    "scored": 256,
    "doublings": 0,
    "seeds": 1,
    "rates": (3e-3,),
}
"""A setting that text is read in within seconds on a CPU."""


@dataclass(frozen=True)
class Text:
    """Bytes of Python programs and their documentation, each to be said from those before it.

    Attributes:
        length: Of the windows that are read at a time.
        longest: Of those that are scored.
        segments: How many windows follow one another in the text, each going on from the states that the one before left
            (truncated backpropagation through time); 1 for windows that know nothing of what came before them.
        masked: Bytes to be said are hidden, 15 % of them, and read from both sides (masked language modelling).
        packages: Whether the text is that of the installed packages too, for large models; else of the standard library.
        scored: Bytes of each held-out part.
        octaves: Whether figures are also given by place in the window, from ``length / 4`` on.
        twice: Whether half as many windows again are scored whose second half is their first, which a model can recall.
    """

    length: int
    batch: int
    longest: int = 0
    segments: int = 1
    masked: bool = False
    packages: bool = False
    scored: int = 32768
    octaves: bool = False
    twice: bool = False
    symbols: ClassVar[int] = 257
    hidden: ClassVar[int] = 256

    @property
    def tokens(self) -> int:
        return self.length

    @property
    def text(self) -> str:
        """A hash of all three parts: they are those of the Python and the packages that are installed."""
        hashed = hashlib.sha256()
        for part, stream in read(self.packages).items():
            hashed.update(part.encode() + stream.numpy().tobytes())
        return hashed.hexdigest()[:16]

    def batches(self, seed: int, device: str = "cpu") -> Iterator[Batch]:
        generator, stream = torch.Generator().manual_seed(seed), read(self.packages)["training"]
        windows = torch.arange(self.segments)[:, None, None] * self.length + torch.arange(self.length + 1)
        texts, last = -(-AHEAD // self.segments), len(stream) - self.segments * self.length
        while True:
            starts = torch.randint(last, (texts, 1, self.batch, 1), generator=generator)
            rows = stream[starts + windows].flatten(0, 1).long()
            drawn = (x.to(device) for x in self.asked(rows, generator))
            yield from ((*of, i % self.segments == 0) for i, of in enumerate(zip(*drawn, strict=True)))

    def asked(self, rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens and targets of ``rows [..., T + 1]``."""
        ids = rows[..., :-1]
        if not self.masked:
            return ids, rows[..., 1:]
        hidden = torch.rand(ids.shape, generator=generator) < 0.15
        return ids.masked_fill(hidden, self.hidden), ids.masked_fill(~hidden, -100)

    def held_out(self, part: str) -> tuple[Tensor, Tensor]:
        length = max(self.longest, self.length)
        stream = read(self.packages)[part]
        rows = stream.unfold(0, length + 1, length)[: max(1, self.scored // length)].long()
        if self.twice:
            some = rows[: len(rows) // 2, : length // 2]
            rows = torch.cat([rows, torch.cat([some, some, some[:, : rows.shape[1] - 2 * some.shape[1]]], 1)])
        return self.asked(rows, torch.Generator().manual_seed(PARTS[part]))

    def figures(self, lost: Tensor, right: Tensor, targets: Tensor) -> dict[str, float]:
        """Bits of a byte; with ``octaves`` also by place: at places up to ``n``, from half as far; with ``twice`` also those of
        bytes that come again."""
        bits, asked = lost / math.log(2), targets >= 0
        found = {}
        if self.twice:
            plain = len(bits) - len(bits) // 3
            found["bits again"] = bits[plain:, bits.shape[1] // 2 :].mean().item()
            bits, asked = bits[:plain], asked[:plain]
        found["bits"] = bits[asked].mean().item()
        start, end = 0, self.length // 4
        while self.octaves and start < bits.shape[1]:
            found[str(end)] = bits[:, start:end].mean().item()
            start, end = end, 2 * end
        return found


def read(packages: bool) -> dict[str, Tensor]:
    """Bytes of each part as one stream. Whole files are held out, an eighth for each part.

    A paragraph that came before, in held-out files first, is left out.
    """
    with READING:
        return parted(packages)


@functools.cache
def parted(packages: bool) -> dict[str, Tensor]:
    parts: dict[str, list[str]] = {"validation": [], "test": [], "training": []}
    for name, text in files(packages):
        place = zlib.crc32(name.encode()) % 8
        parts["validation" if place == 0 else "test" if place == 1 else "training"].append(text)
    seen: set[str] = set()
    for texts in parts.values():
        texts[:] = ["\n\n".join(unseen(text, seen)) for text in texts]
    return {part: torch.frombuffer(bytearray("\n\n".join(of).encode()), dtype=torch.uint8) for part, of in parts.items()}


def unseen(text: str, seen: set[str]) -> Iterator[str]:
    """Paragraphs that are not in ``seen``, which takes them in; white space makes no difference."""
    for paragraph in text.split("\n\n"):
        if (plain := " ".join(paragraph.split())) not in seen:
            seen.add(plain)
            yield paragraph


def files(packages: bool) -> Iterator[tuple[str, str]]:
    """Name and text of the Python and text files of the standard library, and of the installed packages; tests left out."""
    library = sysconfig.get_path("stdlib")
    installed = sorted(path for path in set(sys.path) if path.endswith("-packages"))
    for folder in [library, *installed] if packages else [library]:
        left_out = {"test", "tests", *("site-packages", "dist-packages") * (folder == library)}
        for path in sorted(Path(folder).rglob("*")):
            inside = path.relative_to(folder)
            if path.suffix in (".py", ".md", ".rst", ".txt") and left_out.isdisjoint(inside.parts) and path.is_file():
                yield str(inside), path.read_text(encoding="utf-8", errors="ignore")
