"""The general benchmark: any operators, shapes, backends and peers, one row of figures for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from linattn.errors import Unsupported

from . import ceilings, checks, fresh, table
from .cases import Case
from .clocks import spread
from .environment import installed
from .floors import floor
from .subjects import Linattn, Peer, Subject

Row = dict[str, Any]

STATUS = ("ok", "wrong", "skipped", "failed")
"""``wrong``: it ran, and its results are beyond the bound. ``skipped``: it was not called, and ``reason`` says why."""


def run(
    cases: Sequence[Case],
    subjects: Sequence[Subject],
    seconds: float = 1.0,
    fresh_process: bool = True,
    report: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Time every subject on every case.

    Args:
        cases: All on one device and in one dtype.
        subjects: Backends and peers.
        seconds: Time to spend on the repeats of one row.
        fresh_process: Also time the first call, and look at the memory, in a process of its own.
        report: Called with the results so far after each row, which is their last.
    """
    measured = ceilings.measure(cases[0].device, cases[0].dtype)
    rows: list[Row] = []
    results = {"ceilings": measured, "rows": rows}
    for case, subject in ((case, subject) for case in cases for subject in subjects):
        rows.append(one_row(case, subject, measured, seconds, fresh_process))
        report(results)
    return results


def one_row(case: Case, subject: Subject, measured: dict[str, Any], seconds: float, fresh_process: bool) -> Row:
    """The figures of one subject on one case, or why there are none."""
    row = empty_row(case, subject, measured)
    try:
        reason = subject.refusal(case)
        if reason:
            return row | {"status": "skipped", "reason": reason}
        row |= figures(case, subject, seconds)
    except Unsupported as error:
        return row | {"status": "skipped", "reason": str(error)}
    except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
        return row | {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:400]}
    row["ratio"] = table.ratio(row)
    if fresh_process:
        row |= fresh.first_call(case, subject)
    return row


def empty_row(case: Case, subject: Subject, measured: dict[str, Any]) -> Row:
    """What is known before anything runs; every row has these fields."""
    return {
        "operator": case.operator,
        "what": case.what,
        "library": subject.library,
        "version": installed(subject.distribution if isinstance(subject, Peer) else "linattn"),
        "backend": subject.backend,
        "ran": None,
        "case": case.as_json(),
        "label": case.label,
        "status": "ok",
        "reason": None,
        "note": None,
        "ms": None,
        "graph_ms": None,
        "floor": floor(case, measured),
        "ratio": None,
        "error": None,
        **fresh.nothing(),
    }


def figures(case: Case, subject: Subject, seconds: float) -> Row:
    """Run, check and time it."""
    runner, arrays, pulled = fresh.prepared(case, subject)
    found: Row = {"note": subject.note(case)}
    if isinstance(subject, Linattn):
        if case.what == "fwdbwd" and runner.name == "numpy":
            raise Unsupported("NumPy arrays carry no gradient")
        found["ran"] = subject.plan(case, arrays)
    call = fresh.call_of(case, subject, runner, arrays, pulled)
    if subject.checked:
        found["error"] = checks.check(case, runner, arrays, pulled, call)
        found["status"] = "ok" if found["error"]["ok"] else "wrong"
    found["ms"] = spread(runner.times(call, seconds))
    if times := runner.graph_times(call):
        found["graph_ms"] = spread(times)
    if (peak := runner.peak(call)) is not None:
        found |= {"peak_bytes": peak, "peak_of": "device allocator"}
    return found


def succeeded(rows: Iterable[Row]) -> bool:
    """No row of linattn's is wrong or failed, and one at least was timed."""
    ours = [row for row in rows if row["library"] == "linattn"]
    return any(row["status"] == "ok" for row in ours) and not any(row["status"] in ("wrong", "failed") for row in ours)
