"""Many shapes, each timed on the device alone: what a published table and a grid have in common.

A call is recorded as a graph and replayed, each time on another copy of its arrays, so many that none is in a cache; where
nothing can be recorded, by the framework's usual clock. Forward passes keep nothing for a backward pass. A backward pass
alone is a forward and backward pass less a forward pass that keeps what gradients need, both timed the same way.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from linattn.errors import OptionError, Unsupported

from . import checks, fresh
from .cases import Case
from .runners import Arrays, Call, Pulled, Runner
from .subjects import Linattn, Subject

Row = dict[str, Any]
"""What identifies a row of the table, then ``published`` (milliseconds by library) and ``found`` (:func:`timed`, by label)."""

RESERVE = 5.0
"""Seconds of a budget that are left for writing and showing what was found."""
AGAIN = ("failed",)
"""What is timed once more when a run goes on."""


@dataclass(frozen=True)
class Entry:
    """One row before it is timed.

    Attributes:
        name: Identifies it, for people and patterns, e.g. ``"forward 2/8 4096+28672"``.
        case: What is called.
        fields: What its row says of it.
        backward_alone: Whether the forward pass is subtracted.
        published: Milliseconds that others published, by library.
    """

    name: str
    case: Case
    fields: Row
    backward_alone: bool = False
    published: dict[str, float] = field(default_factory=dict)

    def row(self) -> Row:
        """The row, with nothing found."""
        return {"name": self.name, **self.fields, "published": self.published, "found": {}}


@dataclass
class Progress:
    """What came of a run so far.

    Attributes:
        rows: One for each entry.
        refused: Why a subject was not called, by its label.
        left: How many calls the budget left untimed.
        calls: How many there are to come or done, without those that were timed before.
        done: How many of them are.
    """

    rows: list[Row]
    refused: dict[str, list[str]] = field(default_factory=dict)
    left: int = 0
    calls: int = 0
    done: int = 0


def selected(entries: Sequence[Entry], patterns: Sequence[str]) -> list[Entry]:
    """The entries whose names match one of the patterns, as in a shell; all of them without patterns."""
    for pattern in patterns:
        if not any(fnmatchcase(entry.name, pattern) for entry in entries):
            raise OptionError(f"--rows {pattern}: no row has such a name; the first is {entries[0].name!r}")
    return [entry for entry in entries if not patterns or any(fnmatchcase(entry.name, pattern) for pattern in patterns)]


def begun(entries: Sequence[Entry], earlier: Iterable[Row]) -> list[Row]:
    """A row of each entry, with what an earlier run has timed of it."""
    known = {row["name"]: row["found"] for row in earlier}
    rows = [entry.row() for entry in entries]
    for row in rows:
        row["found"] |= {label: x for label, x in known.get(row["name"], {}).items() if x["status"] not in AGAIN}
    return rows


def due(entries: Sequence[Entry], rows: Sequence[Row], subjects: Sequence[Subject]) -> list[tuple[Entry, Row, Subject]]:
    """What of rows is to be timed, in this order."""
    return [
        (entry, row, subject)
        for entry, row in zip(entries, rows, strict=True)
        for subject in subjects
        if subject.label not in row["found"]
    ]


def run(
    entries: Sequence[Entry],
    subjects: Sequence[Subject],
    seconds: float,
    check: bool,
    budget: float | None = None,
    earlier: Iterable[Row] = (),
    report: Callable[[Row, str, Progress], None] = lambda row, label, progress: None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Time every subject on every entry.

    Args:
        entries: In this order.
        subjects: Backends and peers.
        seconds: Time to spend on the repeats of one call.
        check: Whether results are held against float64 first.
        budget: Seconds after which nothing more is begun, :data:`RESERVE` seconds and one more call before they are over.
        earlier: Rows of a run that this one goes on with; what they timed is taken over, failures are not.
        report: Called with the row, the subject's label and everything so far after each call.
        clock: In seconds.
    """
    started = before = clock()
    progress = Progress(begun(entries, earlier))
    pending = due(entries, progress.rows, subjects)
    progress.calls = progress.left = len(pending)
    for place, (entry, row, subject) in enumerate(pending):
        now = clock()
        if budget is not None and now - started + (now - before) + RESERVE > budget:  # as long as the last one took
            break
        before = now
        progress.left = len(pending) - place - 1
        if reason := subject.refusal(entry.case):
            reasons = progress.refused.setdefault(subject.label, [])
            reasons += [] if reason in reasons else [reason]
            continue
        row["found"][subject.label] = timed(entry, subject, seconds, check)
        progress.done = place + 1
        report(row, subject.label, progress)
    return progress


def timed(entry: Entry, subject: Subject, seconds: float, check: bool) -> Row:
    """``status``, one of :data:`.operators.STATUS`, and ``ms``, its ``spread`` and the largest ``error``, or the ``reason``."""
    try:
        return figures(entry, subject, seconds, check)
    except Unsupported as error:
        return {"status": "skipped", "reason": str(error)}
    except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:400]}


def figures(entry: Entry, subject: Subject, seconds: float, check: bool) -> Row:
    """Run, check and time it."""
    case = entry.case
    runner, arrays, pulled = fresh.prepared(case, subject)
    found: Row = {"status": "ok"}
    if isinstance(subject, Linattn):
        found["ran"] = subject.plan(case, arrays)
    if check and subject.checked:
        error = checks.check(case, runner, arrays, pulled, fresh.call_of(case, subject, runner, arrays, pulled))
        found |= {"status": "ok" if error["ok"] else "wrong", "error": error["worst"] and rounded(error["worst"], 2)}
    copies = [parted(copy, pulled) for copy in runner.copies({**arrays, **pulled})]
    times = device_times(runner, [fresh.call_of(case, subject, runner, *copy) for copy in copies], seconds)
    ms, width = median(times), spread(times)
    if entry.backward_alone:
        function = subject.function(case)
        calls = [runner.forward_kept(function, subject.given(case, given)) for given, _ in copies]
        kept = device_times(runner, calls, seconds)
        found["with_forward"] = rounded(ms)
        ms, width = ms - median(kept), max(width, spread(kept))
        del calls
    del copies, arrays, pulled
    runner.release()
    return found | {"ms": rounded(ms), "spread": rounded(width, 2)}


def parted(copy: Arrays, pulled: Pulled) -> tuple[Arrays, Pulled]:
    """The arguments of a call, and the gradients of its outputs, which no argument is named like."""
    return {name: x for name, x in copy.items() if name not in pulled}, {name: copy[name] for name in pulled}


def device_times(runner: Runner, calls: Sequence[Call], seconds: float) -> list[float]:
    """Milliseconds of a call, which is each of ``calls`` in turn: of graph replays where it can be recorded."""
    following = itertools.cycle(calls)
    call = calls[0] if len(calls) == 1 else lambda: next(following)()
    return runner.graph_times(call, seconds) or runner.times(call, seconds)


def median(times: Sequence[float]) -> float:
    """The middle."""
    return statistics.median(times)


def spread(times: Sequence[float]) -> float:
    """From the tenth to the ninetieth percentile, relative to the median."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / median(times)


def rounded(x: float, digits: int = 4) -> float:
    """What a file keeps."""
    return float(f"{x:.{digits}g}")
