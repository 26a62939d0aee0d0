"""What an unknown name may have been meant to be."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

__all__ = ["closest"]


def closest(name: str, known: Iterable[str]) -> str | None:
    """The name most like an unknown one, if any is like it. Of two that are alike, the one with the same beginning.

    >>> closest("elu", ["relu", "elu1"])
    'elu1'
    """

    def likeness(other: str) -> tuple[float, int]:
        return difflib.SequenceMatcher(None, other, name).ratio(), len(os.path.commonprefix([other, name]))

    known = list(known)
    return max(difflib.get_close_matches(name, known, n=max(len(known), 1)), key=likeness, default=None)
