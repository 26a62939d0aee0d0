"""Text that every machine has, and the packs of documents that a step of training reads.

The documents are what ``help("topics")`` prints, the docstrings of the standard library's modules, and the descriptions and
text files of installed packages. A token is a byte; a document begins with a zero.

A step reads the next ``tokens`` of a stream of shuffled documents, so its number is all that a checkpoint has to keep of the
data. Documents are cut at multiples of ``length``, whatever the number of ranks: the loss does not depend on it.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

TEXTS = (".md", ".rst", ".txt")


class Pack(NamedTuple):
    """Documents end to end.

    Attributes:
        inputs: Bytes ``[tokens]``.
        targets: The byte after each ``[tokens]``.
        offsets: Where documents, or their parts, begin, and the end.
    """

    inputs: np.ndarray
    targets: np.ndarray
    offsets: tuple[int, ...]


def documents(source: str) -> tuple[list[bytes], list[bytes]]:
    """Documents to train on, and those held out: one in eight, by the CRC-32 of its text.

    Args:
        source: ``"topics"``, ``"library"`` (topics, and docstrings of the standard library), ``"all"`` (those, and the texts of
            installed packages), or a folder of text files.
    """
    if source not in ("topics", "library", "all") and not Path(source).is_dir():
        raise SystemExit(f"--text: expected topics, library, all or a folder of text files, got {source!r}")
    found = dict.fromkeys(text.strip().encode() for text in _texts(source))
    training = [text for text in found if text and zlib.crc32(text) % 8]
    held_out = [text for text in found if text and not zlib.crc32(text) % 8]
    if not training or not held_out:
        raise SystemExit(f"--text {source}: expected documents to train on and to hold out, got {len(found)} in all")
    return training, held_out


def _texts(source: str) -> Iterator[str]:
    if source not in ("topics", "library", "all"):
        yield from map(_read, sorted(path for path in Path(source).rglob("*") if path.suffix in TEXTS))
        return
    yield from (topics[name] for name in sorted(topics))
    if source in ("library", "all"):
        folder = Path(sysconfig.get_path("stdlib"))
        for name in sorted(sys.stdlib_module_names - {"test", "idlelib", "this"}):
            own = [folder / f"{name}.py"] if (folder / f"{name}.py").exists() else sorted((folder / name).glob("*.py"))
            yield from ("\n\n".join(_docstrings(path)) for path in own)
    if source == "all":
        for package in sorted(distributions(), key=lambda package: package.name):
            yield package.metadata.get_payload()
            paths = (Path(package.locate_file(file)) for file in package.files or () if file.suffix in TEXTS)
            yield from map(_read, sorted(path for path in paths if path.exists()))


def _docstrings(path: Path) -> Iterator[str]:
    """Of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(_read(path))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text if isinstance(node, ast.Module) else f"{node.name}\n{text}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


class Stream:
    """Documents in a new order each time around, cut into packs of equal length.

    Args:
        texts: The documents.
        tokens: Tokens of a pack.
        length: Documents are cut at multiples of it; it divides ``tokens``.
        seed: Of the order.
    """

    def __init__(self, texts: list[bytes], tokens: int, length: int, seed: int) -> None:
        self.texts, self.tokens, self.length, self.seed = texts, tokens, length, seed
        self.packs = (sum(len(text) + 1 for text in texts) - 1) // tokens
        if not self.packs:
            raise SystemExit(f"--tokens {tokens}: expected no more than the text's {sum(map(len, texts))} bytes")
        self.round = -1

    def __getitem__(self, number: int) -> Pack:
        """The pack that step ``number`` reads."""
        rounds, place = divmod(number, self.packs)
        if rounds != self.round:
            self._shuffle(rounds)
        start = place * self.tokens
        stop = start + self.tokens
        begins = self.begins[np.searchsorted(self.begins, start) : np.searchsorted(self.begins, stop)] - start
        offsets = np.union1d(begins, np.arange(0, self.tokens + 1, self.length))
        window = self.stream[start : stop + 1].astype(np.int64)
        return Pack(window[:-1], window[1:], tuple(offsets.tolist()))

    def _shuffle(self, rounds: int) -> None:
        order = np.random.default_rng((self.seed, rounds)).permutation(len(self.texts))
        self.stream = np.frombuffer(b"".join(b"\0" + self.texts[i] for i in order), np.uint8)
        self.begins = np.cumsum([0, *(len(self.texts[i]) + 1 for i in order[:-1])])
        self.round = rounds


def part(pack: Pack, number: int, parts: int) -> Pack:
    """One of equal parts of a pack, which begins where documents are cut."""
    tokens = len(pack.inputs) // parts
    start, stop = number * tokens, (number + 1) * tokens
    offsets = tuple(offset - start for offset in pack.offsets if start <= offset <= stop)
    return Pack(pack.inputs[start:stop], pack.targets[start:stop], offsets)
