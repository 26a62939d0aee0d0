"""English about programming that packages carry: what a language model is finetuned on, and what is held out."""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

LONG = 200
"""The least number of characters of a docstring that is read."""
RUN = 13
"""So many words in a row that are held out too are a quotation."""
LETTERS = 0.8
"""The least share of letters and white space in a file that is prose."""


class Tokens(NamedTuple):
    """Streams to train on and held out, and the names of what was read below ``--documents``."""

    training: np.ndarray
    held_out: np.ndarray
    documents: str


def tokens(encode: Callable[[str], list[int]], kept: str, packages: str, documents: str) -> Tokens:
    """Streams of tokens with a symbol of the model's between texts, read from the file ``kept`` if that is there.

    Otherwise the text is that of the Python and the packages that are installed, and of a folder of documents, and is kept in
    that file, if one is named.
    """
    if kept and Path(kept).exists():
        return read(kept, packages, documents)
    streams = [
        np.array([token for text in texts(part, packages, documents) for token in (0, *encode(text))], dtype=np.uint16)
        for part in (False, True)
    ]
    found = Tokens(*streams, names(documents))
    if kept:
        of = {"packages": packages, "python": platform.python_version(), "numpy": np.__version__}
        np.savez_compressed(kept, **found._asdict(), **of)
    return found


def read(kept: str, packages: str, documents: str) -> Tokens:
    """What a file has, which must be of these packages, and of the folder of documents if that is on this host."""
    with np.load(kept) as saved:
        if str(saved["packages"]) != packages:
            raise SystemExit(f"{kept} has the text of --packages {saved['packages']}, not {packages}")
        if documents and Path(documents).is_dir() and str(saved["documents"]) != (there := names(documents)):
            raise SystemExit(
                f"{kept} has the text of --documents with {saved['documents'] or 'nothing'}, not with {there or 'nothing'}"
            )
        return Tokens(saved["training"], saved["held_out"], str(saved["documents"]))


def names(documents: str) -> str:
    """Of what is in a folder of documents."""
    return ";".join(sorted(path.name for path in Path(documents).iterdir())) if documents else ""


def texts(held_out: bool, packages: str = "numpy", documents: str = "") -> list[str]:
    """English about Python: some of its topics, held out whole, or the others and docstrings, of its library and of packages.

    A paragraph, compared without its white space, that is held out or came before is left out of what is trained on; one of
    ``documents``, a folder of unpacked archives, also if it quotes what is held out.
    """
    kept = [text for name, text in sorted(topics.items()) if (zlib.crc32(name.encode()) % 4 == 0) == held_out]
    if held_out:
        return kept
    scored = texts(held_out=True)
    seen = {plain(paragraph) for text in scored for paragraph in text.split("\n\n")}
    folders = [Path(sysconfig.get_path("stdlib")), *map(folder_of, packages.split(";"))]
    kept += [text for folder in folders for text in docstrings(folder)]
    if documents:
        quoted = {run for text in scored for run in runs(text)}
        kept += [unquoted(text, quoted) for archive in sorted(Path(documents).iterdir()) for text in written(archive)]
    fresh = ("\n\n".join(unseen(text, seen)) for text in kept)
    return [text for text in fresh if text]


def folder_of(package: str) -> Path:
    """Where a package is installed."""
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"--packages names {package}, which is no package that is installed")
    return Path(found.submodule_search_locations[0])


def unseen(text: str, seen: set[str]) -> Iterator[str]:
    """Paragraphs that are not in ``seen``, which takes them in."""
    for paragraph in text.split("\n\n"):
        if plain(paragraph) not in seen:
            seen.add(plain(paragraph))
            yield paragraph


def plain(paragraph: str) -> str:
    return " ".join(paragraph.split())


def runs(text: str) -> set[tuple[str, ...]]:
    """All :data:`RUN` words in a row, without case and markup."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def unquoted(text: str, quoted: set[tuple[str, ...]]) -> str:
    """Paragraphs with none of the runs of words in ``quoted``."""
    return "\n\n".join(paragraph for paragraph in text.split("\n\n") if quoted.isdisjoint(runs(paragraph)))


def written(folder: Path) -> Iterator[str]:
    """Pages that are mostly letters, by the endings of their files, and docstrings."""
    for path in sorted(path for ending in ("rst", "txt", "md") for path in folder.rglob(f"*.{ending}")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if sum(map(of_a_word, text)) >= LETTERS * max(len(text), LONG):
            yield text
    yield from docstrings(folder)


def of_a_word(character: str) -> bool:
    return character.isascii() and (character.isalpha() or character.isspace())


def docstrings(folder: Path) -> Iterator[str]:
    """Those of :data:`LONG` characters and more, tests left out."""
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests", "site-packages", "dist-packages", "pydoc_data"}.isdisjoint(path.relative_to(folder).parts):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue  # templates, other encodings, and examples of what is wrong
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= LONG:
                        yield text
