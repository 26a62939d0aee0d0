"""Layers and models beside one another: what ``linattn bench layer`` and ``linattn bench model`` have in common.

Every library runs in a process of its own, where nothing of another one's is in its way. Each proves first, in float32, that
it computes what linattn computes; then its calls are timed, eager and compiled, and their memory is looked at.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import checks, elsewhere, fresh
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
MODES = ("eager", "compiled")
OURS = "linattn"
"""The library that the others are held against."""
SAID = {"fwd": "forward", "fwdbwd": "with backward", "train": "training step"}
"""What is done, to a reader, where that is another word."""
KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages that models of transformers call by themselves where they are installed."""
PROOF = "float32"
"""In which libraries are compared."""
TIMEOUT = 3600.0
"""Seconds for one library's calls of one layer or model, compilation included."""


class Library(NamedTuple):
    """Who is timed.

    Attributes:
        distribution: What has to be installed.
        module: What is imported.
        kinds: Kinds of device that it runs on.
    """

    distribution: str
    module: str
    kinds: tuple[str, ...] = ("cpu", "cuda")

    def refusal(self, device: str) -> str | None:
        """Why it is not called; None if it can be."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed"
        return None if device in self.kinds else f"runs on {' or '.join(self.kinds)}, not on {device}"


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

    @property
    def label(self) -> str:
        """The shape."""
        return f"B{self.B} T{self.T}"


Compile = Callable[[Any], Any]
"""What makes a function or module out of one: ``torch.compile``, or the same again."""


class Prepared(NamedTuple):
    """What a process is ready to call.

    Attributes:
        proof: Computes arrays in float32 that are the same with every library, by name.
        calls: By what is done, makes the call that is timed.
        timed: What to be in while calls are made and timed.
    """

    proof: Callable[[], Mapping[str, Tensor]]
    calls: Mapping[str, Callable[[Compile], Callable[[], Any]]]
    timed: Callable[[], AbstractContextManager[Any]]


# -- in the process of a library ---------------------------------------------------------------------------------------


def measured(question: dict[str, Any]) -> dict[str, Any]:
    """The error of a library, and a row for each of its calls."""
    import torch

    job = Job(**{name: tuple(x) if isinstance(x, list) else x for name, x in question["job"].items()})
    torch.manual_seed(job.seed)
    prepared = importlib.import_module(BENCHMARKS[job.benchmark]).prepared(job)
    error = agreement(prepared, Path(question["folder"]) / "proof.npz", job.library == OURS)
    with prepared.timed():
        pairs = [(mode, what) for mode in job.modes for what in job.whats]
        return {"error": error, "rows": [one_row(job, prepared, mode, what) for mode, what in pairs]}


def agreement(prepared: Prepared, kept: Path, first: bool) -> dict[str, Any] | None:
    """The largest difference from what linattn's process kept, relative to the largest value; None in that process itself."""
    found = {name: x.detach().float().cpu().numpy().astype(np.float64) for name, x in prepared.proof().items()}
    if first:
        np.savez(kept, **found)
        return None
    if not kept.exists():
        return None
    with np.load(kept) as expected:
        worst = max(checks.relative_error(found[name], expected[name]) for name in expected.files)
    bound = checks.BOUND[PROOF]
    return {"worst": checks.finite(worst), "bound": bound, "ok": worst <= bound}


def one_row(job: Job, prepared: Prepared, mode: str, what: str) -> Row:
    """Times and memory of one call, or why there are none."""
    row: Row = {"what": what, "mode": mode, "status": "ok", "reason": None, "note": None, "ms": None, **fresh.nothing()}
    runner = RUNNERS["torch"](job.device)
    try:
        start = time.perf_counter()
        call, row["note"] = called(prepared.calls[what], mode)
        runner.wait(call)
        row["first_call_s"] = time.perf_counter() - start
        row["ms"] = spread(runner.times(call, job.seconds))
        row |= fresh.peak_of(runner, call)
    except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
        said = (str(error).strip().splitlines() or ["no message"])[0]
        row |= {"status": "failed", "reason": f"{type(error).__name__}: {said}"[:400]}
    runner.release()
    return row


def called(make: Callable[[Compile], Callable[[], Any]], mode: str) -> tuple[Callable[[], Any], str | None]:
    """A call after its first time, and what to know of it: compiled in one graph, or in several where that cannot be."""
    import torch

    if mode == "eager":
        call = make(lambda function: function)
        call()
        return call, None
    torch.compiler.reset()
    try:
        call = make(lambda function: torch.compile(function, fullgraph=True, dynamic=False))
        call()
    except torch._dynamo.exc.Unsupported:
        torch.compiler.reset()
        call = make(lambda function: torch.compile(function, dynamic=False))
        call()
        return call, "more than one graph"
    return call, None


def hide(packages: Sequence[str]) -> None:
    """Let nobody in this process import these."""
    sys.modules.update(dict.fromkeys(packages))


