"""What an unknown name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["closest"]


def closest(name: str, known: Iterable[str]) -> str | None:
    """The name most like an unknown one, if any is like it. Of two that are alike, the one with the same first letter.

    >>> closest("elu", ["relu", "elu1"])
    'elu1'
    """

    def likeness(other: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, other, name).ratio(), other[:1] == name[:1]

    known = list(known)
    return max(difflib.get_close_matches(name, known, n=max(len(known), 1)), key=likeness, default=None)
