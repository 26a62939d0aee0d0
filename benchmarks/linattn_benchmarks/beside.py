"""Layers and models beside one another: what ``linattn bench layer`` and ``linattn bench model`` have in common.

Every library runs in a process of its own, where nothing of another one's is in its way. Each proves first, in float32, that
it computes what linattn computes; then its calls are made once, eager and compiled; then they are timed, and their memory is
looked at.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import checks, elsewhere, fresh, tuning
from .clocks import spread
from .environment import installed
from .runners import RUNNERS
from .sections import Heatmap, Section
from .table import memory, milliseconds

if TYPE_CHECKING:
    from torch import Tensor

Row = dict[str, Any]

BENCHMARKS = {"layer": f"{__package__}.layers", "model": f"{__package__}.models"}
"""What knows how to make the modules of each: ``NAMES``, ``WHATS``, ``LIBRARIES``, ``SHAPES`` and ``prepared``."""
MODES: dict[str, Mapping[str, Any]] = {"eager": {}, "compiled": {}, "replayed": {"mode": "reduce-overhead"}}
"""How a call is made, and what ``torch.compile`` is told of it. CUDA graphs that are replayed are recorded in a second call."""
USUAL_MODES = ("eager", "compiled")
"""Those that are timed where none is named."""
OURS = "linattn"
"""The library that the others are held against."""
WHOLE, REST = "train", "rest"
"""A training step, and one without the mixers: the difference is theirs."""
SAID = {"fwd": "forward", "fwdbwd": "with backward", WHOLE: "training step", REST: "training step without the mixers"}
"""What is done, to a reader, where that is another word."""
MIXERS = "mixers of a training step"
KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages that models of transformers call by themselves where they are installed."""
PROOF = "float32"
"""In which libraries are compared."""
START, REPEATS = 90.0, 900.0
"""Seconds for what takes a process no time to speak of: to import what it needs, to repeat a call."""
AGAIN = 5.0
"""Seconds after which a call is interrupted again that went on."""
TURNS = 5
"""In how many a call is timed, one library after the other: how fast a host is changes from second to second."""


class Library(NamedTuple):
    """Who is timed.

    Attributes:
        distribution: What has to be installed.
        module: What is imported.
        kinds: Kinds of device that it runs on.
        calls: Modules that it calls by itself where they are installed.
    """

    distribution: str
    module: str
    kinds: tuple[str, ...] = ("cpu", "cuda")
    calls: tuple[str, ...] = ()

    def refusal(self, device: str) -> str | None:
        """Why it is not called; None if it can be."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed"
        return None if device in self.kinds else f"runs on {' or '.join(self.kinds)}, not on {device}"

    @property
    def lacks(self) -> str | None:
        """What it would call, and cannot; None if there is nothing."""
        absent = [module for module in self.calls if importlib.util.find_spec(module) is None]
        return f"without {', '.join(absent)}" if absent else None


@dataclass(frozen=True)
class Job:
    """One library's calls of one layer or model.

    Attributes:
        benchmark: ``"layer"`` or ``"model"``.
        name: Of the layer or model.
        library: A key of the benchmark's ``LIBRARIES``.
        B: Sequences.
        T: Tokens of each; of decoding, those that were read before.
        device: Kind of device.
        dtype: Of parameters and inputs.
        seed: Makes parameters and inputs, the same ones in every process.
        whats: What is done: some of the benchmark's ``WHATS``.
        modes: Some of :data:`MODES`.
        small: Whether at reduced sizes.
        layers: Layers of a model.
        seconds: Time to spend on the repeats of one call.
        check: Whether it is compared with linattn.
        tune: Configurations that a kernel's autotuner may choose among; None for all.
        patience: Seconds for the proof and the first calls, compilation included.
    """

    benchmark: str
    name: str
    library: str
    B: int
    T: int
    device: str
    dtype: str
    seed: int
    whats: tuple[str, ...]
    modes: tuple[str, ...]
    small: bool = False
    layers: int = 1
    seconds: float = 1.0
    check: bool = True
    tune: int | None = None
    patience: float = 3600.0

    @property
    def label(self) -> str:
        """The shape."""
        return f"B{self.B} T{self.T}"

    @property
    def ways(self) -> list[tuple[str, str]]:
        """How each call is made, and what it does."""
        return [(mode, what) for mode in self.modes for what in self.whats]

    @property
    def of(self) -> Library:
        """Who is timed."""
        return importlib.import_module(BENCHMARKS[self.benchmark]).LIBRARIES[self.library]

    @property
    def refusal(self) -> str | None:
        """Why there is nothing to time; None if there is."""
        return self.of.refusal(self.device)

    def row(self, mode: str, what: str) -> Row:
        """What is known of a call before it is made."""
        about = {"name": self.name, "library": self.library, "version": installed(self.of.distribution), "label": self.label}
        none = {"status": "ok", "reason": None, "note": None, "ms": None, "error": None, **fresh.nothing()}
        return {**about, "what": what, "mode": mode, **none}


Compile = Callable[[Any], Any]
"""What makes a function or module out of one: ``torch.compile``, or the same again."""


class Prepared(NamedTuple):
    """What a process is ready to call.

    Attributes:
        proof: Computes arrays in float32 that are the same with every library, by name.
        calls: By what is done, makes the call that is timed.
        timed: What to be in while calls are made and timed.
        idle: Gives back what a call left behind, while others are timed.
    """

    proof: Callable[[], Mapping[str, Tensor]]
    calls: Mapping[str, Callable[[Compile], Callable[[], Any]]]
    timed: Callable[[], AbstractContextManager[Any]]
    idle: Callable[[], None] = lambda: None


# -- in the process of a library ---------------------------------------------------------------------------------------

Call = Callable[[], Any]


def measured(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What kept the proof from being made, if anything did, when every call was made once; then a row for each of them."""
    import torch

    job = Job(**{name: tuple(x) if isinstance(x, list) else x for name, x in question["job"].items()})
    place = Path(question["folder"])
    deadline = Deadline(job.patience)
    torch.manual_seed(job.seed)
    prepared = importlib.import_module(BENCHMARKS[job.benchmark]).prepared(job)
    unproved = prove(prepared, place / f"{job.library}.npz", deadline) if job.check else None
    with prepared.timed():
        with tuning.together(place / "turns", job.tune):
            made = [first_call(job, prepared, mode, what, deadline) for mode, what in job.ways]
        yield {"unproved": unproved}
        for row, call in made:
            yield from (row | found for found in (timed(job, prepared, row, call) if call else itertools.repeat({}, TURNS)))


