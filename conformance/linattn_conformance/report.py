"""The report: versioned JSON with everything that a verdict is derived from.

``linattn_conformance.verdict.verdict(report, manifest)`` derives the verdict again from a report and the manifest alone.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from linattn.plugin import API_VERSION

from . import packed
from .manifest import SUITE_VERSION, Manifest
from .runner import Result, Subject
from .verdict import Verdict

__all__ = ["SCHEMA", "make", "report_hash", "results_hash", "text", "whole", "write"]

SCHEMA = 2
"""Version of the layout: a reader refuses one that it does not know."""


def make(
    subject: Subject,
    manifest: Manifest,
    profile: str,
    results: Sequence[Result],
    complaints: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The report of a run, without its verdict.

    Keys: ``schema``, versions (``suite``, ``api``, ``backend``, ``versions``), where it ran (``framework``, ``device``,
    ``memory``, ``platform``), what those who ran it say of that (``environment``), what was asked (``profile``, ``tighten``,
    ``manifest``), and what came of it (``results``, ``results_hash``, ``complaints``, ``seconds``).
    """
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
    told = {**report, "verdict": {"outcome": judged.outcome, "profile": judged.profile, "problems": list(judged.problems)}}
    return {**told, "hash": report_hash(told)}


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