# -- in the process that asks ------------------------------------------------------------------------------------------


def run(jobs: Sequence[Job], report: Callable[[list[Row]], None] = lambda rows: None) -> Iterator[Row]:
    """The rows of every job, each in a process of its own. Those of one layer or model come one after another, ours first.

    Args:
        jobs: Whom to time on what.
        report: Called with the rows of each job as it is done.
    """
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            place = Path(folder, job.name)
            place.mkdir(exist_ok=True)
            rows = rows_of(job, place)
            report(rows)
            yield from rows


def rows_of(job: Job, folder: Path) -> list[Row]:
    """The rows of one job."""
    library = importlib.import_module(BENCHMARKS[job.benchmark]).LIBRARIES[job.library]
    about = {
        "name": job.name,
        "library": job.library,
        "version": installed(library.distribution),
        "label": job.label,
        "error": None,
    }
    empty: Row = {"status": "skipped", "reason": None, "note": None, "ms": None, **fresh.nothing()}
    every = [{**about, "what": what, "mode": mode, **empty} for mode in job.modes for what in job.whats]
    if reason := library.refusal(job.device):
        return [row | {"reason": reason} for row in every]
    try:
        found = elsewhere.ask(__name__, {"job": asdict(job), "folder": str(folder)}, TIMEOUT)
    except elsewhere.NoAnswer as error:
        return [row | {"status": "failed", "reason": str(error)} for row in every]
    wrong = found["error"] is not None and not found["error"]["ok"]
    rows = [about | row | {"error": found["error"]} for row in found["rows"]]
    return [row | ({"status": "wrong"} if wrong and row["status"] == "ok" else {}) for row in rows]


# -- what came of it ---------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    """Of each layer or model what a call takes, and the memory; at the end what was not timed, and what to know."""
    rows, found = results["rows"], []
    for subject in dict.fromkeys(map(subject_of, rows)):
        mine = [row for row in rows if subject_of(row) == subject]
        title = f"{subject}, {results['settings']['dtype']}"
        found.append(pivot(f"{title}: ms", mine, lambda row: milliseconds(row["ms"]["median"])))
        found.append(pivot(f"{title}: memory beyond parameters and inputs", mine, peak))
    return [section for section in found if section.lines] + troubles(rows)


def pivot(title: str, rows: Sequence[Row], show: Callable[[Row], str]) -> Section:
    """What is done down, libraries across."""
    timed = [row for row in rows if row["ms"]]
    libraries = list(dict.fromkeys(row["library"] for row in timed))
    cells = {(way(row), row["library"]): show(row) + wrong(row) for row in timed}
    lines = [(said, *(cells.get((said, name), "–") for name in libraries)) for said in dict.fromkeys(map(way, timed))]
    return Section(title, ("what", *libraries), lines)


def subject_of(row: Row) -> str:
    """The layer or model, and the shape."""
    return f"{row['name']}, {row['label']}"


def way(row: Row) -> str:
    """What is done, and how."""
    return f"{SAID.get(row['what'], row['what'])}, {row['mode']}"


def wrong(row: Row) -> str:
    """Loud where a library computed something else than linattn."""
    return " (WRONG)" if row["status"] == "wrong" else ""


def peak(row: Row) -> str:
    """In MiB, or that nobody can say."""
    return "–" if row["peak_bytes"] is None else memory(row["peak_bytes"])


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
        return f"differs from linattn by {row['error']['worst']} of the largest value in {PROOF}"
    return row["reason"] and f"{row['status']}: {row['reason']}"


def heatmaps(results: dict[str, Any]) -> Iterator[Heatmap]:
    """Our time over each other library's."""
    timed = [row for row in results["rows"] if row["status"] == "ok" and row["ms"]]
    cells = {(f"{subject_of(row)}, {way(row)}", row["library"]): row["ms"]["median"] for row in timed}
    libraries = list(dict.fromkeys(row["library"] for row in timed))
    for ours in filter(is_ours, libraries):
        others = [name for name in libraries if not is_ours(name)]
        pairs = [(line, name) for line, name in cells if name in others and (line, ours) in cells]
        if pairs:
            ratios = {(line, name): cells[line, ours] / cells[line, name] for line, name in pairs}
            yield f"time of {ours} over that of", list(dict.fromkeys(line for line, _ in pairs)), others, ratios


def is_ours(library: str) -> bool:
    """Whether it is a way of linattn's."""
    return library.startswith(OURS)


def succeeded(results: dict[str, Any]) -> bool:
    """Something of linattn's was timed, nothing of it failed, and nobody computed something else."""
    ours = [row["status"] for row in results["rows"] if is_ours(row["library"])]
    return "ok" in ours and "failed" not in ours and all(row["status"] != "wrong" for row in results["rows"])


if __name__ == "__main__":
    elsewhere.answer(measured)
