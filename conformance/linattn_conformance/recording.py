"""The reports of one run: one at its end, and some before, so that a run which is ended from outside leaves what it found."""

from __future__ import annotations

import datetime
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import known_failures, packed, report, verdict
from .cases import Case
from .known_failures import KnownFailure
from .manifest import Manifest
from .pool import Pool
from .resuming import Earlier
from .runner import Result
from .verdict import Verdict

__all__ = ["EVERY", "Found", "Record", "Watch"]

EVERY = 30.0
"""Seconds from one report, or line, of a run that goes on to the next. A report of 32,000 results takes one."""
NOT_YET = "not tried: the run had not come to it when this was written"


@dataclass(frozen=True)
class Found:
    """What a run has found.

    Attributes:
        results: Of all its cases, those of the run that it goes on with among them.
        made: Its report, without the verdict.
        judged: The verdict.
        printed: What the backend's processes printed.
    """

    results: list[Result]
    made: dict[str, Any]
    judged: Verdict
    printed: str


@dataclass(frozen=True)
class Record:
    """What all reports of a run say, whenever they are made.

    Attributes:
        pool: What runs the cases.
        held: The manifest.
        profile: The profile.
        cases: The cases of the run, and of the one that it goes on with.
        selection: The patterns of ids that were asked for.
        known: The list of known failures.
        environment: What those who run it say of where it is made.
        resumes: Whether it goes on with another run.
        earlier: What that one found.
        workers: How many processes there are.
        began: When it began.
        path: Where the report is written, if anywhere.
        log: Where what the backend's processes print is written, if anywhere.
    """

    pool: Pool
    held: Manifest
    profile: str
    cases: Sequence[Case]
    selection: tuple[str, ...]
    known: Sequence[KnownFailure]
    environment: Mapping[str, str]
    resumes: bool
    earlier: Earlier
    workers: int
    began: str
    path: Path | None
    log: Path | None

    def found(self, results: Sequence[Result], seconds: float) -> Found:
        """What the run has found if these are the results that it has after so many seconds. What has none is not run."""
        there = [*self.earlier.results, *results]
        known = {result.id for result in there}
        there += [Result(case.id, "not-run", message=NOT_YET) for case in self.cases if case.id not in known]
        applied, complaints = known_failures.apply(there, self.known, datetime.date.today())
        printed = self.pool.log()
        made = report.make(
            self.pool.subject,
            self.held,
            self.profile,
            applied,
            list(dict.fromkeys([*self.earlier.complaints, *self.pool.complaints, *complaints])),
            seconds + self.earlier.seconds,
            self.environment,
            self._circumstances(sum(result.status != "not-run" for result in results), seconds, printed),
        )
        return Found(applied, made, verdict.verdict(made, self.held), printed)

    def _circumstances(self, ran: int, seconds: float, printed: str) -> report.Circumstances:
        earlier = self.earlier
        last = report.entry("resume" if self.resumes else "run", report.now(), ran, seconds, earlier.replaced)
        return report.Circumstances(
            began=earlier.began or self.began,
            workers=max(self.workers, earlier.workers),
            log=report.log_of([earlier.log, hashlib.sha256(printed.encode()).hexdigest()]),
            selection=self.selection,
            history=(*earlier.history, last),
            variables=earlier.variables,
        )

    def write(self, found: Found) -> None:
        """Write the log and the report, where they are wanted."""
        if self.log:
            packed.write(self.log, found.printed)
        if self.path:
            report.write(self.path, found.made, found.judged)

    def keep(self, results: Sequence[Result], seconds: float) -> None:
        """Write them for a run that goes on. Where that cannot be done now it may be at the end, and the run goes on."""
        if self.path is None or not packed.is_replaced(self.path):
            return
        try:
            self.write(self.found(results, seconds))
        except OSError as error:
            print(f"the report cannot be written now: {error}", file=sys.stderr, flush=True)


class Watch:
    """Looks after a run that goes on, in which ``results`` come to be: writes its report, and says how far it is where no
    terminal shows that.

    Args:
        total: How many cases there are to run.
        keep: What is done with the results so far, and the seconds that they took.
    """

    def __init__(self, total: int, keep: Callable[[Sequence[Result], float], None]) -> None:
        self.total, self.keep = total, keep
        self.results: list[Result] = []
        self.failures = 0
        self.shown = sys.stderr.isatty()
        self.started = self.looked = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def add(self, result: Result) -> None:
        """Another result."""
        self.results.append(result)
        self.failures += result.status == "failed"

    def look(self) -> None:
        """See whether it is time to do so, which may be asked at any time."""
        if time.monotonic() < self.looked + EVERY:
            return
        if not self.shown:
            told = f"{len(self.results):,} of {self.total:,} cases, {self.failures:,} failed, {self.seconds:.0f} s"
            print(told, file=sys.stderr, flush=True)
        self.keep(self.results, self.seconds)
        self.looked = time.monotonic()
