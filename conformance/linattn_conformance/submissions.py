"""Submissions: a folder a backend and device, checked by ``linattn check-submission``, and the page that is made of them.

A submission holds three files::

    submission.toml     who submits what: see :data:`KEYS`
    report.json.gz      of a whole run
    log.txt             what the run printed: --log

The checker accepts what is intact, conformant for the profile that it claims, and made with the code that it names.
"""

from __future__ import annotations

import datetime
import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import capabilities, reading, rendering
from .manifest import Manifest
from .verdict import PROFILES

__all__ = ["Submission", "SubmissionError", "check", "folders", "page", "read"]

KEYS = {
    "vendor": "who submits",
    "product": "what users install, with its version: the name of the distribution, a space, the version",
    "link": "where it is",
    "contact": "whom to ask",
    "profile": f"what is claimed: {', '.join(PROFILES)}",
}
"""The keys of ``submission.toml``, all of which are texts, and all of which are needed."""
REPORT, LOG, ABOUT = "report.json.gz", "log.txt", "submission.toml"


class SubmissionError(ValueError):
    """The folder is no submission."""


@dataclass(frozen=True)
class Submission:
    """One of them.

    Attributes:
        folder: Where it lies.
        about: What ``submission.toml`` says.
        report: Its report.
        log: What the run printed.
    """

    folder: Path
    about: dict[str, str]
    report: dict[str, Any]
    log: str


def read(folder: Path) -> Submission:
    """A submission.

    Raises:
        SubmissionError: A file is missing, or wrong.
    """
    for name in (ABOUT, REPORT, LOG):
        if not (folder / name).is_file():
            raise SubmissionError(f"{folder}: has no {name}: a submission is {ABOUT}, {REPORT} and {LOG}")
    others = sorted(path.name for path in folder.iterdir() if path.name not in (ABOUT, REPORT, LOG))
    if others:
        raise SubmissionError(f"{folder}: has {', '.join(others)}: a submission is {ABOUT}, {REPORT} and {LOG}, no more")
    try:
        about = tomllib.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SubmissionError(f"{folder / ABOUT}: no TOML: {error}") from None
    for name, what in KEYS.items():
        if not isinstance(about.get(name), str) or not about[name]:
            raise SubmissionError(f"{folder / ABOUT}: needs {name}, {what}")
    if unknown := sorted(about.keys() - KEYS.keys()):
        raise SubmissionError(f"{folder / ABOUT}: has {', '.join(unknown)}: the keys are {', '.join(KEYS)}")
    try:
        report = reading.read(folder / REPORT)
    except reading.ReportError as error:
        raise SubmissionError(str(error)) from None
    return Submission(folder, about, report, (folder / LOG).read_bytes().decode("utf-8", "replace"))


def check(found: Submission) -> list[str]:
    """What speaks against accepting a submission, as text; nothing, if it is accepted."""
    report, about = found.report, found.about
    if report["schema"] == reading.OLD:
        return [f"its report has layout {reading.OLD}, which does not say with what it was made: run the suite again"]
    verified = reading.verify(report)
    against = list(verified.faults)
    if not verified.judged.conformant:
        against.append(f"its results give: {verified.judged}")
    if about["profile"] != report["profile"]:
        against.append(f"it claims {about['profile']}, and its report is of {report['profile']}")
    backend = report["backend"]
    made = f"{backend['distribution']} {backend['version']}".strip()
    if not backend["distribution"]:
        against.append("its backend was registered by a script: install the product, and run that")
    elif about["product"] != made:
        against.append(f"it is of {about['product']}, and its report is of {made}")
    if hashlib.sha256(found.log.encode()).hexdigest() != report["log"]:
        against.append(f"{LOG} is not what the run printed: its digest is another than the report's")
    if report["tighten"] < 1.0:
        against.append("its bounds were tightened: a submission has those of the suite")
    if datetime.datetime.fromisoformat(report["ended"]) > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1):
        against.append(f"it ended at {report['ended']}, which is yet to come")
    return against


def folders(root: Path) -> list[Path]:
    """The submissions below a folder: those folders that hold a report or say who submits."""
    return sorted({path.parent for name in (ABOUT, REPORT) for path in root.rglob(name)})


def page(found: Sequence[Submission], held: Manifest) -> str:
    """The page of all submissions, as Markdown: who has what, how much of it ran, and operators against backends."""
    heads = ["product", "by", "where", "profile", "coverage", "passed throughout", "on"]
    rows = [_row(one) for one in found]
    table = [heads, ["---"] * len(heads), *rows]
    parts = [
        "# Conformant backends",
        "Each row is a submission that `linattn check-submission` accepts; its folder has the report and the log of the run.",
        "\n".join(f"| {' | '.join(row)} |" for row in table),
    ]
    if found:
        parts.append(rendering.matrix_markdown([one.report for one in found], held).strip())
    return "\n\n".join(parts) + "\n"


def _row(one: Submission) -> list[str]:
    report, verdict = one.report, one.report["verdict"]
    badges = ", ".join(name for name, passed in verdict["badges"].items() if passed == "all")
    device = report["versions"].get("device", report["device"])
    return [
        f"[{one.about['product']}]({one.about['link']})",
        one.about["vendor"],
        f"{report['framework']} on {device}",
        report["profile"],
        capabilities.short(*verdict["coverage"]),
        badges or "–",
        report["ended"][:10],
    ]
