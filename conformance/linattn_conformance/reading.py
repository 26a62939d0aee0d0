"""Reads reports, and says whether one is what a run wrote: ``linattn verify-report``.

A hash is no signature: who edits a report can write a new hash. It shows an edit made by hand, and a file that was damaged.
Trust in a report comes from where it was published: next to the log of the run that made it.
"""

from __future__ import annotations

import datetime
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.plugin import API_VERSION

from . import fresh, manifest, packed, provenance
from .manifest import SUITE_VERSION, Manifest
from .report import SCHEMA, report_hash, results_hash
from .runner import STATUSES
from .verdict import PROFILES, Verdict, verdict

__all__ = ["ReportError", "Verification", "edits", "read", "verify"]

Holds = Callable[[Any], bool]


def of(*kinds: type) -> Holds:
    """True for a value of one of these types; ``True`` and ``False`` are no numbers."""
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


TEXT, NUMBER, LIST = of(str), of(int, float), of(list)


def at_least(least: float, above: bool = False) -> Holds:
    """True for a number from ``least`` on, or ``above`` it."""
    return lambda value: NUMBER(value) and (value > least if above else value >= least)


def texts(value: Any) -> bool:
    """True for a list of texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def named(*names: str) -> Holds:
    """True for texts by name, these among them."""
    return lambda value: isinstance(value, dict) and texts([*value.values()]) and value.keys() >= set(names)


def numbers(value: Any) -> bool:
    """True for a list of whole numbers."""
    return isinstance(value, list) and all(of(int)(item) for item in value)


def moment(value: Any) -> bool:
    """True for a time in UTC, to the second."""
    try:
        found = datetime.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return found.utcoffset() == datetime.timedelta(0) and found.isoformat(timespec="seconds") == value


KEYS: dict[str, Holds] = {
    "schema": NUMBER, "suite": TEXT, "api": TEXT, "backend": named("name", "distribution", "version", "class"),
    "framework": TEXT, "device": TEXT, "memory": at_least(0), "versions": named(),
    "platform": named("python", "system", "release", "machine"), "environment": named(), "profile": TEXT,
    "tighten": at_least(0, above=True), "manifest": TEXT, "results": LIST, "results_hash": TEXT, "complaints": texts,
    "seconds": at_least(0), "verdict": of(dict), "hash": TEXT,
}  # fmt: skip
LATER: dict[str, Holds] = {
    "selection": texts, "seeds": numbers, "digests": named("linattn_conformance"), "packages": named(), "toolchain": named(),
    "variables": named(), "began": moment, "ended": moment, "workers": at_least(1), "log": TEXT, "history": LIST,
}  # fmt: skip
"""Keys that reports have since layout 3."""
VERDICT_KEYS: dict[str, Holds] = {"outcome": TEXT, "profile": TEXT, "problems": texts}
LATER_OF_VERDICTS: dict[str, Holds] = {"coverage": numbers, "claimed": texts, "badges": named()}
HISTORY_KEYS: dict[str, Holds] = {
    "kind": lambda value: value in ("run", "resume"), "at": moment, "cases": at_least(0), "seconds": at_least(0),
    "replaced": LIST,
}  # fmt: skip
RESULT_KEYS: dict[str, Holds] = {
    "id": lambda value: isinstance(value, str) and value.count("/") >= 4,
    "status": TEXT,
    "error": lambda value: value is None or at_least(0, above=True)(value),
    "seconds": at_least(0),
    "message": TEXT,
}
REPLACED_KEYS = {name: RESULT_KEYS[name] for name in ("id", "status", "message")}
OLD = 2
"""A layout that is still read: that of reports without provenance."""
MOST_SHOWN = 5


class ReportError(ValueError):
    """The file is no report that can be read."""


def read(path: Path) -> dict[str, Any]:
    """Read a report, compressed if its name ends in ``.gz``; ``ReportError`` says what is wrong with the file."""
    try:
        found = json.loads(packed.read(path), parse_constant=_no_number, object_pairs_hook=_once)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ReportError(f"{path}: expected what gzip compressed, as its name ends in .gz: {error}") from None
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise ReportError(f"{path}: no conformance report: it has no 'schema'")
    if found["schema"] not in (OLD, SCHEMA):
        raise ReportError(
            f"{path}: its layout is version {found['schema']}, and this linattn reads versions {OLD} and {SCHEMA}"
        )
    later = found["schema"] == SCHEMA
    _check_keys(str(path), found, KEYS | LATER if later else KEYS)
    _check_keys(f"{path}: its verdict", found["verdict"], VERDICT_KEYS | LATER_OF_VERDICTS if later else VERDICT_KEYS)
    for i, entry in enumerate(found["history"] if later else ()):
        _check_keys(f"{path}: run {i + 1} of its history", entry, HISTORY_KEYS)
        for result in entry["replaced"]:
            _check_keys(f"{path}: run {i + 1} of its history: a result", result, REPLACED_KEYS)
    for i, result in enumerate(found["results"]):
        _check_keys(f"{path}: result {i + 1}", result, RESULT_KEYS)
    if found["profile"] not in PROFILES:
        raise ReportError(f"{path}: unknown profile {found['profile']!r}: known are {', '.join(PROFILES)}")
    return found


def _no_number(text: str) -> None:
    """Python reads ``NaN`` and ``Infinity``, which are not JSON, and which no run writes."""
    raise ValueError(f"{text} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python takes the last of several values for one name; other readers, people among them, may take the first."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands more than once in one object")
    return dict(pairs)


def _check_keys(where: str, found: Any, keys: Mapping[str, Holds]) -> None:
    if not isinstance(found, dict):
        raise ReportError(f"{where}: expected an object, got {type(found).__name__}")
    for name, holds in keys.items():
        if name not in found:
            raise ReportError(f"{where}: has no {name!r}")
        if not holds(found[name]):
            raise ReportError(f"{where}: {name!r} is {found[name]!r:.60}")
    for name in found.keys() - keys.keys():
        raise ReportError(f"{where}: has {name!r}, which layout {SCHEMA} does not have")


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
        held: The manifest of a suite that need not be here; by default the installed one, with the code beside it.
    """
    here = [] if held else _code(report)
    held = held or manifest.load()
    judged = verdict(report, held)
    faults = [*(_versions(report, held) or here), *edits(report), *_results(report, held), *_run(report)]
    told = report["verdict"].get("outcome"), report["verdict"].get("profile")
    if told != (judged.outcome, judged.profile):
        faults.append(f"its verdict is {told[0]!r} for profile {told[1]!r}: its results give {str(judged)!r}")
    elif sorted(report["verdict"]["problems"]) != sorted(judged.problems):
        faults.append("its verdict gives other reasons against the backend than its results do")
    elif report["schema"] == SCHEMA and (
        wrong := [key for key in LATER_OF_VERDICTS if report["verdict"][key] != judged.told[key]]
    ):
        faults.append(f"the {' and the '.join(wrong)} of its verdict are not those of its results")
    return Verification(tuple(faults), judged)


