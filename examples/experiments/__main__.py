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
from pathlib import Path
from typing import Any

import torch
from linattn_benchmarks import rows

from . import pages, runner, smollm, studies
from .record import DOCS, environment, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"studies to run: {', '.join(studies.NAMES)}; none lists them")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the results; with --small a folder of your own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a try of the program: little models, few steps")
    parser.add_argument("--check", action="store_true", help="train a cell of each, drawn at random, again with other seeds")
    parser.add_argument("--write", action="store_true", help="write the list into the documentation, as runs do")
    parser.add_argument(
        "--jobs", type=int, default=1, help="parts that run at a time, each in a process, or on each GPU in a thread; default 1"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="leave what does not end within so many; default none")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in studies.NAMES:
            parser.error(f"unknown study {name!r}: there are {', '.join(studies.NAMES)}")
    if chosen.small and chosen.names and chosen.out == DOCS:
        parser.error("--small is no result: give a folder of your own, e.g. --out /tmp/small")
    if chosen.check:
        agreed = [checked(name, chosen.out, chosen.device) for name in chosen.names]
        sys.exit(not all(agreed))
    runner.run(
        [studies.study(name) for name in chosen.names], chosen.out, chosen.device, chosen.small, chosen.jobs, chosen.seconds
    )
    if chosen.write or (chosen.names and chosen.out == DOCS):
        (DOCS / "studies.table.md").write_text(listing(), encoding="utf-8")
    if not chosen.names:
        print(listing(), end="")


def checked(name: str, folder: Path, device: str) -> bool:
    """Say of one cell of a study, drawn at random, whether it comes out again, and keep it in ``checks.json``."""
    whole = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    found = runner.check(studies.study(name), whole, device, random.Random())
    path = folder / "checks.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    kept[name] = {**found, "versions": environment()}
    record = {"command": "PYTHONPATH=examples python -m experiments NAME ... --check", "results": kept}
    path.write_text(rows.text(record), encoding="utf-8")
    (folder / "checks.table.md").write_text(checks(kept), encoding="utf-8")
    print(f"{name}: {found}")
    return found["agrees"]


def checks(kept: dict[str, Any]) -> str:
    """A table of the cells that were trained again."""
    header = ["study", "cell", "score", "recorded", "again", "within the spread"]

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
