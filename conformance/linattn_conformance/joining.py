"""Reports of parts of one run, made at the same time or on several machines, as one report: ``linattn join-reports``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from . import fresh, report, resuming
from .manifest import Manifest
from .runner import Result
from .verdict import cases_of, verdict

__all__ = ["join"]


def join(parts: Sequence[tuple[str, Mapping[str, Any]]], held: Manifest) -> dict[str, Any]:
    """The whole report of parts, each with the name that it has in errors.

    Of a case that several of them ran the first result is taken; a case of the profile that none has is not run. Seconds are
    those of the longest part.

    Raises:
        ValueError: A part was edited, or has two results for a case; or two are not of one subject, suite, place and kind; or
            a case came out differently in two: joining must not be a way to choose; or they have fresh cases of several seeds,
            or none.
    """
    name, first = parts[0]
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for other, part in parts:
        resuming.belongs(other, part, first, f"in {name} it is")
        if len({result["id"] for result in part["results"]}) < len(part["results"]):
            raise ValueError(f"{other}: it has more than one result for a case")
        for result in part["results"]:
            before, had = found.setdefault(result["id"], (other, result))
            if had["status"] not in resuming.HAS_RUN:
                found[result["id"]] = other, result
            elif result["status"] in resuming.HAS_RUN and result["status"] != had["status"]:
                told = f"{had['status']} in {before}, and {result['status']} in {other}"
                raise ValueError(f"{result['id']}: {told}: run it again")
    seeds = fresh.seeds_of(found)
    if len(seeds) != 1:
        raise ValueError(f"the parts have fresh cases of {len(seeds)} seeds, {seeds}: run all of them with the same --seed")
    wanted = [*cases_of(first["profile"], held.applicable(first["framework"], first["device"], first["memory"]))]
    wanted += fresh.wanted(*seeds, first["profile"], first)
    missing = {case: asdict(Result(case, "not-run", message="in none of the parts")) for case in wanted if case not in found}
    results = [dict(result) for _, result in sorted((missing | {case: had for case, (_, had) in found.items()}).items())]
    joined = {key: value for key, value in first.items() if key not in ("verdict", "hash")} | {
        "results": results,
        "results_hash": report.results_hash(results),
        "complaints": list(dict.fromkeys(text for _, part in parts for text in part["complaints"])),
        "seconds": max(part["seconds"] for _, part in parts),
        "selection": [],
        "seeds": seeds,
        "began": min(part["began"] for _, part in parts),
        "ended": max(part["ended"] for _, part in parts),
        "workers": sum(part["workers"] for _, part in parts),
        "variables": report.variables_of([part["variables"] for _, part in parts]),
        "log": report.log_of([part["log"] for _, part in parts]),
        "history": [entry for _, part in parts for entry in part["history"]],
    }
    return report.whole(joined, verdict(joined, held))
