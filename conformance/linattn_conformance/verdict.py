"""What a report proves: manifest minus results, a pure function of the two.

A profile is a set of cases and a rule about what may be declared unsupported. All are judged operator by operator
(``chunk_gla`` is one operator), over the cases of the manifest that apply to the report's framework and device.

=============  ============================================  ==============================================================
profile        cases                                         may be declared unsupported
=============  ============================================  ==============================================================
``core``       a spanning subset, without gradients          all core cases of an operator together: it is not claimed;
                                                             and single cases outside the core
``inference``  all pairs of factors, without gradients       the same
``training``   all pairs of factors                          the same; the core here includes its gradients
``full``       every case: triples as well                   nothing
=============  ============================================  ==============================================================

* A case without a result counts as not run, and fails. So does an unknown status.
* An operator is claimed if any of its core cases in the profile was not declared unsupported; then none of them may be.
* At least one operator must be claimed: a backend that declares everything unsupported conforms to nothing.
* An operator that is not claimed must declare all of its cases, not only the core (bad input aside, which the API answers).
* ``known-failure`` is no pass: the verdict is then not ``conformant`` but ``conformant except known failures``.
* Of a claimed operator's cases half must not be declared unsupported
  (:data:`~linattn_conformance.capabilities.LEAST`).
* A case that failed once, and passed when it was run again with the same code, is flaky, and fails.
* A case of which the suite's own fault is known (:mod:`~linattn_conformance.waivers`) counts neither way.
* A report of selected cases has no verdict.
* A fresh case, which no manifest holds, counts as much: a failure of its is a failure.
* Errors in the list of known failures fail the verdict, and so does a report made with another manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import capabilities, fresh, waivers
from .cases import WITHIN
from .manifest import Entry, Manifest

__all__ = ["NONE", "PROFILES", "Verdict", "cases_of", "check_profile", "told_by_no_case", "verdict"]

PROFILES = ("core", "inference", "training", "full")
NONE = "no verdict"
"""The outcome of a report of selected cases."""


@dataclass(frozen=True)
class Verdict:
    """The judgement.

    Attributes:
        profile: The profile judged.
        outcome: ``conformant``, ``conformant except known failures`` or ``not conformant``; :data:`NONE` of a selection.
        problems: Every reason against, as text; ``id: reason`` where a case is the reason.
        claimed: The operators claimed.
        counts: How many cases ended with each status.
        coverage: How many of the profile's cases ran, and how many there are.
        badges: Of each capability, whether all, some or none of its cases passed.
    """

    profile: str
    outcome: str
    problems: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    coverage: tuple[int, int] = (0, 0)
    badges: Mapping[str, str] = field(default_factory=dict)

    @property
    def conformant(self) -> bool:
        """True for ``conformant`` alone."""
        return self.outcome == "conformant"

    @property
    def told(self) -> dict[str, Any]:
        """As a report has it."""
        return {
            "outcome": self.outcome,
            "profile": self.profile,
            "coverage": list(self.coverage),
            "claimed": list(self.claimed),
            "badges": dict(self.badges),
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        if self.outcome == NONE:
            return f"{NONE}: a selection of cases"
        return f"{self.outcome}: {self.profile} ({capabilities.short(*self.coverage)})"


def check_profile(profile: str) -> None:
    """Refuse a name that is no profile's."""
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: known are {', '.join(PROFILES)}")


def cases_of(profile: str, applicable: Mapping[str, Entry]) -> dict[str, Entry]:
    """The cases that a profile needs, of those that apply."""
    check_profile(profile)
    held = WITHIN[: WITHIN.index("training" if profile == "inference" else profile) + 1]
    found = {name: entry for name, entry in applicable.items() if entry.within in held or entry.core or _bad_input(name)}
    return found if profile in ("training", "full") else {name: entry for name, entry in found.items() if not entry.gradient}


def _bad_input(name: str) -> bool:
    return "/bad-input/" in name


