"""Puts a backend that is wrong on purpose before the suite: every case of what it has, and the verdict.

``python -m linattn_conformance.broken.trial`` prints the table of faults and the cases that catch them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from linattn.plugin import Backend
from linattn.registry import registry

from .. import manifest, report, verdict
from ..cases import Case, every_case
from ..runner import Result, Runner

__all__ = ["Trial", "every_fault", "try_backend"]


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        failed: The cases that failed; the first few, if ``enough`` stopped the trial.
        verdict: The verdict over the operators that the backend has; None if the trial was stopped.
    """

    failed: tuple[Result, ...]
    verdict: verdict.Verdict | None

    @property
    def rejected(self) -> bool:
        """True if a case failed, or, all having run, the verdict says so."""
        return bool(self.failed) or not (self.verdict and self.verdict.conformant)

    @property
    def reason(self) -> str:
        """The first thing found wrong."""
        if self.failed:
            return f"{self.failed[0].id}: {self.failed[0].message}"
        return self.verdict.problems[0] if self.verdict and self.verdict.problems else ""


def cases_for(kind: Any, runner: Runner) -> list[Case]:
    """Every case of the families and forms that the backend has: nobody says which one is to find the fault."""
    return [
        case
        for case in every_case()
        if runner.applies(case) and case.op in kind.families and case.form in kind.forms and case.check != "bad-input"
    ]


def try_backend(kind: type[Backend], enough: int | None = 3, profile: str = "training") -> Trial:
    """Run the cases of a backend class until ``enough`` have failed, or all of them."""
    registry.register(kind(), replace=True)
    try:
        runner = Runner(kind.name)
        cases = cases_for(kind, runner)
        results: list[Result] = []
        for result in runner.run(cases):
            results.append(result)
            if enough and sum(other.status == "failed" for other in results) >= enough:
                break
        failed = tuple(result for result in results if result.status == "failed")
        if len(results) < len(cases):
            return Trial(failed, None)
        whole = manifest.from_cases(every_case())
        held = replace(whole, entries={case.id: whole.entries[case.id] for case in cases})
        made = report.make(runner, held, profile, results, [], 0.0)
        return Trial(failed, verdict.verdict(made, held))
    finally:
        registry.unregister(kind.name)


def every_fault() -> list[type[Backend]]:
    """The faults on every framework that is installed."""
    from .in_place import FAULTS as IN_PLACE
    from .on_numpy import FAULTS

    try:
        from .on_torch import FAULTS as ON_TORCH
    except ImportError:
        return [*FAULTS, *IN_PLACE]
    return [*FAULTS, *IN_PLACE, *ON_TORCH]


if __name__ == "__main__":
    print("| fault | what is wrong | cases that catch it | for example |\n| --- | --- | --- | --- |")
    for kind in every_fault():
        trial = try_backend(kind, enough=None)
        first = (kind.__doc__ or "").partition("\n")[0]
        count = len(trial.failed) or "the verdict"
        print(f"| `{kind.name}` | {first} | {count} | `{trial.reason.partition(': ')[0]}` |", flush=True)
