"""The table of faults and the cases that catch them: ``python -m linattn_conformance.broken.table docs/conformance-faults.md``.

Between ``<!-- faults -->`` and ``<!-- end -->`` of the page stands what :func:`table` makes of a trial of every fault.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .trial import Trial, every_fault, try_backend

__all__ = ["fill", "table", "what"]

BLOCK = re.compile(r"(<!-- faults -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = "| fault | what is wrong | caught by | for example | checks |\n| --- | --- | ---: | --- | --- |"


def what(kind: Any) -> str:
    """What is wrong with a backend, in a line."""
    return (kind.__doc__ or "").partition("\n")[0]


def row(kind: Any, trial: Trial) -> str:
    """The line of one fault."""
    cells = [f"`{kind.name}`", what(kind), *caught(trial)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def caught(trial: Trial) -> tuple[str, str, str]:
    """How many cases catch it, one of them, and what these cases check."""
    if trial.refused:
        return "the registry", trial.refused.partition("\n")[0], ""
    if not trial.failed:
        return "the verdict", trial.reason.partition(": ")[2] or trial.reason, ""
    checks = Counter(result.id.rpartition("/")[2] for result in trial.failed)
    count = str(len(trial.failed)) if len(trial.failed) > 1 else "**one case**"
    return count, f"`{trial.failed[0].id}`", ", ".join(f"{check} {n}" for check, n in checks.most_common())


def table(faults: list[Any]) -> str:
    """The table of these faults; every case of each is run."""
    rows = []
    for kind in faults:
        trial = try_backend(kind, enough=None)
        assert trial.rejected, kind.name
        rows.append(row(kind, trial))
        print(rows[-1], flush=True)
    single = sum("**one case**" in row for row in rows)
    return f"\n{HEAD}\n" + "\n".join(rows) + f"\n\n{len(rows)} faults; {single} of them are caught by one case only.\n\n"


def fill(text: str, body: str) -> str:
    """The page with its table made again."""
    return BLOCK.sub(lambda block: block[1] + body + block[2], text)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fill(path.read_text(encoding="utf-8"), table(every_fault())), encoding="utf-8")
