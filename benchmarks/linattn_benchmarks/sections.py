"""Tables of a report as data, so that the terminal, a Markdown page and an HTML page show the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table


class Section(NamedTuple):
    """One table.

    Attributes:
        title: What it shows.
        head: Names of the columns; those after the first hold figures or short words.
        lines: Cells, already text.
        note: What a reader must know, under the title.
    """

    title: str
    head: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]
    note: str = ""


Heatmap = tuple[str, Sequence[str], Sequence[str], Mapping[tuple[str, str], float]]
"""Title, lines, columns, and the ratio in each field."""


def markdown(sections: Iterable[Section]) -> str:
    """For the documentation."""
    return "\n\n".join("\n\n".join(filter(None, (f"**{s.title}**", s.note, grid(s.head, s.lines)))) for s in sections)


def grid(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns after the first are figures or short words."""
    rule = ("---", *["---:"] * (len(head) - 1))
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, rule, *lines))


def console(section: Section) -> Table:
    """For the terminal, without title and note."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(section.head):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for line in section.lines:
        table.add_row(*line)
    return table
