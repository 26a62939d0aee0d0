"""The lists of what a profile demands, as files: ``must_pass/<suite version>/<profile>.txt.gz``, an id a line.

``python -m linattn_conformance.must_pass`` writes them again from the manifest. They are of all frameworks and devices; which
of their cases are for one of these, ``linattn conformance --list`` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import manifest, packed
from .manifest import SUITE_VERSION, Manifest
from .verdict import PROFILES, cases_of

__all__ = ["lists", "path_of", "read", "write"]

FOLDER = Path(__file__).parent / "must_pass"


def path_of(profile: str, suite: str = SUITE_VERSION) -> Path:
    """Where the list of a profile lies."""
    return FOLDER / suite / f"{profile}.txt.gz"


def lists(held: Manifest) -> Iterator[tuple[str, list[str]]]:
    """Each profile and its ids in order."""
    for profile in PROFILES:
        yield profile, sorted(cases_of(profile, held.entries))


def read(profile: str, suite: str = SUITE_VERSION) -> list[str]:
    """The ids of a list.

    Raises:
        ValueError: There is no list of this profile, or of this version of the suite.
    """
    path = path_of(profile, suite)
    if not path.exists():
        known = ", ".join(sorted(found.name for found in FOLDER.iterdir() if found.is_dir()))
        raise ValueError(f"no list for profile {profile!r} of suite {suite}: there are {', '.join(PROFILES)} of {known}")
    return packed.read(path).splitlines()


def write() -> list[Path]:
    """Write the lists of this suite again."""
    made: list[Path] = []
    for profile, ids in lists(manifest.load()):
        path = path_of(profile)
        path.parent.mkdir(parents=True, exist_ok=True)
        packed.write(path, "".join(f"{name}\n" for name in ids))
        made.append(path)
    return made


if __name__ == "__main__":
    print(*(f"wrote {path}" for path in write()), sep="\n")