def _versions(report: Mapping[str, Any], held: Manifest) -> list[str]:
    made, here = _suite(report["suite"], report["api"]), _suite(SUITE_VERSION, API_VERSION)
    if made != here:
        return [f"made with {made}, and this is {here}: verify it with the linattn that made it"]
    if report["manifest"] != held.hash:
        return [f"its manifest is {report['manifest'][:12]}…, and that of {here} is {held.hash[:12]}…: other cases were run"]
    return []


def _code(report: Mapping[str, Any]) -> list[str]:
    """What shows that not the code that is installed here made it: bounds and truth are not in the manifest."""
    if report["schema"] == OLD:
        return [f"its layout is version {OLD}, and a run of this suite writes version {SCHEMA}"]
    return [
        f"{package} was another one than that which is here: its digest differs"
        for package in provenance.SUITE
        if report["digests"].get(package) != provenance.digest(package)
    ]


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
    order = [result["id"] for result in report["results"]]
    if order != sorted(order):
        faults.append("its results are not in the order of their ids")
    applicable = held.applicable(report["framework"], report["device"], report["memory"])
    unknown = fresh.strangers((name for name in order if name not in applicable), report["profile"])
    if unknown:
        faults.append(
            f"{len(unknown)} results are of no case for {report['framework']} on {report['device']}: {_some(unknown)}"
        )
    twice = [name for name, count in Counter(result["id"] for result in report["results"]).items() if count > 1]
    if twice:
        faults.append(f"{len(twice)} cases have more than one result: {_some(twice)}")
    odd = [f"{result['id']} ({result['status']})" for result in report["results"] if result["status"] not in STATUSES]
    if odd:
        faults.append(f"{len(odd)} results have an unknown status: {_some(odd)}")
    above = [result["id"] for result in report["results"] if result["status"] == "passed" and (result["error"] or 0.0) > 1.0]
    if above:
        faults.append(f"{len(above)} cases passed with an error above their bound: {_some(above)}")
    spoke = [result["id"] for result in report["results"] if result["status"] == "passed" and result["message"]]
    if spoke:
        faults.append(f"{len(spoke)} cases passed, and have a message nevertheless: {_some(spoke)}")
    unmeasured = ("declared-unsupported", "not-run")
    measured = [result["id"] for result in report["results"] if result["status"] in unmeasured and result["error"] is not None]
    if measured:
        faults.append(f"{len(measured)} cases were not run, and have an error nevertheless: {_some(measured)}")
    return faults


