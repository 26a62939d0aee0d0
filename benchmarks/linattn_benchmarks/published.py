"""A published table of times of the gated delta rule, run again here: ``linattn bench table FILE``.

FILE is CSV with the columns of :data:`COLUMNS`: for a row the pass, the model it is from, query/key and value heads, lengths
of packed sequences (``4096+28672``) and the milliseconds of each library, empty where it has none. Such tables come from
FlashQLA's benchmark, whose calls these are: ``K = V = 128``, always packed, an initial state given and the final one asked
for, gates of ``logsigmoid(x) / 16`` and none in a quarter of the heads, graphs replayed. Its "backward" is the backward pass
alone, from what a forward pass kept, the gradient of the final state among what is pulled back: at 16/32 heads and 8,192
tokens 0.79 ms beside 0.28 ms forward.

A peer that is installed is timed in the same run. Of one that is not, the published figure stands, and is marked.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from linattn.errors import OptionError

from . import packing
from .cases import Case, complete
from .sections import Heatmap, Section
from .sweep import Entry, Row
from .table import milliseconds

PEERS = {"flash_qla_ms": "FlashQLA", "flashinfer_ms": "FlashInfer", "fla_ms": "fla"}
"""Columns of times, to the peers whose they are."""
COLUMNS = ("pass", "model", "H", "HV", "sequence_lengths", *PEERS)
WHAT = {"forward": "fwd", "backward": "fwdbwd"}
OPERATOR = "chunk_gated_delta_rule"
WIDTH = 128
WORST = 10
"""Rows that are listed because they are furthest behind."""


# -- the file --------------------------------------------------------------------------------------------------------


def read(path: Path, settings: dict[str, Any]) -> list[Entry]:
    """The rows of a table.

    Args:
        path: Of the CSV file.
        settings: Of every :class:`.cases.Case`: device, dtypes, gates, seed, states.

    Raises:
        OptionError: The file is missing, has other columns, or a row that cannot be run; the line is named.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                got = ",".join(reader.fieldnames or ()) or "nothing"
                raise OptionError(f"{path}: expected the columns {','.join(COLUMNS)}, got {got}")
            lines = [(reader.line_num, line) for line in reader]
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror}") from error
    if not lines:
        raise OptionError(f"{path}: expected rows after the header, got none")
    entries: dict[str, Entry] = {}
    for number, line in lines:
        try:
            entry = entry_of(line, settings)
        except ValueError as error:
            raise OptionError(f"{path}, line {number}: {error}") from error
        if entry.name in entries:
            raise OptionError(f"{path}, line {number}: {entry.name} is there twice")
        entries[entry.name] = entry
    return list(entries.values())


def entry_of(line: dict[str, Any], settings: dict[str, Any]) -> Entry:
    """One row; ``ValueError`` if it is none."""
    if None in line or None in line.values():
        raise ValueError(f"expected {len(COLUMNS)} cells")
    if line["pass"] not in WHAT:
        raise ValueError(f"pass must be forward or backward, got {line['pass']!r}")
    H, HV = (heads(line, name) for name in ("H", "HV"))
    if HV % H:
        raise ValueError(f"HV must be a multiple of H, got H={H} and HV={HV}")
    lengths = packing.parsed(line["sequence_lengths"])
    sizes = complete({"B": 1, "T": sum(lengths), "H": H, "HV": HV, "K": WIDTH, "V": WIDTH})
    case = Case(OPERATOR, WHAT[line["pass"]], tuple(sizes.items()), lengths=lengths, **settings)
    fields = {name: line[name] for name in ("pass", "model")} | {"H": H, "HV": HV, "sequence_lengths": packing.spelled(lengths)}
    name = f"{line['pass']} {H}/{HV} {packing.name(lengths)}"
    return Entry(name, case, fields, line["pass"] == "backward", published(line))


