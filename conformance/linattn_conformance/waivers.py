"""Cases of which a fault of the suite is known: they count neither for a backend nor against it.

A waiver is the suite's, whatever the backend: ``waivers/<suite version>.toml`` lists them::

    [[waiver]]
    pattern = "short_conv/direct/bf16/*/T0-*/gradient"
    reason = "the bound of an empty sum is zero, and its rounding is not"
    link = "https://example.com/issues/17"

What a vendor knows to be wrong in a backend is a known failure, which is another thing (:mod:`.known_failures`).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

__all__ = ["Waiver", "load", "of"]

FOLDER = Path(__file__).parent / "waivers"
KEYS = {"pattern", "reason", "link"}


@dataclass(frozen=True)
class Waiver:
    """One fault of the suite.

    Attributes:
        pattern: The ids, as in a shell.
        reason: What is wrong with them.
        link: Where that is followed.
    """

    pattern: str
    reason: str
    link: str


@functools.cache
def load(suite: str) -> tuple[Waiver, ...]:
    """The waivers of a version of the suite.

    Raises:
        ValueError: The list is wrong.
    """
    path = FOLDER / f"{suite}.toml"
    return read(path) if path.exists() else ()


def read(path: Path) -> tuple[Waiver, ...]:
    """The waivers of a file.

    Raises:
        ValueError: It is no list of waivers.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: no TOML: {error}") from None
    if unknown := found.keys() - {"waiver"}:
        raise ValueError(f"{path}: expected tables [[waiver]], got {', '.join(sorted(unknown))}")
    for number, entry in enumerate(found.get("waiver", []), 1):
        if entry.keys() != KEYS or not all(isinstance(value, str) and value for value in entry.values()):
            raise ValueError(f"{path}: waiver {number}: expected the texts {', '.join(sorted(KEYS))}, got {', '.join(entry)}")
    return tuple(Waiver(**entry) for entry in found.get("waiver", []))


def of(report: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of the cases that the waivers of a report's suite are about."""
    listed = load(report.get("suite", ""))
    return [name for name in names if any(fnmatchcase(name, waiver.pattern) for waiver in listed)]
