"""The benchmarks with names that run on a device: ``table``, ``grid``, ``scale`` and, there, ``overhead``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.errors import OptionError
from linattn.progress import bars
from linattn.suggestions import closest
from rich.console import Console

from . import grid, host, on_ranks, published, scale, sweep, warm
from .cases import Case
from .environment import accelerator, document, environment, keep, read
from .runners import RUNNERS
from .subjects import Subject
from .sweep import Entry, Progress, Row

DEFAULTS = {
    "table": {"device": "cuda", "dtype": "bf16", "gates": "mixed", "seconds": 0.2},
    "grid": {"device": "cuda", "dtype": "bf16", "gates": "model", "seconds": 0.2},
    "overhead": {"device": "cuda", "dtype": "bf16", "gates": "model", "seconds": 0.1},
    "scale": {"device": "cuda", "dtype": "bf16", "gates": "model", "seconds": 0.2},
}
"""What is not said, by command."""
PEERS = {
    "table": tuple(published.PEERS.values()),
    "grid": ("fla", "jla", "FlashQLA", "FlashInfer", "cuDNN"),
    "overhead": ("fla", "softmax (SDPA)"),
    "scale": (),
}
"""Who is timed beside, by command, where nobody is named."""
SAVED_EVERY = 5.0
"""Seconds after which the file is written again."""


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Attributes:
        settings: Of every case: device, dtypes, gates, seed.
        subjects: Backends and peers.
        seconds: Time to spend on the repeats of one call.
        check: Whether results are held against float64.
        budget: Seconds for everything; None without end.
        resume: A file of a run to go on with.
        rows: Patterns of names; empty for every row.
        warm: Processes that make first calls before anything is timed; 0 for none.
        out: Where the figures go.
        shapes: Sizes of a rank; empty for the usual ones.
        ranks: Numbers of ranks; empty for the usual ones.
    """

    settings: dict[str, Any]
    subjects: Sequence[Subject]
    seconds: float
    check: bool = True
    budget: float | None = None
    resume: Path | None = None
    rows: Sequence[str] = ()
    warm: int = 0
    out: Path | None = None
    shapes: Sequence[dict[str, int]] = ()
    ranks: Sequence[int] = ()


