"""How far a command is, for whom it keeps waiting."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.progress import TimeRemainingColumn as Remaining

__all__ = ["bars"]


def bars(console: Console | None = None, *, count: bool = True) -> Progress:
    """Progress bars of rich on a terminal, gone at the end. Where nobody looks, in a log or a pipe, there is nothing at all.

    Args:
        console: Where they are, and what else is printed meanwhile. Default: standard error.
        count: Tell done and total in numbers; else a percentage, where what is counted means nothing to a reader.
    """
    console = console or Console(stderr=True)
    figure = MofNCompleteColumn() if count else TaskProgressColumn()
    columns = TextColumn("{task.description}"), BarColumn(), figure, Elapsed(), Remaining()
    shown = console.file.isatty()  # FORCE_COLOR makes terminals of logs, to rich
    return Progress(*columns, console=console, transient=True, disable=not shown, redirect_stdout=sys.stdout.isatty())
