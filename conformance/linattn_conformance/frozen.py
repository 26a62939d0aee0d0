"""Versions of the suite that are released: what belongs to one of them does not change any more.

The suite has a version of its own, apart from that of the API: the API can be released again with the same suite, and the suite
with the same API. ``frozen.json`` holds the hash of each released version's manifest; a release adds a line. From then on the
first change of a case needs a new version.
"""

from __future__ import annotations

import json
from pathlib import Path

from .manifest import Manifest

__all__ = ["complaint", "versions"]

PATH = Path(__file__).parent / "frozen.json"


def versions() -> dict[str, str]:
    """The hash of the manifest of each released version."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def complaint(held: Manifest) -> str:
    """Why a manifest cannot be that of its version; empty if it can."""
    frozen = versions().get(held.suite)
    if frozen in (None, held.hash):
        return ""
    released, here = frozen[:12], held.hash[:12]
    return f"suite {held.suite} is released, and its manifest has the hash {released}…, not {here}…: raise SUITE_VERSION"
