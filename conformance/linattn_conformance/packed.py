"""Text files, compressed if their name ends in ``.gz``: a report has a line for each of some thousand cases."""

from __future__ import annotations

import gzip
from pathlib import Path

__all__ = ["read", "write"]


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
    """Write a file; equal texts give equal bytes, whenever they are written."""
    given = text.encode("utf-8")
    path.write_bytes(gzip.compress(given, mtime=0) if path.suffix == ".gz" else given)