def verdict(report: Mapping[str, Any], manifest: Manifest) -> Verdict:
    """Judge a report, as ``report.py`` lays it out."""
    profile = report["profile"]
    applicable = manifest.applicable(report["framework"], report["device"], report["memory"])
    wanted = cases_of(profile, applicable)
    found = {result["id"]: result for result in report["results"]}
    statuses = {name: found[name]["status"] if name in found else "not-run" for name in wanted}
    if report.get("selection"):
        return Verdict(profile, NONE, coverage=capabilities.coverage(statuses))
    told = statuses | {name: result["status"] for name, result in found.items() if fresh.is_fresh(name)}
    waived = waivers.of(report, [name for name, status in told.items() if status in ("failed", "not-run")])
    statuses |= {name: "waived" for name in waived if name in statuses}
    problems = list(report["complaints"])
    if report["manifest"] != manifest.hash:
        problems.append("the report was made with another manifest")
    if len(found) != len(report["results"]):
        problems.append("the report has more than one result for a case")
    if report["tighten"] > 1:
        problems.append("bounds were widened")
    for name, status in statuses.items():
        if status not in ("passed", "declared-unsupported", "known-failure", "waived"):
            problems.append(f"{name}: {status}{': ' if name in found else ''}{found.get(name, {}).get('message', '')}")
    problems += fresh.problems(result for result in report["results"] if result["id"] not in waived)
    claimed, complaints = _claims(profile, wanted, statuses)
    problems += complaints
    operators = {name: entry.operator for name, entry in wanted.items()}
    if profile != "full" and report.get("schema", HELD_TO) >= HELD_TO:  # which leaves out nothing anyhow
        problems += _thin(profile, claimed, operators, statuses)
    problems += _flaky(report, waived)
    known = "known-failure" in statuses.values()
    outcome = "not conformant" if problems else "conformant except known failures" if known else "conformant"
    counts: dict[str, int] = defaultdict(int)
    for status in statuses.values():
        counts[status] += 1
    badges = capabilities.badges(statuses, operators, claimed)
    coverage = capabilities.coverage(statuses)
    return Verdict(profile, outcome, tuple(problems), tuple(claimed), dict(counts), coverage, badges)


def told_by_no_case(report: Mapping[str, Any]) -> list[str]:
    """The reasons against a backend that a list of its failed cases does not tell: a case that is flaky has passed, one that
    may not be declared unsupported has not failed.
    """
    own = {(result["id"], result["status"]) for result in report["results"]}
    return [text for text in report["verdict"]["problems"] if tuple(text.split(": ", 2)[:2]) not in own]


HELD_TO = 3
"""The first layout of reports that are held to a least coverage."""


def _thin(profile: str, claimed: Sequence[str], operators: Mapping[str, str], statuses: Mapping[str, str]) -> list[str]:
    """The claimed operators that take too few of their cases."""
    mine: dict[str, dict[str, str]] = {operator: {} for operator in claimed}
    for name, operator in operators.items():
        if operator in mine and not _bad_input(name):
            mine[operator][name] = statuses[name]
    return [thin for operator, found in mine.items() if (thin := capabilities.covered(profile, operator, found))]


def _flaky(report: Mapping[str, Any], waived: Sequence[str]) -> list[str]:
    """The cases that failed once in the history of a report."""
    replaced = [result for entry in report.get("history", ()) for result in entry["replaced"]]
    failed = {result["id"]: result["message"] for result in replaced if result["status"] == "failed"}
    return [f"{name}: flaky: it failed before: {message}" for name, message in failed.items() if name not in waived]


def _claims(profile: str, wanted: Mapping[str, Entry], statuses: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The operators claimed, and what was declared unsupported that may not be."""
    operators: dict[str, list[str]] = defaultdict(list)
    for name, entry in wanted.items():
        if not _bad_input(name):
            operators[entry.operator].append(name)
    claimed, problems = [], []
    for operator, names in sorted(operators.items()):
        declared = [name for name in names if statuses[name] == "declared-unsupported"]
        core = [name for name in names if wanted[name].core]
        mine = any(statuses[name] != "declared-unsupported" for name in core or names)
        if mine and core:
            claimed.append(operator)
        if profile == "full":
            problems += [f"{name}: declared unsupported, and profile full leaves nothing out" for name in declared]
        elif mine:
            problems += [
                f"{name}: declared unsupported, and it is core of {operator}, which the backend has"
                for name in declared
                if wanted[name].core
            ]
        else:
            problems += [
                f"{name}: {statuses[name]}, though all core cases of {operator} are declared unsupported"
                for name in names
                if statuses[name] != "declared-unsupported"
            ]
    if not claimed:
        problems.append("no operator is claimed: every core case is declared unsupported or was not run")
    return claimed, problems
