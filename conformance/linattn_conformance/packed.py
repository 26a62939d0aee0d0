"""Text files, compressed if their name ends in ``.gz``: a report has a line for each of some thousand cases."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

__all__ = ["is_replaced", "read", "write"]


def read(path: Path) -> str:
    """The text of a file.

    Raises:
        OSError: It cannot be read, or what is in a ``.gz`` is not what gzip writes.
        EOFError: A ``.gz`` ends too soon.
        zlib.error: A ``.gz`` is damaged.
    """
    found = path.read_bytes()
    return (gzip.decompress(found) if path.suffix == ".gz" else found).decode("utf-8")


def write(path: Path, text: str) -> None:
    """Write a file; equal texts give equal bytes, whenever they are written. Until all is written, what was there stays."""
    given = text.encode("utf-8")
    given = gzip.compress(given, mtime=0) if path.suffix == ".gz" else given
    if not is_replaced(path):
        path.write_bytes(given)
        return
    place = path.resolve()
    part = place.with_name(f"{place.name}.part")
    part.write_bytes(given)
    os.replace(part, place)


def is_replaced(path: Path) -> bool:
    """True for what is written as a whole: a file, there or to be, and no pipe or terminal."""
    return path.is_file() or not path.exists()