def heads(line: dict[str, str], name: str) -> int:
    """A number of heads."""
    if not line[name].isdecimal() or int(line[name]) < 1:
        raise ValueError(f"{name} must be a positive whole number, got {line[name]!r}")
    return int(line[name])


def published(line: dict[str, str]) -> dict[str, float]:
    """Milliseconds by library."""
    found = {}
    for column, library in PEERS.items():
        if not line[column]:
            continue
        try:
            found[library] = float(line[column])
        except ValueError:
            raise ValueError(f"{column} must be a number, got {line[column]!r}") from None
        if not 0 < found[library] < float("inf"):
            raise ValueError(f"{column} must be a positive number, got {line[column]!r}")
    return found


# -- what came of it -------------------------------------------------------------------------------------------------


def measured(row: Row, name: str) -> float | None:
    """Milliseconds of a library in this run; None where it has no right time."""
    found = row["found"].get(name)
    return found["ms"] if found and found["status"] == "ok" else None


def best_peer(row: Row) -> tuple[str, float, bool] | None:
    """The fastest peer, its milliseconds, and whether they were measured in this run; None without a peer."""
    here = {name: ms for name in row["found"] if not ours(name) and (ms := measured(row, name)) is not None}
    times = {**row["published"], **here}
    name = min(times, key=lambda name: times[name], default=None)
    return None if name is None else (name, times[name], name in here)


def ours(label: str) -> bool:
    """Whether a label is one of linattn's backends."""
    return label.startswith("linattn")


def ratio(row: Row, label: str) -> float | None:
    """Time of a subject over the best peer's; None where one of them has no right time."""
    ms, peer = measured(row, label), best_peer(row)
    return None if ms is None or peer is None else ms / peer[1]


def labels(rows: Iterable[Row]) -> list[str]:
    """Those of linattn's backends that were timed."""
    return list(dict.fromkeys(label for row in rows for label in row["found"] if ours(label)))


def kind(row: Row) -> str:
    """The head counts."""
    return f"{row['H']}/{row['HV']}"


def packed(row: Row) -> str:
    """The name of the packing."""
    return packing.name(packing.parsed(row["sequence_lengths"]))


def sections(results: dict[str, Any]) -> list[Section]:
    """Of each pass the ratio to the best peer by group, in a line all passes, then the rows furthest behind."""
    rows, found = results["rows"], []
    for label in labels(rows):
        compared = [row for row in rows if ratio(row, label) is not None]
        if not compared:
            continue
        passes = {what: [row for row in compared if row["pass"] == what] for what in WHAT}
        passes = {what: mine for what, mine in passes.items() if mine}
        found += [summary(passes, label), *beside_published(passes, label)]
        found += [by_group(what, mine, label) for what, mine in passes.items()]
        found.append(worst(compared, label))
    return [*found, *troubles(results)]


def summary(passes: dict[str, list[Row]], label: str) -> Section:
    """One line a pass."""
    lines = []
    for what, rows in passes.items():
        ratios = [ratio(row, label) for row in rows]
        furthest = max(rows, key=lambda row: ratio(row, label))
        here = sum(best_peer(row)[2] for row in rows)
        mean, ahead = statistics.geometric_mean(ratios), sum(x < 1 for x in ratios)
        lines.append((what, f"{mean:.2f}", f"{ahead} of {len(rows)}", f"{max(ratios):.2f}", furthest["name"], f"{here}"))
    head = ("pass", "geometric mean", "rows ahead", "worst", "there", "best peers measured here")
    return Section(f"{label}: time over the best peer's", head, lines, said_of_peers(list(itertools.chain(*passes.values()))))


