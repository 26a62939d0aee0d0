"""Reads reports, and says whether one is what a run wrote: ``linattn verify-report``.

A hash is no signature: who edits a report can write a new hash. It shows an edit made by hand, and a file that was damaged.
Trust in a report comes from where it was published: next to the log of the run that made it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.plugin import API_VERSION

from . import manifest
from .manifest import SUITE_VERSION, Manifest
from .report import SCHEMA, report_hash, results_hash
from .runner import STATUSES
from .verdict import PROFILES, Verdict, verdict

__all__ = ["ReportError", "Verification", "edits", "read", "verify"]

KEYS: dict[str, type | tuple[type, ...]] = {
    "suite": str, "api": str, "backend": dict, "framework": str, "device": str, "memory": (int, float), "versions": dict,
    "platform": dict, "profile": str, "tighten": (int, float), "manifest": str, "results": list, "results_hash": str,
    "complaints": list, "seconds": (int, float), "verdict": dict, "hash": str,
}  # fmt: skip
RESULT_KEYS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "status": str,
    "error": (int, float, type(None)),
    "seconds": (int, float),
    "message": str,
}
MOST_SHOWN = 5


class ReportError(ValueError):
    """The file is no report that can be read."""


def read(path: Path) -> dict[str, Any]:
    """Read a report; ``ReportError`` says what is wrong with the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ReportError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise ReportError(f"{path}: no conformance report: it has no 'schema'")
    if found["schema"] != SCHEMA:
        raise ReportError(f"{path}: its layout is version {found['schema']}, and this linattn reads version {SCHEMA}")
    _check_keys(str(path), found, KEYS)
    for i, result in enumerate(found["results"]):
        _check_keys(f"{path}: result {i + 1}", result, RESULT_KEYS)
    if found["profile"] not in PROFILES:
        raise ReportError(f"{path}: unknown profile {found['profile']!r}: known are {', '.join(PROFILES)}")
    return found


def _check_keys(where: str, found: Any, keys: Mapping[str, Any]) -> None:
    if not isinstance(found, dict):
        raise ReportError(f"{where}: expected an object, got {type(found).__name__}")
    for name, kind in keys.items():
        if name not in found:
            raise ReportError(f"{where}: has no {name!r}")
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise ReportError(f"{where}: {name!r} is {found[name]!r:.60}")


@dataclass(frozen=True)
class Verification:
    """What a report turned out to be.

    Attributes:
        faults: Everything that shows that it is not what a run of this suite wrote, as text.
        judged: The verdict derived from its results.
    """

    faults: tuple[str, ...]
    judged: Verdict

    @property
    def status(self) -> int:
        """Exit status: 3 if it is not intact, else 0 for a conformant verdict and 1 for any other."""
        return 3 if self.faults else int(not self.judged.conformant)


def verify(report: Mapping[str, Any], held: Manifest | None = None) -> Verification:
    """Check a report against itself and against the manifest, and derive its verdict again.

    Args:
        report: As :func:`read` returns it.
        held: The manifest; the installed one by default.
    """
    held = held or manifest.load()
    judged = verdict(report, held)
    faults = [*_versions(report, held), *edits(report), *_results(report, held)]
    told = report["verdict"].get("outcome"), report["verdict"].get("profile")
    if told != (judged.outcome, judged.profile):
        faults.append(f"its verdict is {told[0]!r} for profile {told[1]!r}: its results give {str(judged)!r}")
    return Verification(tuple(faults), judged)


def _versions(report: Mapping[str, Any], held: Manifest) -> list[str]:
    made, here = _suite(report["suite"], report["api"]), _suite(SUITE_VERSION, API_VERSION)
    if made != here:
        return [f"made with {made}, and this is {here}: verify it with the linattn that made it"]
    if report["manifest"] != held.hash:
        return [f"its manifest is {report['manifest'][:12]}…, and that of {here} is {held.hash[:12]}…: other cases were run"]
    return []


def _suite(suite: str, api: str) -> str:
    return f"suite {suite} of API {api}"


def edits(report: Mapping[str, Any]) -> list[str]:
    """Hashes that do not belong to what they stand for, as text."""
    if report["results_hash"] != results_hash(report["results"]):
        return ["its results_hash does not belong to its results: they were edited"]
    if report["hash"] != report_hash(report):
        return ["its hash does not belong to it: something other than the results was edited"]
    return []


def _results(report: Mapping[str, Any], held: Manifest) -> list[str]:
    """What no run writes."""
    faults: list[str] = []
    applicable = held.applicable(report["framework"], report["device"], report["memory"])
    unknown = [result["id"] for result in report["results"] if result["id"] not in applicable]
    if unknown:
        faults.append(
            f"{len(unknown)} results are of no case for {report['framework']} on {report['device']}: {_some(unknown)}"
        )
    odd = [f"{result['id']} ({result['status']})" for result in report["results"] if result["status"] not in STATUSES]
    if odd:
        faults.append(f"{len(odd)} results have an unknown status: {_some(odd)}")
    above = [result["id"] for result in report["results"] if result["status"] == "passed" and (result["error"] or 0.0) > 1.0]
    if above:
        faults.append(f"{len(above)} cases passed with an error above their bound: {_some(above)}")
    return faults


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (", …" if len(names) > MOST_SHOWN else "")
