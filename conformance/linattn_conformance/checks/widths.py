"""Calls of many widths in turn, each with a truth of its own, where that is cheap."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..calls import Run
from ..cases import problem
from ..factors import group_size
from ..parts import dealt
from . import values
from .parts import each

__all__ = ["widths", "widths_backward"]

EAGER, COMPILED = 40, 4
"""So many widths, by whether a call at new sizes is compiled first."""
MOST = 300


def widths(run: Run) -> None:
    """Outputs of every width are right."""
    each(run, of_many_widths(run), lambda one, i: values.forward(one))


def widths_backward(run: Run) -> None:
    """So are gradients."""
    each(run, of_many_widths(run), lambda one, i: values.gradient(one))


class Wide(Run):
    """A run whose width is told in what it complains of."""

    def note(self, name: str, ratio: Any) -> None:
        super().note(f"{name} of the width {self.case.size['D']}", ratio)


def of_many_widths(run: Run) -> Iterator[tuple[str, Run]]:
    """The call at one width after the other."""
    group = group_size(run.case.flags)
    begun = zlib.crc32(repr(problem(run.case)).encode()) % (2 * MOST)
    for turn in range(EAGER if run.adapter.eager else COMPILED):
        D = group * dealt(run.case, "D", begun + turn, 1, MOST // group)
        case = replace(run.case, sizes=tuple({**run.case.size, "D": D}.items()))
        yield f"of the width {D}", Wide(case, run.adapter, run.backend, run.witness, run.tighten)
