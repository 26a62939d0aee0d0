"""What changed from one report to another: ``linattn compare-reports``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Change", "Comparison", "compare"]

RANK = {"passed": 0, "declared-unsupported": 1, "known-failure": 2, "failed": 4, "not-run": 4}
NEW, GONE = 3, 4
"""Ranks of a case that a report does not have: a new one that fails is worse, and one that is gone counts as failed."""
FACTOR = 2.0
"""An error that grew by less is not worth a line."""
SMALL = 0.1
"""Nor is one this far below its bound."""


@dataclass(frozen=True)
class Change:
    """A case whose result changed; ``missing`` is the status of one that a report does not have."""

    id: str
    before: str
    after: str
    message: str = ""

    @property
    def step(self) -> int:
        """Above 0 if it stands worse than before."""
        return RANK.get(self.after, GONE) - RANK.get(self.before, NEW)

    def __str__(self) -> str:
        return f"{self.id}: {self.before} → {self.after}{f': {self.message}' if self.message else ''}"


@dataclass(frozen=True)
class Comparison:
    """The changes.

    Attributes:
        heads: How the two runs differ otherwise, as text: versions, devices, verdicts.
        worse: Cases that stand worse than before, those that are missing now included.
        better: Cases that stand better, new ones that passed included.
        grown: Cases that passed both times with an error that grew to twice what it was, or more, and is not small.
    """

    heads: tuple[str, ...]
    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    grown: tuple[Change, ...]

    @property
    def status(self) -> int:
        """Exit status: 1 if any case stands worse."""
        return int(bool(self.worse))


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Changes from report ``a`` to report ``b``."""
    before, after = ({result["id"]: result for result in report["results"]} for report in (a, b))
    moved = [
        change
        for name in sorted(before | after)
        if (change := _change(name, before.get(name), after.get(name))).before != change.after
    ]
    return Comparison(
        tuple(_heads(a, b)),
        tuple(change for change in moved if change.step > 0),
        tuple(change for change in moved if change.step < 0),
        tuple(_grown(before, after)),
    )


def _change(name: str, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None) -> Change:
    missing = {"status": "missing", "message": ""}
    a, b = a or missing, b or missing
    return Change(name, a["status"], b["status"], b["message"])


def _grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted(before.keys() & after.keys()):
        a, b = before[name], after[name]
        passed = a["status"] == b["status"] == "passed" and a["error"] and b["error"]
        if passed and b["error"] >= max(FACTOR * a["error"], SMALL):
            yield Change(name, f"{a['error']:.2g}", f"{b['error']:.2g} of its bound")


def _heads(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name, x, y in (
        ("backend", _name(a), _name(b)),
        ("device", _device(a), _device(b)),
        ("versions", _versions(a), _versions(b)),
        ("suite", a["suite"], b["suite"]),
        ("manifest", a["manifest"][:12], b["manifest"][:12]),
        ("profile", a["profile"], b["profile"]),
        ("verdict", a["verdict"]["outcome"], b["verdict"]["outcome"]),
        ("seconds", a["seconds"], b["seconds"]),
    ):
        yield f"{name}: {x} → {y}" if x != y else f"{name}: {x}"


def _name(report: Mapping[str, Any]) -> str:
    backend = report["backend"]
    return f"{backend['name']} {backend['version']}".strip()


def _device(report: Mapping[str, Any]) -> str:
    return f"{report['framework']} on {report['versions'].get('device', report['device'])}"


def _versions(report: Mapping[str, Any]) -> str:
    told = {**report["versions"], **report.get("environment", {})}
    return ", ".join(f"{name} {version}" for name, version in told.items() if name != "device")
