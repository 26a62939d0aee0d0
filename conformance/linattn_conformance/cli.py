"""``linattn conformance``: run the suite on one backend, say what came of it, and exit 0 only for a conformant verdict."""

from __future__ import annotations

import datetime
import importlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from linattn.errors import LinattnError
from linattn.registry import registry
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import known_failures, manifest, report, verdict
from .cases import Case, every_case
from .runner import STATUSES, Result, Runner

__all__ = ["conformance"]

SHOWN = 20
FEW = 200
"""So many cases are done before more processes have started."""


def conformance(
    backend: Annotated[str, typer.Option(help="Name of the backend, or module:Class of one that is not installed.")],
    device: Annotated[str, typer.Option(help="Device of the arrays, as the framework writes it.")] = "cpu",
    profile: Annotated[str, typer.Option(help=f"What to be judged for: {', '.join(verdict.PROFILES)}.")] = "full",
    framework: Annotated[str | None, typer.Option(help="One of the backend's frameworks; the first by default.")] = None,
    report_path: Annotated[Path | None, typer.Option("--report", help="Write the report here, as JSON.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Run only the ids that match, as in a shell; repeat for more. No verdict then.")
    ] = None,
    known: Annotated[Path | None, typer.Option("--known-failures", help="TOML or JSON list of known failures.")] = None,
    tighten: Annotated[float, typer.Option(help="Factor on every bound, in (0, 1].")] = 1.0,
    workers: Annotated[
        int, typer.Option("--workers", "-n", help="Processes that run cases; 0: one a core on a CPU, else one.")
    ] = 0,
    list_cases: Annotated[bool, typer.Option("--list", help="List the ids that would run, and run none.")] = False,
) -> None:
    """Run the conformance suite on one backend. Exit status 0 means the verdict: conformant."""
    console = Console(highlight=False)
    try:
        runner = Runner(resolve(backend), framework, device, tighten)
        entries = known_failures.load(known) if known else []
        held = manifest.load()
        if held != manifest.from_cases(every_case()):
            raise ValueError("the manifest that is installed does not belong to these cases: the installation is damaged")
        wanted = selected(runner, held, profile, case)
        if case:  # entries about cases that were not selected say nothing here
            entries = [entry for entry in entries if any(fnmatchcase(other.id, entry.pattern) for other in wanted)]
    except (LinattnError, ValueError, ImportError, AttributeError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if list_cases:
        print(*(case.id for case in wanted), sep="\n")
        return
    started = time.perf_counter()
    results, complaints = known_failures.apply(
        progress(console, runner, backend, wanted, workers), entries, datetime.date.today()
    )
    made = report.make(runner, held, profile, results, complaints, time.perf_counter() - started)
    judged = verdict.verdict(made, held)
    if report_path:
        report.write(report_path, made, judged)
    summary(console, made, results, judged, backend, bool(case))
    failed = any(result.status == "failed" for result in results) or complaints
    raise typer.Exit(int(bool(failed)) if case else int(not judged.conformant))


def resolve(backend: str) -> str:
    """The name of a backend; a ``module:Class`` is imported and registered first."""
    if ":" not in backend:
        return backend
    module, _, name = backend.partition(":")
    instance = getattr(importlib.import_module(module), name)()
    registry.register(instance, replace=True)
    return instance.name


def selected(runner: Runner, held: manifest.Manifest, profile: str, patterns: Sequence[str] | None) -> list[Case]:
    """The cases of a profile that apply, or those of all profiles that match a pattern."""
    applicable = held.applicable(runner.framework, runner.device, runner.adapter.memory())
    wanted = verdict.cases_of(profile, applicable)
    if not patterns:
        return [case for case in every_case() if case.id in wanted]
    found = [case for case in every_case() if runner.applies(case) and any(fnmatchcase(case.id, p) for p in patterns)]
    if not found:
        raise ValueError(f"no case for {runner.framework} on {runner.device} matches {', '.join(patterns)}")
    return found


# -- running ---------------------------------------------------------------------------------------------------------


def progress(console: Console, runner: Runner, backend: str, cases: list[Case], workers: int) -> list[Result]:
    """Run cases under a progress line that counts failures."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results: list[Result] = []
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("conformance", total=len(cases))
        for result in run_all(runner, backend, cases, workers):
            results.append(result)
            failures = sum(other.status == "failed" for other in results)
            bar.update(task, advance=1, description=f"conformance: {failures} failed" if failures else "conformance")
    return results


def run_all(runner: Runner, backend: str, cases: list[Case], workers: int) -> Iterable[Result]:
    """In this process, or in several: each takes runs of neighbours, which share their truth."""
    if workers == 0:
        workers = min(os.cpu_count() or 1, 8) if runner.device == "cpu" and len(cases) > FEW else 1
    if workers == 1:
        return runner.run(cases)
    return _in_processes(runner, backend, cases, workers)


def _in_processes(runner: Runner, backend: str, cases: list[Case], workers: int) -> Iterator[Result]:
    size = 48
    parts = [[case.id for case in cases[i : i + size]] for i in range(0, len(cases), size)]
    setting = backend, runner.framework, runner.device, runner.tighten
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_one_thread) as pool:
        for future in [pool.submit(_run_part, setting, part) for part in parts]:
            yield from future.result()


def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # read by frameworks when they are imported, which is later


def _run_part(setting: tuple[str, str, str, float], ids: list[str]) -> list[Result]:
    backend, *rest = setting
    by_id = {case.id: case for case in every_case()}
    return list(Runner(resolve(backend), *rest).run([by_id[name] for name in ids]))


# -- telling ---------------------------------------------------------------------------------------------------------


def summary(
    console: Console, made: dict, results: Sequence[Result], judged: verdict.Verdict, backend: str, partial: bool
) -> None:
    """A table of statuses by family, what failed, how to run one of these again, and the verdict."""
    print_table(console, results)
    failing = [result for result in results if result.status == "failed"]
    for result in failing[:SHOWN]:
        console.print(f"failed  {result.id}\n        {result.message}", markup=False, soft_wrap=True)
    if len(failing) > SHOWN:
        console.print(f"… and {len(failing) - SHOWN} more: see --report")
    if failing:
        console.print(f"run one again:  linattn conformance --backend {backend} --device {made['device']} --case '{failing[0].id}'", markup=False, soft_wrap=True)  # fmt: skip  # noqa: E501
    for complaint in made["complaints"]:
        console.print(f"error   {complaint}", markup=False, soft_wrap=True)
    worst = max((result for result in results if result.error is not None), key=lambda r: r.error or 0, default=None)
    if worst is not None:
        console.print(f"largest error: {worst.error:.2f} of its bound, {worst.id}", markup=False, soft_wrap=True)
    if partial:
        console.print(f"{len(results)} cases in {made['seconds']} s; a selection gives no verdict")
        return
    ran = {result.id for result in results}
    others = [
        problem for problem in judged.problems if problem.partition(": ")[0] not in ran and problem not in made["complaints"]
    ]
    declared = [problem for problem in judged.problems if ": declared unsupported" in problem or "though all core" in problem]
    for problem in [*declared, *others][:SHOWN]:
        console.print(f"against {problem}", markup=False, soft_wrap=True)
    claims = f"{len(judged.claimed)} operators claimed, " if judged.claimed else ""
    console.print(f"{claims}{len(results)} cases in {made['seconds']} s on {made['framework']} {made['device']}")
    console.print(f"verdict: {judged}", style="bold green" if judged.conformant else "bold red")


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Statuses by family."""
    statuses = [status for status in STATUSES if any(result.status == status for result in results)]
    table = Table("family", *statuses, box=None, pad_edge=False)
    families = sorted({result.id.partition("/")[0] for result in results})
    for family in families:
        mine = [result.status for result in results if result.id.partition("/")[0] == family]
        table.add_row(family, *(str(mine.count(status)) for status in statuses))
    table.add_row("all", *(str(sum(result.status == status for result in results)) for status in statuses), style="bold")
    console.print(table)