def prove(prepared: Prepared, kept: Path, deadline: Deadline) -> str | None:
    """Keep what the proof computed; why there is none if it cannot be computed."""
    try:
        with tuning.untuned(), deadline.kept():
            found = {name: x.detach().float().cpu().numpy().astype(np.float64) for name, x in prepared.proof().items()}
    except Exception as error:  # somebody else's code: its calls may still be timed, and are marked
        return said(error)
    np.savez(kept, **found)
    return None


class Deadline:
    """How long first calls may take, all together.

    Args:
        seconds: From now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Raise ``TimeoutError`` where what is done here takes longer."""
        late = TimeoutError(f"first calls took longer than {self.seconds:.0f} s")

        def interrupt(*_: object) -> None:
            raise late

        left = self.end - time.monotonic()
        if left <= 0:
            raise late
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, left, AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def first_call(job: Job, prepared: Prepared, mode: str, what: str, deadline: Deadline) -> tuple[Row, Call | None]:
    """The row of a call so far, and the call; no call where it failed, and the row says why."""
    row = job.row(mode, what)
    runner = RUNNERS["torch"](job.device)
    start = time.perf_counter()
    try:
        with deadline.kept():
            call, note = called(prepared.calls[what], mode)
            row["note"] = ", ".join(filter(None, (note, job.of.lacks))) or None
            runner.wait(call)
    except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
        return row | {"status": "failed", "reason": said(error)}, None
    finally:
        prepared.idle()
        runner.release()
    return row | {"first_call_s": time.perf_counter() - start}, call


def timed(job: Job, prepared: Prepared, row: Row, call: Call) -> Iterator[Row]:
    """Times and memory of a row's call, as far as they are known after each of its turns."""
    runner = RUNNERS["torch"](job.device)
    times: list[float] = []
    for turn in range(1, TURNS + 1):
        try:
            if sum(times) < 1e3 * job.seconds * turn / TURNS:
                times += runner.times(call, job.seconds / TURNS)
            found = {"ms": spread(times)} | (fresh.peak_of(runner, call) if turn == TURNS and has_peak(row) else {})
        except Exception as error:  # as above
            found = {"status": "failed", "reason": said(error)}
        finally:
            prepared.idle()
            runner.release()
        if "status" in found:
            yield from itertools.repeat(found, TURNS - turn + 1)
            return
        yield found


def has_peak(row: Row) -> bool:
    """Whether what an allocator counts during a call is what the call needs: graphs that are replayed have theirs already."""
    return not MODES[row["mode"]]


def said(error: Exception) -> str:
    """The first line of an error."""
    first, *_ = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {first}"[:400]


