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
    """For the documentation, where the ``*`` of a note is a mark and begins no list."""
    parts = ((f"**{s.title}**", s.note.replace("*", r"\*"), grid(s.head, s.lines)) for s in sections)
    return "\n\n".join("\n\n".join(filter(None, of_one)) for of_one in parts)


def grid(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; all columns after the first are figures or short words, or sentences."""
    cells = [[str(cell) for cell in line] for line in lines]
    rule = ["---" if not place or prose(column) else "---:" for place, column in enumerate(columns(head, cells))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *cells))


def columns(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[Sequence[str]]:
    """The cells of each, its name not among them."""
    return [column for _, *column in zip(head, *lines, strict=True)]


def prose(column: Sequence[str]) -> bool:
    """Whether a column has sentences, which stand at the left, on as many lines as they need."""
    return max(map(len, column), default=0) > SHORT


SHORT = 60
"""Letters of what is no sentence yet."""


def console(section: Section) -> Table:
    """For the terminal, without title and note."""
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns(section.head, section.lines)):
        said = prose(column)
        table.add_column(section.head[place], justify="left" if said or not place else "right", no_wrap=not said)
    for line in section.lines:
        table.add_row(*line)
    return table