def beside_published(passes: dict[str, list[Row]], label: str) -> list[Section]:
    """Times of each library over what is published of it, ours over the best that is; nothing where no peer was timed."""
    found = {}
    for what, rows in passes.items():
        for name in (*PEERS.values(), label):
            pairs = [(measured(row, name), reference(row, name)) for row in rows]
            found[what, name] = [ms / of for ms, of in pairs if ms is not None and of is not None]
    lines = [
        (*about, *(f"{of(x):.2f}" for of in (statistics.geometric_mean, min, max)), f"{sum(r < 1 for r in x)} of {len(x)}")
        for about, x in found.items()
        if x
    ]
    head = ("pass", "library", "geometric mean", "least", "most", "rows below 1")
    title, note = f"{label} and peers: time over what is published", "linattn's over the best published figure of each row"
    return [Section(title, head, lines, note)] if any(name != label for _, name, *_ in lines) else []


def reference(row: Row, name: str) -> float | None:
    """The published figure that a library's time is held against; None where there is none."""
    return min(row["published"].values(), default=None) if ours(name) else row["published"].get(name)


def said_of_peers(rows: Sequence[Row]) -> str:
    """Whose figures the peers' are."""
    here = {best_peer(row)[2] for row in rows}
    if here == {True}:
        return "Every best peer was measured in this run."
    return "Every peer's figure is the published one." if here == {False} else "* the best peer's figure is the published one"


def pivot(rows: Sequence[Row], value: Callable[[Row], Any]) -> tuple[list[str], list[str], dict[tuple[str, str], Any]]:
    """Packings, head counts, and a value for each pair that has a row."""
    packings, kinds = (list(dict.fromkeys(map(group, rows))) for group in (packed, kind))
    return packings, kinds, {(packed(row), kind(row)): value(row) for row in rows}


def by_group(what: str, rows: Sequence[Row], label: str) -> Section:
    """Ratios, packings down and head counts across, with the geometric mean of each group."""
    marked = len({best_peer(row)[2] for row in rows}) > 1

    def text(row: Row) -> str:
        return f"{ratio(row, label):.2f}" + ("*" if marked and not best_peer(row)[2] else "")

    def mean(group: Callable[[Row], str], name: str) -> str:
        return f"{statistics.geometric_mean([ratio(row, label) for row in rows if group(row) == name]):.2f}"

    packings, kinds, cells = pivot(rows, text)
    lines = [(name, *(cells.get((name, heads), "–") for heads in kinds), mean(packed, name)) for name in packings]
    last = ("mean", *(mean(kind, heads) for heads in kinds), mean(lambda row: "", ""))
    return Section(f"{label}, {what}", ("packing", *kinds, "mean"), [*lines, last])


def heatmaps(results: dict[str, Any]) -> Iterator[Heatmap]:
    """The ratios of each pass."""
    for label in labels(results["rows"]):
        for what in WHAT:
            rows = [row for row in results["rows"] if row["pass"] == what and ratio(row, label) is not None]
            if rows:
                yield f"{label}, {what}: time over the best peer's", *pivot(rows, lambda row: ratio(row, label))  # noqa: B023


def worst(rows: Sequence[Row], label: str) -> Section:
    """The rows furthest behind."""
    lines = []
    for row in sorted(rows, key=lambda row: ratio(row, label), reverse=True)[:WORST]:
        name, ms, here = best_peer(row)
        found = row["found"][label]
        lines.append(
            (row["name"], milliseconds(found["ms"]), milliseconds(ms), name + ("" if here else "*"), f"{ratio(row, label):.2f}")
        )
    return Section(f"{label}: the rows furthest behind", ("row", "ms", "best peer, ms", "", "ratio"), lines, "* published")


def troubles(results: dict[str, Any]) -> list[Section]:
    """What failed or was wrong, what was not called, and what the budget left."""
    lines = [
        (row["name"], label, x["status"], x.get("reason", f"error {x.get('error')}"))
        for row in results["rows"]
        for label, x in row["found"].items()
        if x["status"] != "ok"
    ]
    lines += [("", label, "skipped", reason) for label, reasons in results["refused"].items() for reason in reasons]
    left = f"The budget left {results['left']} calls untimed: --resume goes on with them." if results["left"] else ""
    return [Section("Not timed, or not right", ("row", "library", "", "reason"), lines, left)] if lines or left else []
