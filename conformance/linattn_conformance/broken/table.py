"""The table of faults and what catches them: ``python -m linattn_conformance.broken.table docs/conformance-faults.md``.

Between ``<!-- faults -->`` and ``<!-- end -->`` of the page stands what :func:`table` makes of a trial of every fault. What the
page names already is tried first, so that a case stays as long as it catches its fault; else it is the plainest that does.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from .trial import Trial, every_fault, try_backend

__all__ = ["Row", "fill", "read", "table", "tried", "what"]

BLOCK = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = "| fault | what is wrong | caught by | which says |\n| --- | --- | --- | --- |"
REGISTRY, VERDICT = "the registry", "the verdict"
SHOWN = 100
"""Characters of what is said."""

Row = tuple[str, str, str, str]
"""The name of a fault, what is wrong, what catches it, and what that says."""


def what(kind: Any) -> str:
    """What is wrong with a backend, in a line."""
    return (kind.__doc__ or "").partition("\n")[0]


def row(kind: Any, trial: Trial) -> Row:
    """The line of one fault."""
    by, says = caught(trial)
    says = says.partition("\n")[0]
    return f"`{kind.name}`", what(kind), by, says if len(says) <= SHOWN else f"{says[: SHOWN - 1]}…"


def caught(trial: Trial) -> tuple[str, str]:
    """What catches it, and what that says."""
    if trial.refused:
        return REGISTRY, trial.refused
    if trial.failed is None:
        return VERDICT, trial.reason.partition(": ")[2] or trial.reason
    return f"`{trial.failed.id}`", trial.failed.message


def tried(kind: Any, by: str = "") -> Trial:
    """Try a fault that this caught last, as a :data:`Row` has it.

    A verdict needs the results of a whole profile: the core's, if it was the verdict before.
    """
    return try_backend(kind, profile="core" if by == VERDICT else "full", first=by.strip("`"))


def table(faults: list[Any], before: dict[str, Row]) -> str:
    """The table of these faults, which has what it had ``before`` wherever that still holds."""
    lines: list[str] = []
    for kind in faults:
        name = f"`{kind.name}`"
        was = before[name][2] if name in before else ""
        trial = tried(kind, was)
        assert trial.rejected, kind.name
        by = caught(trial)[0]
        if by != was and caught(tried(kind, by))[0] != by:
            raise ValueError(f"{kind.name}: {by} catches it after other cases only: name one in the page that does by itself")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row(kind, trial))} |")
        print(lines[-1], flush=True)
    return "\n" + "\n".join([HEAD, *lines]) + "\n\n"


def read(text: str) -> dict[str, Row]:
    """The rows of a page by their first cells."""
    block = BLOCK.search(text)
    rows = [
        tuple(cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        for line in (block[0].splitlines() if block else [])
        if line.startswith("| `")
    ]
    return {name: (name, wrong, by, says) for name, wrong, by, says in rows}


def fill(text: str, body: str) -> str:
    """The page with its table made again."""
    return BLOCK.sub(lambda block: block[1] + body + block[2], text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    page = path.read_text(encoding="utf-8")
    path.write_text(fill(page, table(every_fault(), read(page))), encoding="utf-8")
