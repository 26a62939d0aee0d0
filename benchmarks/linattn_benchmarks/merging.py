"""Results files of several runs as one, for ``linattn bench report``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from linattn.errors import OptionError

from . import beside, reports
from .environment import read

Row = dict[str, Any]


def to_report(path: Path) -> dict[str, Any]:
    """A results file that ``report`` can show."""
    content = read(path)
    found = content.get("benchmark")
    if found in reports.SECTIONS:
        return content
    if found != "operators":
        known = ", ".join(("operators", *reports.SECTIONS))
        raise OptionError(f"{path}: report shows results files of {known}, and this is one of {found}")
    if damaged(content):
        raise OptionError(f"{path}: expected what linattn bench --out writes: parts of its environment or rows are missing")
    return content


OF_ENVIRONMENT = {"packages", "cores", "load"}
OF_ROW = {"operator", "what", "library", "backend", "case", "label", "status", "ms", "graph_ms", "floor", "ratio", "error"}


def damaged(content: dict[str, Any]) -> bool:
    """Whether something is missing that every results file of operators has."""
    try:
        rows, environment = content["results"]["rows"], content["environment"]
        whole = "ceilings" in content["results"] and environment.keys() >= OF_ENVIRONMENT
        return not (whole and all(row.keys() >= OF_ROW for row in rows))
    except (KeyError, TypeError, AttributeError):
        return True


def merged(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Rows of several runs in one environment, but for how busy the machine was; of two of one call, as :func:`both` has it."""
    kinds = list(dict.fromkeys(file["benchmark"] for file in files.values()))
    first, *_ = files.values()
    if len(files) == 1 and kinds[0] in reports.SECTIONS:
        return first
    if len(kinds) > 1 or kinds[0] not in CALLS:
        raise OptionError(
            f"report: expected results files of one of {', '.join(CALLS)}, or one file of {', '.join(reports.SECTIONS)}; "
            f"got {', '.join(kinds)}"
        )
    environment = shared({name: file["environment"] for name, file in files.items()})
    rows = joined((row for file in files.values() for row in file["results"]["rows"]), CALLS[kinds[0]])
    return first | {"environment": environment, "results": first["results"] | {"rows": rows} | tuned(files.values())}


def tuned(files: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The settings of runs whose autotuners chose among different numbers of configurations: all of these; else nothing."""
    settings = [file["results"]["settings"] for file in files if "tune" in file["results"].get("settings", {})]
    each = [of["tune"] if isinstance(of["tune"], list) else [of["tune"]] for of in settings]
    numbers = list(dict.fromkeys(itertools.chain(*each)))
    return {"settings": settings[0] | {"tune": numbers}} if len(numbers) > 1 else {}


OF_A_RUN = ("load", "cores", "packages")
"""What of its environment belongs to one run, and may be another's otherwise."""


def shared(environments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The environment of all, as busy as the busiest, with the fewest cores that one of them was held to.

    A package that only some had installed is one of it.
    """
    said: dict[str, tuple[Any, str]] = {}
    for path, environment in environments.items():
        one = {name: value for name, value in environment.items() if name not in OF_A_RUN} | environment["packages"]
        for name, value in one.items():
            before, where = said.setdefault(name, (value, path))
            if value != before:
                raise OptionError(
                    f"report: {path} comes from another environment than {where}: {name} is {value}, not {before}"
                )
    every = list(environments.values())
    packages = {name: version for environment in every for name, version in environment["packages"].items()}
    loads = [environment["load"] for environment in every if environment["load"] is not None]
    cores = min(environment["cores"] for environment in every)
    return every[0] | {"packages": packages, "cores": cores, "load": max(loads, default=None)}


ONCE = ("first_call_s", "peak_bytes", "peak_of")
"""What a run may have left to another one."""
COUNTS = ("wrong", "ok", "failed", "skipped")
"""Of two rows of one call, the one whose status comes first here is shown: nothing makes up for a wrong result."""


def joined(rows: Iterable[Row], call_of: Callable[[Row], tuple[Any, ...]]) -> list[Row]:
    """One row for each call."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        call = call_of(row)
        found[call] = both(found[call], row) if call in found else row
    return list(found.values())


CALLS: dict[str, Callable[[Row], tuple[Any, ...]]] = {
    "operators": lambda row: (row["library"], row["backend"], json.dumps(row["case"] | {"seed": None}, sort_keys=True)),
    "parts": lambda row: tuple(row[name] for name in ("part", "label", "dtype", "what", "library")),
    **dict.fromkeys(beside.BENCHMARKS, beside.call_of),
}
"""What is one call, of the benchmarks of which several files can be shown as one."""


def both(first: Row, second: Row) -> Row:
    """The one that counts of two rows of one call; a right one also has what the other knows of first call and memory."""
    if first["status"] == second["status"] == "ok":
        return first | {name: second[name] for name in ONCE if name in first and first[name] is None}
    return min(first, second, key=lambda row: COUNTS.index(row["status"]))
