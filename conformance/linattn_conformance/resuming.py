"""Going on with a run that was cut short, on another day if need be: its report says what has been run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import known_failures, reading
from .runner import Result

__all__ = ["HAS_RUN", "NONE", "Earlier", "belongs", "read"]

SAME = (
    "suite", "api", "backend", "digests", "packages", "framework", "device", "memory", "versions", "environment", "profile",
    "tighten", "manifest",
)  # fmt: skip
"""What must be as it was, for the results to belong together."""
HAS_RUN = ("passed", "failed", "declared-unsupported")


@dataclass(frozen=True)
class Earlier:
    """What a run before this one found.

    Attributes:
        results: Of the cases that were run.
        complaints: What went wrong in no case, as text; but for those of the list of known failures, which the whole run is
            held against again.
        seconds: How long it took.
        history: Its own history.
        replaced: Results of cases that are to be run once more.
        log: The digest of its log.
        began: When it began.
        workers: How many processes it had.
        variables: Its environment variables that matter.
    """

    results: tuple[Result, ...] = ()
    complaints: tuple[str, ...] = ()
    seconds: float = 0.0
    history: tuple[Mapping[str, Any], ...] = ()
    replaced: tuple[Mapping[str, Any], ...] = ()
    log: str = ""
    began: str = ""
    workers: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)


NONE = Earlier()


def read(path: Path, here: Mapping[str, Any], again: Sequence[str] = (), wanted: Collection[str] = ()) -> Earlier:
    """The earlier run, of which ``path`` is the report; ``here`` is an empty report of this one.

    Results of ids that match one of ``again`` are left out, as if they had not been run; all of these must be ``wanted``.

    Raises:
        ValueError: It was edited; or the two are not of one subject, suite, place and kind, so that their results do not belong
            together; or a pattern of ``again`` matches no result, or one that is not to be run.
    """
    report = reading.read(path)
    belongs(f"--resume {path}", report, here, "here it is")
    dropped: set[str] = set()
    for pattern in again:
        matched = [result["id"] for result in report["results"] if fnmatchcase(result["id"], pattern)]
        if not matched:
            raise ValueError(f"--again {pattern}: no result in {path} matches")
        if outside := [name for name in matched if name not in wanted]:
            raise ValueError(f"--again {pattern}: {outside[0]} is not among the cases of this run")
        dropped.update(matched)
    results = [Result(**result) for result in report["results"] if result["status"] in HAS_RUN and result["id"] not in dropped]
    complaints = [text for text in report["complaints"] if not text.startswith(known_failures.COMPLAINT)]
    replaced = tuple(result for result in report["results"] if result["id"] in dropped)
    return Earlier(
        tuple(results),
        tuple(complaints),
        report["seconds"],
        tuple(report["history"]),
        replaced,
        report["log"],
        report["began"],
        report["workers"],
        report["variables"],
    )


def belongs(what: str, report: Mapping[str, Any], other: Mapping[str, Any], there: str) -> None:
    """Check that a report was not edited, and that its results belong together with those of another.

    Raises:
        ValueError: Otherwise; the text begins with ``what`` it is, and has ``there`` before what the other says.
    """
    for edit in reading.edits(report):
        raise ValueError(f"{what}: {edit}")
    for name in SAME:
        mine, theirs = apart(report.get(name), other.get(name))
        if mine != theirs:
            raise ValueError(f"{what}: its {name} is {mine!r}, and {there} {theirs!r}")


def apart(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values; of two mappings what they do not share."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return a, b
    return {key: a[key] for key in a if (key, a[key]) not in b.items()}, {
        key: b[key] for key in b if (key, b[key]) not in a.items()
    }
