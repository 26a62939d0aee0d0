"""Experiments on the papers' claims.

``PYTHONPATH=examples python -m experiments`` lists the studies with their state and cost; with the names of some it runs
those, ``--small`` to try them in seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from linattn_benchmarks import rows

from . import pages, runner, smollm, studies
from .batched import OutOfTime
from .checks import CHECKS
from .record import DOCS, environment, table

ALL = "all"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"studies to run: {', '.join(studies.NAMES)}; all of them: {ALL}; none lists them",
    )
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the results; with --small a folder of your own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a try of the program: little models, few steps")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"work a cell of each out again, drawn at random, by other seeds; also of {', '.join(CHECKS)}",
    )
    parser.add_argument("--write", action="store_true", help="write the list into the documentation, as runs do")
    parser.add_argument(
        "--jobs", type=int, default=1, help="parts that run at a time, each in a process, or on each GPU in a thread; default 1"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave what does not end within so many; default none")
    chosen = parser.parse_args()
    chosen.names = list(studies.NAMES) if chosen.names == [ALL] else chosen.names
    for name in chosen.names:
        if name not in studies.NAMES and not (chosen.check and name in CHECKS):
            others = f", and to --check {', '.join(CHECKS)}" if chosen.check else ""
            parser.error(f"unknown study {name!r}: there are {', '.join(studies.NAMES)}{others}")
    if chosen.small and chosen.names and chosen.out == DOCS:
        parser.error("--small is no result: give a folder of your own, e.g. --out /tmp/small")
    if chosen.check:
        deadline = time.time() + chosen.seconds
        agreed = [checked(name, chosen.out, chosen.device, deadline) for name in chosen.names]
        sys.exit(not all(agreed))
    runner.run(
        [studies.study(name) for name in chosen.names], chosen.out, chosen.device, chosen.small, chosen.jobs, chosen.seconds
    )
    if chosen.write or (chosen.names and chosen.out == DOCS):
        (DOCS / "studies.table.md").write_text(listing(), encoding="utf-8")
    if not chosen.names:
        print(listing(), end="")


def checked(name: str, folder: Path, device: str, deadline: float = math.inf) -> bool:
    """Say of one cell of a table, drawn at random, whether it comes out again, and keep it in ``checks.json``.

    The table is that of the folder, or else of the documentation.
    """
    whole, draw = json.loads(existing(folder, f"{name}.json").read_text(encoding="utf-8")), random.Random()
    try:
        found = (
            CHECKS[name](whole, draw) if name in CHECKS else runner.check(studies.study(name), whole, device, draw, deadline)
        )
    except OutOfTime as late:
        print(f"{name}: not within the time that was given: {late}")
        return False
    path = existing(folder, "checks.json")
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    kept[name] = {**found, "versions": environment()}
    record = {"command": "PYTHONPATH=examples python -m experiments NAME ... --check", "results": kept}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checks.json").write_text(rows.text(record), encoding="utf-8")
    (folder / "checks.table.md").write_text(checks(kept), encoding="utf-8")
    print(f"{name}: {found}")
    return found["agrees"]


def existing(folder: Path, name: str) -> Path:
    """A file of the folder, or else of the documentation."""
    return path if (path := folder / name).exists() else DOCS / name


def checks(kept: dict[str, Any]) -> str:
    """A table of the cells that were worked out again."""
    header = ["table", "cell", "score", "recorded", "again", "agrees"]

    def line(name: str, of: dict[str, Any]) -> tuple[str, ...]:
        cell = ", ".join(part for part in (of["model"], of["setting"]) if part)
        again = pages.spread(of["again"]) or "not finite"
        return name, cell, of["score"], pages.spread(of["recorded"]), again, "yes" if of["agrees"] else "no"

    return table(header, [line(name, of) for name, of in kept.items()])


def listing() -> str:
    """A table of the studies: what each asks, its GPU minutes, and its state."""
    of = [studies.study(name) for name in studies.NAMES]
    lines = [(s.name, s.question, *pages.pace(s), pages.state(s, pages.saved(s)).replace("*", "")) for s in of]
    lines.append(("smollm", smollm.QUESTION, *smollm.pace(), smollm.state()))
    return table(["study", "question", "GPU minutes", "left", "state"], lines)


if __name__ == "__main__":
    main()
