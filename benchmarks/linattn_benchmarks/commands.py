"""The benchmarks of ``linattn bench``, each from the words and flags that it was given."""

from __future__ import annotations

import importlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.errors import OptionError
from linattn.ops._family import operator_named
from linattn.progress import bars
from linattn.suggestions import closest
from rich.console import Console

from . import beside, costs, grid, host, merging, on_ranks, parts, published, rows, scale, sweep, tuning, warm
from .cases import DECODE_SHAPES, DEFAULT_SHAPES, WHAT, cases, parse_shape, timed_operator
from .ceilings import measure
from .environment import accelerator, document, environment, keep, read, write
from .runners import RUNNERS
from .subjects import Subject
from .sweep import Entry, Progress, Row

SAVED_EVERY = 1.0
"""Seconds after which the file is written again."""
SPOKEN_EVERY = 5.0
"""Seconds after which it is said, where no bar is seen, how many first calls are made."""


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Attributes:
        settings: Of every case: device, dtypes, gates, seed.
        subjects: Backends and peers.
        seconds: Time to spend on the repeats of one call.
        check: Whether results are held against float64.
        fresh: Whether first calls and memory of operators are looked at in fresh processes.
        budget: Seconds for everything, half of them for what ``warm`` does; of layers and models for one library's first calls;
            None without end.
        resume: A file of a run to go on with.
        rows: Patterns of names; empty for every row.
        warm: Processes that make first calls at once, before anything is timed; 0 for none.
        out: Where the figures go.
        shape: Sizes as ``--shape`` has them; None for the usual ones.
        ranks: Numbers of ranks; empty for the usual ones.
        graph: Whether calls of ranks are also recorded as CUDA graphs.
        what: What is done with layers and models; None for everything.
        modes: Eager, compiled, replayed; None for the first two.
        peers: The libraries beside linattn; None for every one.
        small: Whether at reduced sizes.
        layers: Layers of a model.
        tune: Configurations that the autotuner of a peer's kernel may choose among; None for all.
    """

    settings: dict[str, Any]
    subjects: Sequence[Subject]
    seconds: float
    check: bool = True
    fresh: bool = True
    budget: float | None = None
    resume: Path | None = None
    rows: Sequence[str] = ()
    warm: int = 0
    out: Path | None = None
    shape: Sequence[str] | None = None
    ranks: Sequence[int] = ()
    graph: bool = False
    what: str | None = None
    modes: str | None = None
    peers: Sequence[str] | None = None
    small: bool = False
    layers: int = 4
    tune: int | None = None


def operators(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of operators, kept up to date on the way: that of a run that is cut off is there too."""
    from .operators import run
    from .table import cells

    shapes = asked.shape or default_shapes(words, asked.settings["device"])
    chosen = wanted_cases(words, asked.what or "fwd,fwdbwd", shapes, asked.settings)

    def report(results: dict[str, Any]) -> None:
        line = "  ".join(filter(None, cells(results["rows"][-1])))
        say.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        if asked.out:
            write(asked.out, "operators", results)
        bar.advance(task)

    with bars(say) as bar:
        task = bar.add_task("timing", total=len(chosen) * len(asked.subjects))
        return document("operators", run(chosen, asked.subjects, asked.seconds, asked.fresh, report))


def wanted_cases(operators: Sequence[str], what: str, shapes: Sequence[str], settings: dict[str, Any]) -> Any:
    """Every combination of operators, shapes and what to do."""
    for name in operators:
        timed_operator(name)
    whats = [one_of("--what", part.strip(), WHAT) for part in what.split(",")]
    return cases(operators, whats, [sizes for text in shapes for sizes in parse_shape(text)], **settings)


def default_shapes(operators: Sequence[str], device: str) -> Sequence[str]:
    """For a kind of device; those of decoding if nothing else is timed."""
    known = DECODE_SHAPES if all(operator_named(name).form == "decode" for name in operators) else DEFAULT_SHAPES
    return known.get(device, known["cpu"])


