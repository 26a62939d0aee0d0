"""The report: versioned JSON with everything that a verdict is derived from.

``linattn_conformance.verdict.verdict(report, manifest)`` derives the verdict again from a report and the manifest alone.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linattn.plugin import API_VERSION

from . import packed, provenance
from .fresh import seeds_of
from .manifest import SUITE_VERSION, Manifest
from .runner import Result, Subject
from .verdict import Verdict

__all__ = [
    "SCHEMA",
    "Circumstances",
    "entry",
    "log_of",
    "make",
    "now",
    "report_hash",
    "results_hash",
    "text",
    "variables_of",
    "whole",
    "write",
]

SCHEMA = 3
"""Version of the layout: a reader refuses one that it does not know."""


@dataclass(frozen=True)
class Circumstances:
    """What a report says of the run itself.

    Attributes:
        began: When, in UTC.
        workers: How many processes ran cases.
        log: SHA-256 of what the backend's processes printed.
        selection: The patterns of ids that were asked for; a report of a selection has no verdict.
        history: The runs that the results are of, one after the other; see :func:`entry`.
        variables: Environment variables of runs before.
    """

    began: str = ""
    workers: int = 1
    log: str = ""
    selection: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def entry(kind: str, at: str, cases: int, seconds: float, replaced: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """One run of a history.

    Args:
        kind: ``"run"``, or ``"resume"`` of the one before it.
        at: When it ended.
        cases: How many cases it ran.
        seconds: How long it took.
        replaced: Results that the report no longer has, because these cases were run once more.
    """
    kept = [{"id": result["id"], "status": result["status"], "message": result["message"]} for result in replaced]
    return {"kind": kind, "at": at, "cases": cases, "seconds": round(seconds, 1), "replaced": kept}


def log_of(digests: Sequence[str]) -> str:
    """The digest of several logs, from theirs: that of the one, if there is one only."""
    found = [digest for digest in digests if digest]
    return hashlib.sha256("".join(found).encode()).hexdigest() if len(found) > 1 else "".join(found)


def variables_of(runs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The environment variables of several runs; where they differ, all values."""
    names = sorted({name for found in runs for name in found})
    values = {name: [value for found in runs if name in found for value in found[name].split(" or ")] for name in names}
    return {name: " or ".join(dict.fromkeys(found)) for name, found in values.items()}


@functools.cache
def _made_with(kind: str) -> dict[str, Any]:
    return {
        "digests": provenance.digests(kind),
        "packages": provenance.packages(),
        "toolchain": provenance.toolchain(),
    }


def make(
    subject: Subject,
    manifest: Manifest,
    profile: str,
    results: Sequence[Result],
    complaints: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    run: Circumstances | None = None,
) -> dict[str, Any]:
    """The report of a run, without its verdict.

    Keys: ``schema``, versions (``suite``, ``api``, ``backend``, ``versions``), where it ran (``framework``, ``device``,
    ``memory``, ``platform``), what those who ran it say of that (``environment``), what was asked (``profile``, ``tighten``,
    ``manifest``, ``selection``, ``seeds``), with what code and tools (``digests``, ``packages``, ``toolchain``, ``variables``),
    when and how (``began``, ``ended``, ``workers``, ``log``, ``history``), and what came of it (``results``, ``results_hash``,
    ``complaints``, ``seconds``).
    """
    run = run or Circumstances()
    ordered = sorted(results, key=lambda result: result.id)
    listed = [{**asdict(result), "seconds": round(result.seconds, 4)} for result in ordered]
    return {
        "schema": SCHEMA,
        "suite": SUITE_VERSION,
        "api": API_VERSION,
        "backend": {
            "name": subject.name,
            "distribution": subject.distribution,
            "version": subject.version,
            "class": subject.kind,
        },
        "framework": subject.framework,
        "device": subject.device,
        "memory": subject.memory,
        "versions": subject.versions,
        "platform": {
            "python": platform.python_version(),
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
        },
        "environment": dict(environment or {}),
        "profile": profile,
        "tighten": subject.tighten,
        "selection": list(run.selection),
        "seeds": seeds_of(result.id for result in ordered),
        **_made_with(subject.kind),
        "variables": variables_of([run.variables, provenance.variables(subject.name)]),
        "began": run.began or now(),
        "ended": now(),
        "workers": run.workers,
        "log": run.log,
        "history": list(run.history) or [entry("run", now(), sum(result.status != "not-run" for result in ordered), seconds)],
        "manifest": manifest.hash,
        "results": listed,
        "results_hash": results_hash(listed),
        "complaints": list(complaints),
        "seconds": round(seconds, 1),
    }


def results_hash(results: Sequence[dict[str, Any]]) -> str:
    """Hash over what the results say, times left out."""
    told = [[result["id"], result["status"], result["error"], result["message"]] for result in results]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def report_hash(report: Mapping[str, Any]) -> str:
    """Hash over a whole report but this hash itself."""
    told = {key: value for key, value in report.items() if key != "hash"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def whole(report: dict[str, Any], judged: Verdict) -> dict[str, Any]:
    """A report with its verdict and its hash."""
    told = {**report, "verdict": judged.told if report["schema"] >= SCHEMA else told_before(judged)}
    return {**told, "hash": report_hash(told)}


def told_before(judged: Verdict) -> dict[str, Any]:
    """A verdict as layout 2 had it."""
    return {"outcome": judged.outcome, "profile": judged.profile, "problems": list(judged.problems)}


def write(path: Path, report: dict[str, Any], judged: Verdict) -> None:
    """Write a report with its verdict, a result a line, compressed if the name ends in ``.gz``."""
    packed.write(path, text(whole(report, judged)))


def text(report: Mapping[str, Any]) -> str:
    """A whole report as it is written: JSON of finite numbers in which each result, and each reason against, is a line."""
    verdict = report["verdict"]
    lines = {"results": report["results"], "problems": verdict["problems"]}
    told = {**report, "results": [], "verdict": {**verdict, "problems": []}}
    written = json.dumps(told, indent=1, allow_nan=False)
    for name, values in lines.items():
        listed = ",\n".join(f"  {json.dumps(value, allow_nan=False)}" for value in values)
        written = written.replace(f'"{name}": []', f'"{name}": [\n{listed}\n ]' if values else f'"{name}": []')
    return written + "\n"
