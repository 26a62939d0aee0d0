"""Puts a backend that is wrong on purpose before the suite: cases of what it has, until one fails, else the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from linattn.errors import BackendError
from linattn.plugin import Backend
from linattn.registry import registry

from .. import manifest, report, verdict
from ..cases import Case, cost, every_case
from ..pool import Pool
from ..runner import Result, Runner, Subject
from ..worker import Setting

__all__ = ["Trial", "every_fault", "plainness", "try_backend"]

MEMORY_LIMIT = 1.0
"""GiB of a process."""


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        failed: The case that failed, with which the trial ended.
        verdict: The verdict over the operators that the backend has; None if a case failed.
        refused: Why linattn does not take the backend at all, if so.
    """

    failed: Result | None = None
    verdict: verdict.Verdict | None = None
    refused: str = ""

    @property
    def rejected(self) -> bool:
        """True if it was refused, or a case failed, or, all having run, the verdict says so."""
        return bool(self.refused or self.failed) or not (self.verdict and self.verdict.conformant)

    @property
    def reason(self) -> str:
        """The first thing found wrong."""
        if self.refused:
            return self.refused
        if self.failed:
            return f"{self.failed.id}: {self.failed.message}"
        return self.verdict.problems[0] if self.verdict and self.verdict.problems else ""


def cases_for(kind: Any, subject: Subject, profile: str, first: str) -> list[Case]:
    """Every case of the families and forms that the backend has: the one whose id is ``first``, then the plainer ones."""
    held = verdict.cases_of(profile, manifest.load().applicable(subject.framework, subject.device, subject.memory))
    found = [
        case
        for case in every_case()
        if case.id in held and case.op in kind.families and case.form in kind.forms and case.check != "bad-input"
    ]
    return sorted(found, key=lambda case: (case.id != first, *plainness(case)))


def plainness(case: Case) -> tuple[bool, int, int]:
    """What orders cases so that those of few flags, which say best what is wrong, and cheap ones come first."""
    slow, size = cost(case)
    return slow, len(case.flags), size


def try_backend(kind: type[Backend], profile: str = "full", first: str = "") -> Trial:
    """Run a profile's cases of a backend class, the one whose id is ``first`` before the plainer ones, until one fails."""
    try:
        with ready(kind) as runner:
            return _try(runner, cases_for(kind, runner.subject, profile, first), profile)
    except BackendError as error:
        return Trial(refused=str(error))


@contextmanager
def ready(kind: Any) -> Iterator[Runner | Pool]:
    """What runs the cases: this process, or, for those that would take it with them, another."""
    if getattr(kind, "isolated", False):
        with Pool(Setting(f"{kind.__module__}:{kind.__qualname__}"), memory_limit=MEMORY_LIMIT) as pool:
            pool.time_limit = kind.time_limit  # from now on: to load it takes what it takes on a machine that is busy
            yield pool
        return
    registry.register(kind(), replace=True)
    try:
        yield Runner(kind.name)
    finally:
        registry.unregister(kind.name)


def _try(runner: Runner | Pool, cases: list[Case], profile: str) -> Trial:
    results: list[Result] = []
    for result in chain(runner.run(cases[:1]), runner.run(cases[1:])):  # a pool would ask about all of them first
        if result.status == "failed":
            return Trial(result)
        results.append(result)
    whole = manifest.load()
    held = replace(whole, entries={case.id: whole.entries[case.id] for case in cases})
    made = report.make(runner.subject, held, profile, results, [], 0.0)
    return Trial(verdict=verdict.verdict(made, held))


def every_fault() -> list[Any]:
    """The faults on every framework that is installed."""
    from .in_place import FAULTS as IN_PLACE
    from .on_numpy import FAULTS
    from .on_process import FAULTS as ON_PROCESS

    try:
        from .on_torch import FAULTS as ON_TORCH
    except ImportError:
        return [*FAULTS, *IN_PLACE, *ON_PROCESS]
    return [*FAULTS, *IN_PLACE, *ON_TORCH, *ON_PROCESS]
