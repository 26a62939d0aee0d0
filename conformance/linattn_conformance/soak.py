"""``linattn conformance-soak``: generated cases for a while. What it finds is reported and never part of a verdict."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from linattn.progress import bars
from linattn.spec import FAMILIES

from . import packed
from .cases import DTYPES
from .options import check_number, check_writable
from .pool import TIME_LIMIT, Pool, PoolError
from .search import Finding, Search, needs_hypothesis
from .worker import Setting

__all__ = ["conformance_soak"]


def conformance_soak(
    backend: Annotated[str, typer.Option(help="Name of the backend, or module:Class of one that is not installed.")],
    device: Annotated[str, typer.Option(help="Device of the arrays, as the framework writes it.")] = "cpu",
    framework: Annotated[str | None, typer.Option(help="One of the backend's frameworks; the first by default.")] = None,
    minutes: Annotated[float, typer.Option(help="How long to search; 0 for one round.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the first round; a new one by default, and printed.")] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only this family; repeat for more.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Only this dtype, of {', '.join(DTYPES)}; repeat for more.")] = None,
    report_path: Annotated[Path | None, typer.Option("--report", help="Write seeds and findings here, as JSON.")] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds for one case.")] = TIME_LIMIT,
) -> None:
    """Search for calls that a backend gets wrong, among generated ones. Exit status 1 if there are any."""
    try:
        check_number("--minutes", minutes)
        check_number("--seed", seed or 0)
        check_number("--time-limit", time_limit, positive=True)
        if report_path:
            check_writable("--report", report_path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    families, dtypes = chosen("--family", family, FAMILIES), chosen("--dtype", dtype, DTYPES)
    first = secrets.randbelow(2**32) if seed is None else seed
    print(f"seed {first}", flush=True)
    started = time.perf_counter()
    try:
        needs_hypothesis()
        setting = Setting(backend, framework, device)
        with Pool(setting, 1, time_limit) as pool, bars(count=False) as progress:
            task = progress.add_task("searching", total=60.0 * minutes or None)

            def ran(search: Search) -> None:
                told = f"searching: {search.examples} cases, {len(search.findings)} found wrong"
                progress.update(task, completed=time.perf_counter() - started, description=told)

            search = Search(pool, families, dtypes, ran=ran)
            search.run(60.0 * minutes, first, lambda finding: tell(finding, setting))
    except (PoolError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - started
    if report_path:
        subject = asdict(pool.subject)
        found = [asdict(finding) for finding in search.findings]
        told = {"subject": subject, "seconds": round(seconds, 1), "examples": search.examples, "seeds": search.seeds}
        packed.write(report_path, json.dumps({**told, "findings": found}, indent=1) + "\n")
    rounds = f"{len(search.seeds)} rounds from seed {first}"
    print(f"{search.examples} cases in {seconds:.0f} s, {rounds}: {len(search.findings)} found wrong")
    raise typer.Exit(int(bool(search.findings)))


def chosen(option: str, names: list[str] | None, known: dict[str, object]) -> tuple[str, ...]:
    """The names asked for, all by default."""
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{option} {name}: known are {', '.join(known)}")
    return tuple(names or known)


def tell(finding: Finding, setting: Setting) -> None:
    """A finding, and the command that shows it."""
    at_times = "" if finding.steady else ", not every time"
    print(f"wrong  {finding.message}{at_times} (seed {finding.seed})")
    print(f"       {setting.command(finding.case)}", flush=True)