def report(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """One results file of several."""
    if not words:
        raise OptionError("report: name at least one results file")
    found = merging.merged({path: merging.to_report(Path(path)) for path in words})
    if asked.out:
        keep(asked.out, found)
    return found


def import_and_dispatch(words: Sequence[str], asked: Asked, say: Console) -> None:
    """Say or write what importing and dispatching cost."""
    from .overhead import run

    say_or_write("overhead", words, run, asked.out)


def torch_cpu(words: Sequence[str], asked: Asked, say: Console) -> None:
    """Say or write how the PyTorch backend compares with ``torch.bmm``."""
    try:
        from .torch_cpu import run
    except ImportError as error:
        raise OptionError(f"torch-cpu cannot run: {error}; pip install 'linattn[torch,bench]'") from error
    say_or_write("torch-cpu", words, run, asked.out)


def say_or_write(name: str, words: Sequence[str], run: Callable[[], dict[str, Any]], out: Path | None) -> None:
    """Run a benchmark that takes no words and has no table, and say what it found, or where that was written."""
    if words:
        raise OptionError(f"{name} takes no operators, got {', '.join(words)}")
    with bars() as bar:
        bar.add_task("measuring", total=None)
        results = run()
    if out:
        write(out, name, results)
        print(f"wrote {out}")
    else:
        print(rows.text(results), end="")


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
        choice("grid: unknown family", family, grid.WIDTHS)
    return swept("grid", grid.entries(words, asked.settings), asked.settings, asked, say)


def eager_calls(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of what eager calls cost the host."""
    families = [choice("overhead: unknown family", word, host.SWEPT) for word in words]
    require(asked.settings["device"])
    told = {key: x for key, x in asked.settings.items() if key != "seed"} | {"accelerator": accelerator()}
    earlier = resumed(asked.resume, "host", told) if asked.resume else []
    chosen = host.cases(asked.settings, families)
    started = time.monotonic()

    def report(row: Row, results: dict[str, Any]) -> None:
        figures = "  ".join(f"{label} {us:.0f} µs" for label, us in row["us"].items())
        say.print(f"{row['family']}  {row['way']}  {figures}", style="dim", highlight=False, markup=False, soft_wrap=True)
        bar.advance(task)
        if asked.out:
            keep(asked.out, document("host", {"settings": told, **results}))

    if asked.warm:
        heat(warm.of_cases(itertools.product(chosen.values(), asked.subjects)), asked, say, host.CONFIGURATIONS)
    budget = None if asked.budget is None else asked.budget - (time.monotonic() - started)
    with bars(say) as bar:
        task = bar.add_task("timing", total=len(chosen) * len(asked.subjects))
        results = host.run(chosen, asked.subjects, asked.seconds, budget, earlier, report)
    found = document("host", {"settings": told, **results})
    if asked.out:
        keep(asked.out, found)
    return found


def scale_of(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of operators on several ranks."""
    require(asked.settings["device"])
    shapes = [sizes for text in asked.shape or () for sizes in parse_shape(text)]
    families = [choice("scale: unknown family", word, costs.FAMILIES) for word in words]
    cases, sizes = scale.cases(families, shapes, asked.settings)
    counts = scale.counts(asked.ranks, asked.settings["device"])
    backends = {subject.backend for subject in asked.subjects} - {"auto"}
    if len(asked.subjects) > 1:
        raise OptionError(f"scale: expected one --backend, got {', '.join(sorted(backends))}")
    here, device, backend = environment(), asked.settings["device"], next(iter(backends), None)
    if asked.graph and device != "cuda":
        raise OptionError(f"--graph: expected --device cuda, whose calls can be recorded, got {device}")
    told = {name: asked.settings[name] for name in ("device", "dtype", "gate_dtype", "gates")} | {"sizes": sizes}
    told |= {name: here[name] for name in ("accelerator", "processor", "cores")}
    told |= {"graph": True} if asked.graph else {}
    earlier = resumed(asked.resume, "scale", told) if asked.resume else []
    left = on_ranks.jobs(cases, counts, earlier)
    until = None if asked.budget is None else time.time() + asked.budget - on_ranks.GRACE
    ceilings = measure(device, told["dtype"])
    RUNNERS["torch"](device).release()
    rows: list[Row] = [*earlier]

    def results() -> dict[str, Any]:
        return document(
            "scale", {"settings": told | {"load": here["load"]}, "sizes": sizes, "ceilings": ceilings, "rows": rows}
        )

    if asked.warm:
        started, half = time.time(), None if asked.budget is None else time.time() + asked.budget / 2
        made = on_ranks.first_calls(left, device, backend, asked.warm, half)
        say.print(f"{made} first calls in {time.time() - started:.0f} s", style="dim", highlight=False)
    with bars(say) as bar:
        task = bar.add_task("timing", total=len(left))
        for row in on_ranks.rows(left, device, backend, asked.seconds, until, asked.graph):
            rows.append(row)
            if asked.out:
                keep(asked.out, results())
            bar.advance(task)
    return results()


def parts_of(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of what stands around the operators, and of operators that take it in."""
    started = time.monotonic()
    require(asked.settings["device"])
    try:
        timed: Any = importlib.import_module(f"{__package__}.parts_timed")
    except ImportError as error:
        raise OptionError(f"parts cannot run: {error}; pip install 'linattn[torch,bench]'") from error
    chosen = timed.selected(timed.at_small_sizes() if asked.small else timed.at_real_sizes(), words, asked.rows)
    device, seed = asked.settings["device"], asked.settings["seed"]
    if asked.warm:
        heat(timed.first_calls(chosen, device, seed, asked.peers, asked.check), asked, say, asked.tune)
    told = {"device": device, "small": asked.small, "tune": asked.tune, "accelerator": accelerator()}

    def report(results: dict[str, Any]) -> None:
        row = results["rows"][-1]
        figure = row["reason"] or f"{row['ms']} ms"
        line = f"{row['part']} {row['label']} {row['dtype']}  {row['what']}  {row['library']}  {row['status']}  {figure}"
        say.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        if asked.out:
            keep(asked.out, document("parts", {"settings": told, **results}))
        bar.advance(task)

    with bars(say) as bar, tempfile.TemporaryDirectory() as folder, tuning.together(Path(folder) / "turns", asked.tune):
        task = bar.add_task("timing", total=sum(len(part.whats) * len(part.ways) for part in chosen))
        end = None if asked.budget is None else started + asked.budget - sweep.RESERVE
        results = timed.run(chosen, device, seed, asked.seconds, asked.peers, asked.check, report, end)
    if left := len(chosen) - len({(row["part"], row["label"], row["dtype"]) for row in results["rows"]}):
        say.print(f"the budget left {left} of {len(chosen)} parts untimed", style="dim", highlight=False)
    return document("parts", {"settings": told, **results})


def layer(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of token mixers beside other libraries'."""
    return side_by_side("layer", words, asked, say)


def model(words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of models of transformers, run several ways."""
    if not words:
        raise OptionError(f"model: name at least one of {', '.join(importlib.import_module(beside.BENCHMARKS['model']).NAMES)}")
    return side_by_side("model", words, asked, say)


def side_by_side(name: str, words: Sequence[str], asked: Asked, say: Console) -> dict[str, Any]:
    """The results file of layers or models, library after library, kept up to date on the way."""
    require(asked.settings["device"])
    jobs = jobs_of(name, words, asked)
    told = {key: x for key, x in asked.settings.items() if key in ("device", "dtype")}
    told |= {"small": asked.small, "tune": asked.tune} | ({"layers": asked.layers} if name == "model" else {})
    rows: list[Row] = []

    def results() -> dict[str, Any]:
        return document(name, {"settings": told | {"accelerator": accelerator()}, "rows": rows})

    with bars(say) as bar:
        task = bar.add_task("timing", total=sum(len(job.whats) * len(job.modes) for job in jobs))
        for row in beside.run(jobs, asked.warm or 1):
            rows.append(row)
            figure = row["reason"] or f"{row['ms']['median']:.4g} ms"
            line = f"{row['name']}  {row['what']}  {row['mode']}  {row['library']}  {row['status']}  {figure}"
            say.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
            bar.advance(task)
            if asked.out:
                keep(asked.out, results())
    return results()


def jobs_of(name: str, words: Sequence[str], asked: Asked) -> list[beside.Job]:
    """Every library of every layer or model that was named; of all where none was."""
    try:
        known: Any = importlib.import_module(beside.BENCHMARKS[name])
    except ImportError as error:
        raise OptionError(f"{name} cannot run: {error}; pip install 'linattn[torch,bench]'") from error
    chosen = [choice(f"{name}: unknown name", word, known.NAMES) for word in words] or known.NAMES
    whats = [choice("--what: unknown", what, known.WHATS) for what in (asked.what or ",".join(known.WHATS)).split(",")]
    wanted_modes = asked.modes.split(",") if asked.modes else beside.USUAL_MODES
    modes = [choice("--modes: unknown", mode, beside.MODES) for mode in wanted_modes]
    peers = (
        known.LIBRARIES if asked.peers is None else [choice("--peer: unknown", peer, known.LIBRARIES) for peer in asked.peers]
    )
    device = asked.settings["device"]
    return [
        beside.Job(
            name,
            each,
            library,
            **sizes,
            device=device,
            dtype=asked.settings["dtype"],
            seed=asked.settings["seed"],
            whats=tuple(whats),
            modes=tuple(modes),
            small=asked.small,
            layers=asked.layers,
            seconds=asked.seconds,
            check=asked.check,
            tune=asked.tune,
            **({} if asked.budget is None else {"patience": asked.budget}),
        )
        for each in chosen
        for sizes in shapes_of(asked.shape or (), known.SHAPES[device])
        for library in known.libraries(each)
        if library in peers or beside.is_ours(library)
    ]


def shapes_of(texts: Sequence[str], usual: dict[str, int]) -> list[dict[str, int]]:
    """``B`` and ``T`` of every shape; the usual ones where none is given."""
    for text in texts:
        if other := {part.partition("=")[0].strip() for part in text.split(",")} - usual.keys():
            raise OptionError(f"--shape {text}: layers and models have their own sizes: expected B and T, got {min(other)}")
    found = [sizes for text in texts for sizes in parse_shape(text)]
    return [{symbol: sizes[symbol] for symbol in usual} for sizes in found] or [usual]


def choice(unknown: str, value: str, known: Iterable[str]) -> str:
    """A name that is known, however its letters are written; ``OptionError`` with the nearest one if it is not."""
    found = next((name for name in known if name.casefold() == value.strip().casefold()), None)
    if found is None:
        close = closest(value, known)
        hint = f"did you mean {close!r}? " if close else ""
        raise OptionError(f"{unknown} {value!r}: {hint}known are {', '.join(known)}")
    return found


def one_of(flag: str, value: str, known: Sequence[str]) -> str:
    """A value of a flag that takes one of a few."""
    if value not in known:
        raise OptionError(f"{flag} {value}: expected {', '.join(known)}")
    return value


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
        due = sweep.due(chosen, sweep.begun(chosen, earlier), asked.subjects)
        heat(warm.of_cases((entry.case, subject) for entry, _, subject in due)[: within(asked)], asked, say, asked.tune)
    saved = time.monotonic()

    def results(progress: Progress) -> dict[str, Any]:
        timed_elsewhere = [row for row in earlier if row["name"] not in {entry.name for entry in chosen}]
        rows = [*timed_elsewhere, *(row for row in progress.rows if row["found"])]
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
    with bars(say) as bar, tempfile.TemporaryDirectory() as folder, tuning.together(Path(folder, "turns"), asked.tune):
        task = bar.add_task("timing", total=None)
        found = results(sweep.run(chosen, asked.subjects, asked.seconds, asked.check, budget, earlier, report))
    if asked.out:
        keep(asked.out, found)
    return found


def within(asked: Asked) -> int | None:
    """How many calls the budget is enough for if timing them takes no more than their repeats; None without a budget."""
    return None if asked.budget is None else int(asked.budget / asked.seconds)


def heat(calls: Sequence[warm.FirstCall], asked: Asked, say: Console, tune: int | None) -> None:
    """Make first calls within half of the budget, and say how far they are, how long they took, and which were left."""
    started = spoke = time.monotonic()
    seconds = None if asked.budget is None else asked.budget / 2

    def told(done: int, of: int) -> None:
        nonlocal spoke
        bar.update(task, completed=done, total=of)
        if bar.disable and time.monotonic() - spoke > SPOKEN_EVERY:
            spoke = time.monotonic()
            say.print(f"first calls: {done} of {of} in {spoke - started:.0f} s", style="dim", highlight=False)

    with bars(say) as bar:
        task = bar.add_task("first calls", total=None)
        found = warm.first_calls(calls, asked.warm, told, seconds=seconds, tune=tune)
    say.print(f"{found.calls} first calls in {time.monotonic() - started:.0f} s", style="dim", highlight=False)
    if found.ended:
        say.print(f"no more first calls: {found.ended}", style="dim", highlight=False, soft_wrap=True)
    if found.left:
        say.print(f"not waited for: {', '.join(found.left)}", style="dim", highlight=False, soft_wrap=True)


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


SUCCEEDED = {
    "host": host.succeeded,
    "parts": parts.succeeded,
    "scale": scale.succeeded,
    **dict.fromkeys(beside.BENCHMARKS, beside.succeeded),
}


def succeeded(found: dict[str, Any]) -> bool:
    """Something of linattn's was timed, and nothing of it is wrong or failed."""
    if found["benchmark"] in SUCCEEDED:
        return SUCCEEDED[found["benchmark"]](found["results"])
    cells = [x for row in found["results"]["rows"] for label, x in row["found"].items() if published.ours(label)]
    return any(x["status"] == "ok" for x in cells) and not any(x["status"] in ("wrong", "failed") for x in cells)
