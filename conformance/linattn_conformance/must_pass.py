"""The lists of what a profile demands, as files: ``<suite version>/<profile>.txt``, an id a line.

``python -m linattn_conformance.must_pass FOLDER`` writes those of this suite from its manifest; a release has them beside its
wheel. They are of all frameworks and devices; which of their cases are for one of these, ``linattn conformance --list`` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from . import manifest
from .manifest import Manifest
from .verdict import PROFILES, cases_of

__all__ = ["lists", "write"]


def lists(held: Manifest) -> Iterator[tuple[str, list[str]]]:
    """Each profile and its ids in order."""
    for profile in PROFILES:
        yield profile, sorted(cases_of(profile, held.entries))


def write(folder: Path, held: Manifest) -> list[Path]:
    """Write the lists of a manifest into the folder of its version."""
    made: list[Path] = []
    for profile, ids in lists(held):
        path = folder / held.suite / f"{profile}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")
        made.append(path)
    return made


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m linattn_conformance.must_pass FOLDER")
    print(*(f"wrote {path}" for path in write(Path(sys.argv[1]), manifest.load())), sep="\n")