def table(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of a published table that is run again here."""
    if len(words) != 1:
        raise OptionError(f"table: expected one CSV file, got {', '.join(words) or 'none'}")
    settings = asked.settings | {"states": True}
    entries = published.read(Path(words[0]), settings)
    return swept("table", entries, settings | {"table": Path(words[0]).name}, asked, say)


def grid_of(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of families over heads and packings."""
    for family in words:
        if family not in grid.WIDTHS:
            close = closest(family, grid.WIDTHS)
            hint = f"did you mean {close!r}? " if close else ""
            raise OptionError(f"grid: unknown family {family!r}: {hint}known are {', '.join(grid.WIDTHS)}")
    return swept("grid", grid.entries(words, asked.settings), asked.settings, asked, say)


def overhead(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of what eager calls cost the host."""
    if words:
        raise OptionError(f"overhead takes no operators, got {', '.join(words)}")
    require(asked.settings["device"])

    def report(row: Row) -> None:
        figures = "  ".join(f"{label} {us:.0f} µs" for label, us in row["us"].items())
        say.print(f"{row['family']}  {row['way']}  {figures}", style="dim", highlight=False, markup=False, soft_wrap=True)
        bar.advance(task)

    if asked.warm:
        heat([*host.cases(asked.settings).values()], asked, say)
    with bars(say) as bar:
        task = bar.add_task("timing", total=len(host.cases(asked.settings)))
        found = document("host", host.run(asked.subjects, asked.settings, seconds=asked.seconds, report=report))
    if asked.out:
        keep(asked.out, found)
    return found


def scale_of(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of operators on several ranks."""
    require(asked.settings["device"])
    cases, sizes = scale.cases(words, asked.shapes, asked.settings)
    counts = scale.counts(asked.ranks, asked.settings["device"])
    backends = {subject.backend for subject in asked.subjects} - {"auto"}
    if len(asked.subjects) > 1:
        raise OptionError(f"scale: expected one --backend, got {', '.join(sorted(backends))}")
    here = environment()
    told = {name: asked.settings[name] for name in ("device", "dtype", "gate_dtype", "gates")}
    told |= {name: here[name] for name in ("accelerator", "processor", "cores", "load")}
    rows: list[Row] = []
    with bars(say) as bar:
        task = bar.add_task("timing", total=sum(len(cases) + 2 * (ranks > 1) for ranks in counts))
        for ranks in counts:
            rows += on_ranks.timed(cases, next(iter(backends), None), ranks, asked.seconds, lambda: bar.advance(task))
    found = document("scale", {"settings": told, "sizes": sizes, "rows": rows})
    if asked.out:
        keep(asked.out, found)
    return found


COMMANDS: dict[str, Callable[[Sequence[str], Asked, Console], dict[str, Any]]] = {
    "table": table,
    "grid": grid_of,
    "overhead": overhead,
    "scale": scale_of,
}


def require(device: str) -> None:
    """``OptionError`` where PyTorch has no such device here."""
    if reason := RUNNERS["torch"](device).refusal():
        raise OptionError(f"--device {device}: {reason}")


def swept(name: str, entries: Sequence[Entry], settings: dict[str, Any], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of rows that are timed one after another, kept up to date on the way."""
    started = time.monotonic()
    require(settings["device"])
    chosen = sweep.selected(entries, asked.rows)
    told = {key: x for key, x in settings.items() if key != "seed"} | {"accelerator": accelerator()}
    earlier = resumed(asked.resume, name, told) if asked.resume else []
    if asked.warm:
        heat([entry.case for entry in chosen], asked, say)
    saved = time.monotonic()

    def results(progress: Progress) -> dict[str, Any]:
        timed_elsewhere = [row for row in earlier if row["name"] not in {entry.name for entry in chosen}]
        rows = [*timed_elsewhere, *progress.rows]
        return document(name, {"settings": told, "left": progress.left, "refused": progress.refused, "rows": rows})

    def report(row: Row, label: str, progress: Progress) -> None:
        nonlocal saved
        found = row["found"][label]
        figure = f"{found['ms']} ms" if "ms" in found else found["reason"]
        say.print(
            f"{row['name']}  {label}  {found['status']}  {figure}", style="dim", highlight=False, markup=False, soft_wrap=True
        )
        if asked.out and time.monotonic() - saved > SAVED_EVERY:
            keep(asked.out, results(progress))
            saved = time.monotonic()
        bar.update(task, total=progress.calls, completed=progress.done)

    budget = None if asked.budget is None else asked.budget - (time.monotonic() - started)
    with bars(say) as bar:
        task = bar.add_task("timing", total=None)
        found = results(sweep.run(chosen, asked.subjects, asked.seconds, asked.check, budget, earlier, report))
    if asked.out:
        keep(asked.out, found)
    return found


def heat(cases: Sequence[Case], asked: Asked, say: Console) -> None:
    """Make first calls, and say how long they took."""
    started = time.monotonic()
    with bars(say) as bar:
        task = bar.add_task("first calls", total=None)
        count = warm.first_calls(cases, asked.subjects, asked.warm, lambda done, of: bar.update(task, completed=done, total=of))
    say.print(f"{count} first calls in {time.monotonic() - started:.0f} s", style="dim", highlight=False)


def resumed(path: Path, name: str, settings: dict[str, Any]) -> list[Row]:
    """The rows of a run that this one goes on with; ``OptionError`` if that was another benchmark or another setting."""
    content = read(path)
    if content["benchmark"] != name:
        raise OptionError(f"--resume {path}: expected results of {name}, got those of {content['benchmark']}")
    before = content["results"]["settings"]
    for key in settings:
        if before.get(key) != settings[key]:
            raise OptionError(f"--resume {path}: {key} was {before.get(key)} there, and is {settings[key]} now")
    return content["results"]["rows"]


SUCCEEDED = {"host": host.succeeded, "scale": scale.succeeded}


def succeeded(found: dict[str, Any]) -> bool:
    """Something of linattn's was timed, and nothing of it is wrong or failed."""
    if found["benchmark"] in SUCCEEDED:
        return SUCCEEDED[found["benchmark"]](found["results"])
    cells = [x for row in found["results"]["rows"] for label, x in row["found"].items() if published.ours(label)]
    return any(x["status"] == "ok" for x in cells) and not any(x["status"] in ("wrong", "failed") for x in cells)
