"""What an eager call costs the host, where the device has next to nothing to do: ``linattn bench overhead --device cuda``.

Calls are queued one after another, a few at a time, and only the queueing is timed: the device is waited for in between. A
backward pass runs in autograd's own thread, as a training step's does. Each family is called four ways, beside the peers that
have them: forward; forward with backward; one token from a state, which is returned; one token, its state overwritten. What a
peer's autotuner would choose is not waited for.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linattn.errors import Unsupported
from linattn.spec import DECODING

from . import fresh, tuning
from .cases import TIMED, Case, complete
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

CONFIGURATIONS = 1
"""That an autotuner may choose among: which it is makes no difference to the host."""

Row = dict[str, Any]


def run(
    subjects: Sequence[Subject],
    settings: dict[str, Any],
    families: Sequence[str] = (),
    seconds: float = 0.1,
    budget: float | None = None,
    report: Callable[[Row, dict[str, Any]], None] = lambda row, results: None,
) -> dict[str, Any]:
    """Microseconds of a call, by family, way and subject.

    Args:
        subjects: Backends and peers, whose arrays are PyTorch's.
        settings: Of every case: device, dtypes, gates, seed.
        families: Those of :data:`~linattn_benchmarks.cases.TIMED` by default.
        seconds: Time to spend on one figure.
        budget: Seconds after which no row is begun; None without end.
        report: Called with each row as it is done, and with everything so far.
    """
    rows: list[Row] = []
    found = {"sizes": SIZES, "settings": settings, "rows": rows}
    end = math.inf if budget is None else time.monotonic() + budget
    with tempfile.TemporaryDirectory() as folder, tuning.together(Path(folder, "turns"), CONFIGURATIONS):
        for (family, way), case in cases(settings, families).items():
            if time.monotonic() < end:
                rows.append({"family": family, "way": way, **one_row(case, subjects, seconds)})
                report(rows[-1], found)
    return found


def cases(settings: dict[str, Any], families: Sequence[str] = ()) -> dict[tuple[str, str], Case]:
    """What is called, by family and way."""
    found = {}
    for family in families or TIMED:
        for way, (form, what) in WAYS.items():
            if form != "decode" or family in DECODING:
                sizes = complete(SIZES | ({"T": 1} if what == "decode" else {}))
                found[family, way] = Case(f"{form}_{family}", what, tuple(sizes.items()), **settings)
    return found


def one_row(case: Case, subjects: Sequence[Subject], seconds: float) -> Row:
    """One call by everybody who has it."""
    row: Row = {"us": {}, "failed": {}}
    for subject in subjects:
        if subject.refusal(case) is None:
            try:
                row["us"][subject.label] = round(microseconds(case, subject, seconds), 1)
            except Unsupported:  # no such form: a cell without a figure
                continue
            except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
                row["failed"][subject.label] = f"{type(error).__name__}: {error}"[:400]
    return row


def microseconds(case: Case, subject: Subject, seconds: float) -> float:
    """Of the host, for one call: the median."""
    runner, arrays, pulled = fresh.prepared(case, subject)
    call = fresh.call_of(case, subject, runner, arrays, pulled)
    return statistics.median(queueing_times(call, runner.wait, seconds)) * 1e3


def sections(results: dict[str, Any]) -> list[Section]:
    """Of each way a table, families down and libraries across."""
    labels = list(dict.fromkeys(label for row in results["rows"] for label in (*row["us"], *row["failed"])))
    shape = " ".join(f"{symbol}{size}" for symbol, size in results["sizes"].items() if symbol != "C")
    found = []
    for way in WAYS:
        rows = [row for row in results["rows"] if row["way"] == way]
        lines = [(f"`{row['family']}`", *(cell(row, label) for label in labels)) for row in rows]
        if lines:
            found.append(Section(f"{way}, µs of the host a call", ("family", *labels), lines))
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
