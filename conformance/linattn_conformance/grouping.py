"""What failed in a report, in few rows: results alike in what was tried and in what came of it, whatever the figures.

Things tried on the same operators and dtypes of which the same came share a row.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["outcome", "rows", "tried"]

Result = Mapping[str, Any]
ORDINARY = frozenset({"plain", "state", "initial", "final", "varlen", "grouped", "scale", "slots"})
"""Flags that leave values, dtypes and layouts as they mostly are."""
MANY = 3
"""A case that is out of the ordinary in more ways is a row of a covering array: of its like, what they share is told."""
VALUES = ("forward", "gradient")
NUMBER = re.compile(r"(?<!\w)\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
SHOWN = 160


def rows(results: Iterable[Result]) -> list[list[str]]:
    """A row a group, the largest first: what was tried, how many cases, of which operators and dtypes, what came, one id."""
    alike: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        what = parts(result["id"])
        alike["" if len(what) > MANY else joined(what), NUMBER.sub("#", line(result))].append(result)
    groups: dict[tuple[str, str, str], dict[str, list[Result]]] = defaultdict(dict)
    for (what, came), group in sorted(alike.items(), key=lambda item: -len(item[1])):
        groups[*_where(group), came][what or shared(group)] = group
    made = [_row(operators, dtypes, group) for (operators, dtypes, _), group in groups.items()]
    return sorted(made, key=lambda row: -int(row[1]))


def _row(operators: str, dtypes: str, group: Mapping[str, Sequence[Result]]) -> list[str]:
    """One row, of results by what was tried."""
    results = [result for part in group.values() for result in part]
    return ["; ".join(group), str(len(results)), operators, dtypes, outcome([*map(line, results)]), f"`{results[0]['id']}`"]


def _where(group: Sequence[Result]) -> tuple[str, str]:
    """The operators and the dtypes of a group."""
    ids = [result["id"].split("/") for result in group]
    forms: dict[str, list[str]] = defaultdict(list)
    for family, form, *_ in ids:
        forms[form] += [] if family in forms[form] else [family]
    operators = "; ".join(f"{form} {', '.join(sorted(families))}" for form, families in sorted(forms.items()))
    return operators, ", ".join(sorted({parts[2] for parts in ids}))


def tried(name: str) -> str:
    """What is out of the ordinary in a case, by its id: flags, and the check unless it compares values."""
    return joined(parts(name))


def parts(name: str) -> list[str]:
    """The same, one by one."""
    *_, flags, _, check = ["", *name.split("/")]
    if "bad-input" in name:
        return ["wrong calls"]
    return [*(flag for flag in flags.split("-") if flag not in ORDINARY), *([] if check in VALUES else [check])]


def joined(found: Sequence[str]) -> str:
    """What is out of the ordinary, in a cell of a table."""
    if found == ["wrong calls"]:
        return found[0]
    return ", ".join(f"`{part}`" for part in found) or "ordinary"


def shared(group: Sequence[Result]) -> str:
    """What all cases of a group have that is out of the ordinary."""
    first, *others = (parts(result["id"]) for result in group)
    return joined([part for part in first if all(part in other for other in others)]).replace("ordinary", "various")


def line(result: Result) -> str:
    """The message on one line, without addresses, which differ in every process."""
    return ADDRESS.sub("0x…", " ".join((result["message"] or result["status"]).split()))


def outcome(messages: Sequence[str]) -> str:
    """Messages that differ in their figures, as one: each figure by its least and largest."""
    texts = NUMBER.split(messages[0])
    figures = [sorted(set(column), key=float) for column in zip(*map(NUMBER.findall, messages), strict=True)]
    ranges = [found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}" for found in figures]
    told = "".join(text + figure for text, figure in zip(texts, [*ranges, ""], strict=True))
    return told if len(told) <= SHOWN else f"{told[: SHOWN - 1]}…"
