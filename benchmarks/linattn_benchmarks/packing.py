"""Sequences packed end to end: their lengths as text, and a short name of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

FEW = 4
"""Sequences of different lengths that a name still spells out."""


def parsed(text: str) -> tuple[int, ...]:
    """``"4096+28672"`` or ``"8x1024"``: the lengths; ``ValueError`` for anything but positive whole numbers."""
    lengths: list[int] = []
    for part in text.split("+"):
        count, times, length = part.rpartition("x")
        if not all(number.isdecimal() and int(number) > 0 for number in (count if times else "1", length)):
            raise ValueError(f"expected lengths such as 4096+28672 or 8x1024, got {text!r}")
        lengths += [int(length)] * int(count or 1)
    return tuple(lengths)


def spelled(lengths: Sequence[int]) -> str:
    """The inverse of :func:`parsed`, equal neighbours counted."""
    runs = [(length, len(list(group))) for length, group in itertools.groupby(lengths)]
    return "+".join(f"{count}x{length}" if count > 1 else f"{length}" for length, count in runs)


def name(lengths: Sequence[int]) -> str:
    """``"8x1024"`` for equal lengths, else ``"4096+28672"``, or ``"8 in 32768"`` where there are many."""
    if len(set(lengths)) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    return spelled(lengths) if len(lengths) <= FEW else f"{len(lengths)} in {sum(lengths)}"
