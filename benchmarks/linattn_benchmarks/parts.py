"""What a reader is shown of ``linattn bench parts``: a table for each of :mod:`.parts_timed`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .beside import OURS
from .sections import Section
from .table import memory, milliseconds

Row = dict[str, Any]

SAID = {"fwd": "forward", "bwd": "backward", "fwdbwd": "with backward", "decode": "a token"}


def sections(results: dict[str, Any]) -> list[Section]:
    """A table a part, and what was not timed."""
    rows = results["rows"]
    found = [
        table_of(name, [row for row in rows if row["part"] == name]) for name in dict.fromkeys(row["part"] for row in rows)
    ]
    left = [
        (f"{row['part']} {row['label']}", SAID[row["what"]], row["library"], row["reason"]) for row in rows if row["reason"]
    ]
    return [each for each in found if each.lines] + (
        [Section("Not timed", ("part", "what", "library", "reason"), left)] if left else []
    )


def table_of(name: str, rows: Sequence[Row]) -> Section:
    """Shapes down, libraries across: the share of a copy's bandwidth where that is the bound, else time and memory."""
    timed = [row for row in rows if row["ms"] is not None]
    libraries = list(dict.fromkeys(row["library"] for row in timed))
    copied = any(row["share"] is not None for row in timed)
    cells = {(row["label"], row["dtype"], row["what"], row["library"]): row for row in timed}
    lines = []
    for label, dtype, what in dict.fromkeys(key[:3] for key in cells):
        mine = [cells.get((label, dtype, what, library)) for library in libraries]
        shown = [shown_of(row, copied) for row in mine]
        ratios = [] if copied else ratio_of(mine)
        lines.append((label, dtype, SAID[what], *itertools.chain.from_iterable(shown), *ratios))
    columns = [f"{library}, {each}" for library in libraries for each in (("ms", "share") if copied else ("ms", "memory"))]
    others = [] if copied else [f"over {library}" for library in libraries[1:]]
    note = "Share: bytes that must move, over those that a copy moves in the time." if copied else ""
    return Section(name, ("shape", "dtype", "", *columns, *others), lines, note)


def shown_of(row: Row | None, copied: bool) -> tuple[str, str]:
    """Two cells of a library."""
    if row is None:
        return "–", "–"
    wrong = " (wrong)" if row["status"] == "wrong" else ""
    last = f"{row['share']:.0%}" if copied else "–" if row["peak_bytes"] is None else memory(row["peak_bytes"])
    return milliseconds(row["ms"]) + wrong, last


def ratio_of(rows: Sequence[Row | None]) -> list[str]:
    """Time of the first over that of each other."""
    first, *others = rows
    return ["–" if first is None or other is None else f"{first['ms'] / other['ms']:.2f}" for other in others]


def succeeded(results: dict[str, Any]) -> bool:
    """Something of linattn's was timed, and nothing of it is wrong or failed."""
    ours = [row for row in results["rows"] if row["library"].startswith(OURS)]
    return any(row["status"] == "ok" for row in ours) and not any(row["status"] in ("wrong", "failed") for row in ours)
