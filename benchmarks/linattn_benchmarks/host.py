"""What an eager call costs the host, where the device has next to nothing to do: ``linattn bench overhead --device cuda``.

Calls are queued one after another, a few at a time, and only the queueing is timed: the device is waited for in between. Of
these rounds the fastest counts, because whatever else the machine does only ever adds to it. A backward pass runs in autograd's
own thread, as a training step's does; without one, gradients are turned off once and not in every call. Each family is called
four ways, beside the peers that have them: forward; forward with backward; one token from a state, which is returned; one
token, its state overwritten. What a peer's autotuner would choose is not waited for.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from linattn.errors import Unsupported
from linattn.spec import DECODING

from . import fresh, tuning
from .cases import SWEPT, Case, complete
from .clocks import queueing_times
from .sections import Section
from .subjects import Subject

SIZES = {"B": 1, "T": 64, "H": 4, "K": 64, "V": 64, "C": 64}
WAYS = {
    "forward": ("chunk", "fwd"),
    "with backward": ("chunk", "fwdbwd"),
    "one token": ("recurrent", "decode"),
    "one token in place": ("decode", "decode"),
}
"""What is done, to the form that does it and a case's word for it."""

BOUNDS = {"forward": 80, "with backward": 350, "one token in place": 40}
"""Microseconds that ours are held to."""

CONFIGURATIONS = 1
"""That an autotuner may choose among: which it is makes no difference to the host."""

Row = dict[str, Any]


def run(
    cases: Mapping[tuple[str, str], Case],
    subjects: Sequence[Subject],
    seconds: float = 0.2,
    budget: float | None = None,
    earlier: Iterable[Row] = (),
    report: Callable[[Row, dict[str, Any]], None] = lambda row, results: None,
) -> dict[str, Any]:
    """Microseconds of a call, by family, way and subject.

    Args:
        cases: What is called, by family and way, in this order: of :func:`cases`.
        subjects: Backends and peers, whose arrays are PyTorch's; one after another through all rows.
        seconds: Time to spend on one figure.
        budget: Seconds after which no figure is begun; None without end.
        earlier: Rows of a run that this one goes on with; its figures are taken over, its failures are not.
        report: Called with the row after each figure, and with everything so far.
    """
    known = {(row["family"], row["way"]): row["us"] for row in earlier}
    rows = {key: {"family": key[0], "way": key[1], "us": dict(known.pop(key, {})), "failed": {}} for key in cases}
    others = [{"family": family, "way": way, "us": us, "failed": {}} for (family, way), us in known.items()]
    found = {"sizes": SIZES, "rows": [*others, *rows.values()]}
    end = math.inf if budget is None else time.monotonic() + budget
    with tempfile.TemporaryDirectory() as folder, tuning.together(Path(folder, "turns"), CONFIGURATIONS):
        for subject, (key, case) in itertools.product(subjects, cases.items()):
            if time.monotonic() < end and subject.label not in rows[key]["us"] and subject.refusal(case) is None:
                add(rows[key], case, subject, seconds)
                report(rows[key], found)
    return found


def cases(settings: dict[str, Any], families: Sequence[str] = ()) -> dict[tuple[str, str], Case]:
    """What is called, by family and way: each way of every family before the next; of all families where none is named."""
    found = {}
    for (way, (form, what)), family in itertools.product(WAYS.items(), families or SWEPT):
        if form != "decode" or family in DECODING:
            sizes = complete(SIZES | ({"T": 1} if what == "decode" else {}))
            found[family, way] = Case(f"{form}_{family}", what, tuple(sizes.items()), **settings)
    return found


def add(row: Row, case: Case, subject: Subject, seconds: float) -> None:
    """The figure of one more subject."""
    try:
        row["us"][subject.label] = round(microseconds(case, subject, seconds), 1)
    except Unsupported:  # no such form: a cell without a figure
        return
    except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
        row["failed"][subject.label] = f"{type(error).__name__}: {error}"[:400]


def microseconds(case: Case, subject: Subject, seconds: float) -> float:
    """Of the host, for one call, in the fastest round."""
    runner, arrays, pulled = fresh.prepared(case, subject)
    if pulled:
        return min(queueing_times(fresh.call_of(case, subject, runner, arrays, pulled), runner.wait, seconds)) * 1e3
    function, given = subject.function(case), subject.given(case, arrays)
    with runner.without_gradients():
        return min(queueing_times(lambda: function(given), runner.wait, seconds)) * 1e3


def sections(results: dict[str, Any]) -> list[Section]:
    """Of each way a table, families down and libraries across."""
    labels = list(dict.fromkeys(label for row in results["rows"] for label in (*row["us"], *row["failed"])))
    shape = " ".join(f"{symbol}{size}" for symbol, size in results["sizes"].items() if symbol != "C")
    found = []
    for way in WAYS:
        rows = [row for row in results["rows"] if row["way"] == way and (row["us"] or row["failed"])]
        lines = [(f"`{row['family']}`", *(cell(row, label) for label in labels)) for row in rows]
        if lines:
            bound = f", ours to be at most {BOUNDS[way]}" if way in BOUNDS else ""
            found.append(Section(f"{way}, µs of the host a call{bound}", ("family", *labels), lines))
    failed = [(row["family"], row["way"], label, text) for row in results["rows"] for label, text in row["failed"].items()]
    found[:1] = [found[0]._replace(note=f"{shape}; decoding takes one token.")] if found else []
    return found + ([Section("Failed", ("family", "way", "library", "reason"), failed)] if failed else [])


def cell(row: Row, label: str) -> str:
    """A figure, or why there is none."""
    return f"{row['us'][label]:.0f}" if label in row["us"] else "failed" if label in row["failed"] else "–"


def succeeded(results: dict[str, Any]) -> bool:
    """Something of linattn's was timed, and nothing of it failed."""
    timed = [label for row in results["rows"] for label in row["us"]]
    failed = [label for row in results["rows"] for label in row["failed"]]
    return any(label.startswith("linattn") for label in timed) and not any(label.startswith("linattn") for label in failed)