def called(make: Callable[[Compile], Call], mode: str) -> tuple[Call, str | None]:
    """A call after its first time, and what to know of it: compiled in one graph, or in several where that cannot be."""
    import torch

    if mode == "eager":
        call = make(lambda function: function)
        call()
        return call, None

    skips, notes = torch._dynamo.utils.counters["inductor"], []
    before = skips["cudagraph_skips"]

    def compiled(fullgraph: bool) -> Call:
        call = make(lambda function: torch.compile(function, fullgraph=fullgraph, dynamic=False, **MODES[mode]))
        call()
        if MODES[mode]:
            call()
        return call

    try:
        call = compiled(fullgraph=True)
    except torch._dynamo.exc.Unsupported:
        call = compiled(fullgraph=False)
        notes.append("more than one graph")
    if skips["cudagraph_skips"] > before:
        notes.append("not all of it replayed")
    return call, ", ".join(notes) or None


def hide(packages: Sequence[str]) -> None:
    """Let nobody in this process import these."""
    sys.modules.update(dict.fromkeys(packages))


# -- in the process that asks ------------------------------------------------------------------------------------------


def run(jobs: Sequence[Job], processes: int) -> Iterator[Row]:
    """The rows of every job, each in a process of its own; at the end those of libraries that cannot be called.

    Args:
        jobs: Whom to time on what, all in the same ways; of a layer or model linattn first.
        processes: How many make their first calls at once. When all of these are done, they are timed in turn, call by call, a
            part of each call's time at once: on a machine whose speed changes, what is compared is near in time.
    """
    able = [job for job in jobs if job.refusal is None]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        for first in range(0, len(able), processes):
            ready = pool.map(lambda job: Timed(job, Path(folder)), able[first : first + processes])
            for row_of_each in zip(*[timed.rows() for timed in ready], strict=True):
                yield from filter(None, row_of_each)
    for job in jobs:
        if job.refusal is not None:
            yield from (job.row(mode, what) | {"status": "skipped", "reason": job.refusal} for mode, what in job.ways)


class Timed:
    """A job in its process, after the first calls.

    Args:
        job: Whom to time on what.
        folder: Where all of them leave what they computed.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder / f"{job.name} {job.label}"
        self.folder.mkdir(exist_ok=True)
        self.process = elsewhere.Process(__name__, {"job": asdict(job), "folder": str(self.folder)})
        self.unproved: str | None = None
        self.ended: str | None = None
        try:
            self.unproved = self.process.answer(START + job.patience)["unproved"]
        except elsewhere.NoAnswer as error:
            self.ended = str(error)

    def rows(self) -> Iterator[Row | None]:
        """The row of each call after the last of its turns, and ``None`` after each one before; where the process ended, rows
        that say why.
        """
        error = self.agreement()
        with self.process:
            for mode, what in self.job.ways:
                for _ in range(TURNS - 1):
                    self.next()
                    yield None
                row = self.job.row(mode, what) | self.next() | {"error": error}
                wrong = error is not None and error["ok"] is False and row["status"] == "ok"
                yield row | ({"status": "wrong"} if wrong else {})

    def next(self) -> Row:
        """The next one, or why there is none."""
        if self.ended is None:
            self.process.say()
            try:
                return self.process.answer(REPEATS)
            except elsewhere.NoAnswer as error:
                self.ended = str(error)
        return {"status": "failed", "reason": self.ended}

    def agreement(self) -> dict[str, Any] | None:
        """The largest difference from what linattn computed, relative to the largest value; None where nothing is compared."""
        if self.unproved:
            return {"worst": None, "bound": checks.BOUND[PROOF], "ok": None, "reason": self.unproved}
        ours, theirs = self.folder / f"{OURS}.npz", self.folder / f"{self.job.library}.npz"
        if self.job.library == OURS or not (ours.exists() and theirs.exists()):
            return None
        return compared(ours, theirs)


def compared(ours: Path, theirs: Path) -> dict[str, Any]:
    """The largest difference between the arrays of two files, relative to the largest value of each."""
    with np.load(ours) as expected, np.load(theirs) as found:
        worst = max(checks.relative_error(found[name], expected[name]) for name in expected.files)
    bound = checks.BOUND[PROOF]
    return {"worst": checks.finite(worst), "bound": bound, "ok": bool(worst <= bound), "reason": None}


# -- what came of it ---------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    """Of each layer or model what a call takes, and the memory; at the end what was not timed, and what to know."""
    rows, found = results["rows"], []
    for subject in dict.fromkeys(map(subject_of, rows)):
        mine = [row for row in rows if subject_of(row) == subject]
        title = f"{subject}, {results['settings']['dtype']}"
        found.append(pivot(f"{title}: ms", [*mine, *mixers(mine)], lambda row: milliseconds(row["ms"]["median"])))
        found.append(pivot(f"{title}: memory beyond parameters and inputs", mine, peak))
    return [section for section in found if section.lines] + troubles(rows)


def pivot(title: str, rows: Sequence[Row], show: Callable[[Row], str]) -> Section:
    """What is done down, libraries across."""
    timed = [row for row in rows if row["ms"]]
    libraries = list(dict.fromkeys(row["library"] for row in timed))
    cells = {(way(row), row["library"]): show(row) + wrong(row) for row in timed}
    ways = [said for said in dict.fromkeys(map(way, rows)) if any((said, name) in cells for name in libraries)]
    lines = [(said, *(cells.get((said, name), "–") for name in libraries)) for said in ways]
    return Section(title, ("what", *libraries), lines)


def mixers(rows: Sequence[Row]) -> list[Row]:
    """What the mixers take of each training step that was also timed without them."""
    medians = {call_of(row): row["ms"]["median"] for row in rows if row["ms"]}
    without = {call_of(row): medians.get(call_of(row | {"what": REST})) for row in rows}
    return [
        row | {"what": MIXERS, "ms": {"median": row["ms"]["median"] - without[call_of(row)]}}
        for row in rows
        if row["ms"] and row["what"] == WHOLE and without[call_of(row)] is not None
    ]


def subject_of(row: Row) -> str:
    """The layer or model, and the shape."""
    return f"{row['name']}, {row['label']}"


def call_of(row: Row) -> tuple[Any, ...]:
    """What a row is about."""
    return tuple(row[key] for key in ("name", "label", "library", "what", "mode"))


def way(row: Row) -> str:
    """What is done, and how."""
    return f"{SAID.get(row['what'], row['what'])}, {row['mode']}"


def wrong(row: Row) -> str:
    """Loud where a library computed something else than linattn."""
    return " (WRONG)" if row["status"] == "wrong" else ""


def peak(row: Row) -> str:
    """In MiB, or that nobody can say."""
    return memory(row["peak_bytes"]) if has_peak(row) and row["peak_bytes"] is not None else "–"


def troubles(rows: Sequence[Row]) -> list[Section]:
    """Why there is no figure, how far a library is off, and which calls are no single graph; each said once."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        for text in filter(None, (trouble(row), row["note"])):
            said.setdefault((row["library"], text), {}).setdefault(row["name"], []).append(way(row))
    every = Counter((row["library"], row["name"]) for row in rows)

    def where(library: str, about: Mapping[str, list[str]]) -> str:
        return "; ".join(
            name if len(ways) == every[library, name] else f"{name} ({'; '.join(ways)})" for name, ways in about.items()
        )

    lines = [(library, where(library, about), text) for (library, text), about in said.items()]
    return [Section("Remarks", ("library", "where", "what to know"), lines)] if lines else []


