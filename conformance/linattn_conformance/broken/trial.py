"""Puts a backend that is wrong on purpose before the suite: every case of what it has, and the verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from linattn.errors import BackendError
from linattn.plugin import Backend
from linattn.registry import registry

from .. import manifest, report, verdict
from ..cases import WITHIN, Case, every_case
from ..pool import Pool
from ..runner import Result, Runner, Subject
from ..worker import Setting

__all__ = ["Trial", "every_fault", "try_backend"]

TIME_LIMIT = 5.0
MEMORY_LIMIT = 1.0


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        failed: The cases that failed; the first few, if ``enough`` stopped the trial.
        verdict: The verdict over the operators that the backend has; None if the trial was stopped.
        refused: Why linattn does not take the backend at all, if so.
        ran: How many cases have a result.
    """

    failed: tuple[Result, ...] = ()
    verdict: verdict.Verdict | None = None
    refused: str = ""
    ran: int = 0

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
            return f"{self.failed[0].id}: {self.failed[0].message}"
        return self.verdict.problems[0] if self.verdict and self.verdict.problems else ""


def cases_for(kind: Any, subject: Subject, profile: str) -> list[Case]:
    """Every case of the families and forms that the backend has, the core first: nobody says which one is to find the fault."""
    held = verdict.cases_of(profile, manifest.load().applicable(subject.framework, subject.device, subject.memory))
    found = [
        case
        for case in every_case()
        if case.id in held and case.op in kind.families and case.form in kind.forms and case.check != "bad-input"
    ]
    return sorted(found, key=lambda case: WITHIN.index(case.within))


def try_backend(kind: type[Backend], enough: int | None = 3, profile: str = "full", first: str = "") -> Trial:
    """Run a profile's cases of a backend class, those with ids like ``first`` first, until ``enough`` have failed."""
    try:
        with ready(kind) as runner:
            cases = cases_for(kind, runner.subject, profile)
            if first:
                cases.sort(key=lambda case: len(parts(first) ^ parts(case.id)))
            return _try(runner, cases, enough, profile)
    except BackendError as error:
        return Trial(refused=str(error))


def parts(name: str) -> set[str]:
    """What an id is made of."""
    return set(re.split("[/-]", name))


@contextmanager
def ready(kind: Any) -> Iterator[Runner | Pool]:
    """What runs the cases: this process, or, for those that would take it with them, another."""
    if getattr(kind, "isolated", False):
        with Pool(Setting(f"{kind.__module__}:{kind.__qualname__}"), 1, TIME_LIMIT, MEMORY_LIMIT) as pool:
            yield pool
        return
    registry.register(kind(), replace=True)
    try:
        yield Runner(kind.name)
    finally:
        registry.unregister(kind.name)


def _try(runner: Runner | Pool, cases: list[Case], enough: int | None, profile: str) -> Trial:
    results: list[Result] = []
    for result in runner.run(cases):
        results.append(result)
        if enough and sum(other.status == "failed" for other in results) >= enough:
            break
    failed = tuple(result for result in results if result.status == "failed")
    if len(results) < len(cases):
        return Trial(failed, ran=len(results))
    whole = manifest.load()
    held = replace(whole, entries={case.id: whole.entries[case.id] for case in cases})
    made = report.make(runner.subject, held, profile, results, [], 0.0)
    return Trial(failed, verdict.verdict(made, held), ran=len(results))


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