def _run(report: Mapping[str, Any]) -> list[str]:
    """What no run writes of itself."""
    if report["schema"] == OLD:
        return []
    faults = _fresh(report)
    if report["began"] > report["ended"]:
        faults.append(f"it ended at {report['ended']}, before it began at {report['began']}")
    if (package := report["backend"]["class"].partition(".")[0]) not in report["digests"]:
        faults.append(f"it does not say what code was run: it has no digest of {package}")
    history = report["history"]
    if not history or history[0]["kind"] != "run":
        faults.append("its history does not begin with a run")
    times = [report["began"], *(entry["at"] for entry in history)]
    if times[1:] and max(times[1:]) > report["ended"]:
        faults.append("its history goes on after its end")
    counted = sum(entry["cases"] - len(entry["replaced"]) for entry in history)
    ran = sum(result["status"] != "not-run" for result in report["results"])
    if ran > counted:
        faults.append(f"it has results of {ran} cases, and the runs of its history ran {counted}")
    busy = sum(result["seconds"] for result in report["results"])
    if busy > report["workers"] * report["seconds"] * SLACK + 1.0:
        faults.append(f"its cases took {busy:.0f} s, and {report['workers']} processes had {report['seconds']:.0f} s each")
    silent = [
        result["id"]
        for result in report["results"]
        if result["status"] in ("failed", "declared-unsupported", "not-run", "known-failure") and not result["message"]
    ]
    if silent:
        faults.append(f"{len(silent)} cases did not pass, and do not say why: {_some(silent)}")
    return faults


def _fresh(report: Mapping[str, Any]) -> list[str]:
    """What no run writes of its fresh cases: each has one seed, and a result for every case of it."""
    found = {result["id"] for result in report["results"]}
    seeds = fresh.seeds_of(found)
    if report["seeds"] != seeds:
        return [f"its seeds are {report['seeds']}, and those of its results {seeds}"]
    if report["selection"]:
        return []
    if len(seeds) != 1:
        return [f"it has fresh cases of {len(seeds)} seeds, and a run has those of one"]
    missing = [name for name in fresh.wanted(*seeds, report["profile"], report) if name not in found]
    return [f"it has no result of {len(missing)} fresh cases of its seed: {_some(missing)}"] if missing else []


SLACK = 1.1
"""Times of cases and of runs are taken by different clocks."""


def _some(names: list[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (", …" if len(names) > MOST_SHOWN else "")