def trouble(row: Row) -> str | None:
    """Why a row has no figure, or not the right one."""
    if row["status"] == "wrong":
        worst = row["error"]["worst"]
        by = "in values that are no numbers" if worst is None else f"by {worst:.2g} of the largest value"
        return f"differs from linattn {by}, in {PROOF}"
    if row["status"] == "ok" and row["error"] and row["error"]["reason"]:
        return f"not compared with linattn: {row['error']['reason']}"
    return row["reason"] and f"{row['status']}: {row['reason']}"


def heatmaps(results: dict[str, Any]) -> Iterator[Heatmap]:
    """Our time over each other library's."""
    timed = [row for row in results["rows"] if row["status"] == "ok" and row["ms"]]
    timed = [row for row in timed if row["what"] != REST] + mixers(timed)
    subjects = [*dict.fromkeys(map(subject_of, timed))]
    timed.sort(key=lambda row: subjects.index(subject_of(row)))
    cells = {(f"{subject_of(row)}, {way(row)}", row["library"]): row["ms"]["median"] for row in timed}
    libraries = list(dict.fromkeys(row["library"] for row in timed))
    for ours in filter(is_ours, libraries):
        pairs = [(line, name) for line, name in cells if not is_ours(name) and (line, ours) in cells]
        if pairs:
            ratios = {(line, name): cells[line, ours] / cells[line, name] for line, name in pairs}
            others = [name for name in libraries if name in {name for _, name in pairs}]
            yield f"time of {ours} over that of", list(dict.fromkeys(line for line, _ in pairs)), others, ratios


def is_ours(library: str) -> bool:
    """Whether it is a way of linattn's."""
    return library.startswith(OURS)


def succeeded(results: dict[str, Any]) -> bool:
    """Something of linattn's was timed, nothing of it failed, and nobody computed something else."""
    ours = [row["status"] for row in results["rows"] if is_ours(row["library"])]
    return "ok" in ours and "failed" not in ours and all(row["status"] != "wrong" for row in results["rows"])


if __name__ == "__main__":
    elsewhere.answers(measured)
