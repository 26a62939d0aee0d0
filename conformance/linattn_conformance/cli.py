"""``linattn conformance``: run the suite on one backend, say what came of it, and exit 0 only for a conformant verdict."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
from linattn.errors import LinattnError
from linattn.progress import bars
from rich.console import Console
from rich.table import Table

from . import known_failures, manifest, reading, report, resuming, verdict
from .cases import Case, every_case, named
from .fresh import draw_seed, fresh_cases, seed_of
from .options import check_number, check_writable
from .pool import TIME_LIMIT, Pool, PoolError, default_workers
from .recording import Found, Record, Watch
from .runner import STATUSES, Result, Subject
from .worker import Setting

__all__ = ["conformance"]

SHOWN = 20


def conformance(
    backend: Annotated[str, typer.Option(help="Name of the backend, or module:Class of one that is not installed.")],
    device: Annotated[str, typer.Option(help="Device of the arrays, as the framework writes it.")] = "cpu",
    profile: Annotated[str, typer.Option(help=f"What to be judged for: {', '.join(verdict.PROFILES)}.")] = "full",
    framework: Annotated[str | None, typer.Option(help="One of the backend's frameworks; the first by default.")] = None,
    report_path: Annotated[
        Path | None, typer.Option("--report", help="Write the report here, as JSON; compressed if the name ends in .gz.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Run only the profile's ids that match, as in a shell; repeatable. No verdict then."),
    ] = None,
    known: Annotated[Path | None, typer.Option("--known-failures", help="TOML or JSON list of known failures.")] = None,
    tighten: Annotated[float, typer.Option(help="Factor on every bound, in (0, 1].")] = 1.0,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "-n",
            help="Processes that run cases; 0: one a core on a CPU, else one. GPUs of CUDA_VISIBLE_DEVICES are taken in turn.",
        ),
    ] = 0,
    time_limit: Annotated[float, typer.Option(help="Seconds for one case; its process is then replaced.")] = TIME_LIMIT,
    memory_limit: Annotated[
        float, typer.Option(help="GiB for each process; 0: its share of four fifths of the machine's.")
    ] = 0.0,
    budget: Annotated[
        float,
        typer.Option(help="Seconds for the whole run, its report included, core first; what is left is not run. 0: no end."),
    ] = 0.0,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run of this report: take over its results, and run what it has not.")
    ] = None,
    again: Annotated[
        list[str] | None, typer.Option(help="With --resume: run these ids once more, as in a shell; repeat for more.")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="What else the report is to say of where it was made; repeat for more."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option(help="Write what the backend's processes printed here; the report has its digest.")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the fresh cases that are run beside those of the manifest; drawn unless given. --case matches "
            "those of a seed that is given."
        ),
    ] = 0,
    list_cases: Annotated[bool, typer.Option("--list", help="List the ids that would run, and run none.")] = False,
) -> None:
    """Run the conformance suite on one backend. Exit status 0 means the verdict: conformant."""
    begun = time.monotonic()
    console = Console(highlight=False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(at_sigterm(leave))
        try:
            check_number("--workers", workers)
            check_number("--time-limit", time_limit, positive=True)
            check_number("--memory-limit", memory_limit)
            check_number("--budget", budget)
            if report_path:
                check_writable("--report", report_path)
            if log:
                check_writable("--log", log)
            entries = known_failures.load(known) if known else []
            count = workers or default_workers(device)
            setting = Setting(backend, framework, device, tighten)
            pool = Pool(setting, count, time_limit, memory_limit, budget or math.inf)
            stack.callback(pool.close)
            pool.start(1 if case or list_cases else count)
            held = manifest.load()
            if held != manifest.from_cases(every_case()):
                raise ValueError("the manifest that is installed does not belong to these cases: the installation is damaged")
            told = said(environment or ())
            fresh = drawn(profile, case, seed or seed_of_report(resume))
            stack.enter_context(pool)
            wanted = selected(pool.subject, held, profile, case, fresh)
            if again and not resume:
                raise ValueError("--again: expected with --resume, which says what was run before")
            began = report.now()
            empty = report.make(pool.subject, held, profile, (), (), 0.0, told)
            earlier = resuming.read(resume, empty, again or (), {case.id for case in wanted}) if resume else resuming.NONE
        except (PoolError, LinattnError, ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from error
        if list_cases:
            print(*(case.id for case in wanted), sep="\n")
            return
        if case:  # entries about cases that were not selected say nothing here
            entries = [entry for entry in entries if any(fnmatchcase(other.id, entry.pattern) for other in wanted)]
        done = {result.id for result in earlier.results}
        left = [other for other in wanted if other.id not in done]
        stack.enter_context(at_sigterm(lambda: pool.end("the run was ended by SIGTERM")))
        pool.budget = left_for_cases(budget, time.monotonic() - begun)
        record = Record(
            pool, held, profile, wanted, tuple(case or ()), entries, told, bool(resume), earlier, count, began, report_path, log
        )
        found = run(pool, by_profile(left) if budget else core_first(left), record)
    judged = found.judged
    summary(console, found.made | {"verdict": judged.told}, found.results, judged, setting, bool(case))
    failed = any(result.status in ("failed", "not-run") for result in found.results) or found.made["complaints"]
    raise typer.Exit(int(bool(failed)) if case else int(not judged.conformant))


@contextlib.contextmanager
def at_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """While the body runs, SIGTERM does this. Once there are results, it ends a run as its budget does: they are reported."""
    before = signal.signal(signal.SIGTERM, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave() -> None:
    """End as SIGTERM ends a process, but the workers too."""
    raise SystemExit(128 + signal.SIGTERM)


def left_for_cases(budget: float, spent: float) -> float:
    """Of the seconds of a run, those that are left for its cases when so many were spent on drawing them. To write down what
    came of them takes less than half as long.
    """
    return max(budget - 1.5 * spent, 0.0) if budget else math.inf


def seed_of_report(path: Path | None) -> int:
    """The seed of the run that is gone on with; 0 if there is none."""
    results = reading.read(path)["results"] if path else ()
    return next((seed for result in results if (seed := seed_of(result["id"]))), 0)


def drawn(profile: str, patterns: Sequence[str] | None, seed: int) -> list[Case]:
    """As many fresh cases as a profile has. Without a seed, 0, one is drawn, and patterns match no fresh ones."""
    verdict.check_profile(profile)
    return list(fresh_cases(seed or draw_seed(), profile)) if seed or not patterns else []


def selected(
    subject: Subject, held: manifest.Manifest, profile: str, patterns: Sequence[str] | None, fresh: Sequence[Case]
) -> list[Case]:
    """The cases of a profile that apply, and the fresh ones; or those of them that match a pattern."""
    applying = [case for case in every_case() if subject.applies(case)]
    wanted = verdict.cases_of(profile, held.applicable(subject.framework, subject.device, subject.memory))
    of_profile = [case for case in applying if case.id in wanted] + [case for case in fresh if subject.applies(case)]
    if not patterns:
        return of_profile
    found: dict[str, Case] = {}
    by_id = {case.id: case for case in of_profile}
    for pattern in patterns:
        matched = [by_id[pattern]] if pattern in by_id else matching(pattern, of_profile)  # many ids are looked up, not sought
        if not matched and (case := generated(pattern)) and subject.applies(case):
            matched = [case]
        if not matched:
            others = len(matching(pattern, applying))
            hint = f": of profile full {others} would (--profile full)" if others else ""
            where = f"{subject.framework} on {subject.device}"
            raise ValueError(f"--case {pattern}: no case of profile {profile} for {where} matches{hint}")
        found |= {case.id: case for case in matched}
    places = {case.id: place for place, case in enumerate(applying)}
    return sorted(found.values(), key=lambda case: places.get(case.id, len(places)))


def matching(pattern: str, cases: Iterable[Case]) -> list[Case]:
    """The cases whose ids match, as in a shell."""
    return [case for case in cases if fnmatchcase(case.id, pattern)]


def core_first(cases: Sequence[Case]) -> list[Case]:
    """The core, then what else there is: a run that is cut short has seen the plainest. Neighbours stay neighbours."""
    return sorted(cases, key=lambda case: not case.core)


def by_profile(cases: Sequence[Case]) -> list[Case]:
    """The order of the profiles: the core, what else has no gradients, the rest. In each of them operators, and their dtypes
    and flags, are taken in turn: a run that is cut short has seen something of all, and of the cases that share compiled
    kernels one comes well before the others.
    """
    groups: dict[tuple[Any, ...], list[Case]] = defaultdict(list)
    for case in cases:
        groups[not case.core, case.needs_gradient, case.operator, case.dtype, case.flags].append(case)
    before: Counter[tuple[Any, ...]] = Counter()  # groups of the same operator
    order: dict[str, tuple[Any, ...]] = {}
    for group, members in groups.items():
        order |= {case.id: (*group[:2], place, before[group[:3]]) for place, case in enumerate(members)}
        before[group[:3]] += 1
    return sorted(cases, key=lambda case: order[case.id])


def said(pairs: Sequence[str]) -> dict[str, str]:
    """What ``--environment`` says, by name."""
    wrong = [pair for pair in pairs if not pair.partition("=")[0] or "=" not in pair]
    if wrong:
        raise ValueError(f"--environment {wrong[0]}: expected NAME=VALUE")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def generated(name: str) -> Case | None:
    """The case of an id that is not in the manifest, as ``linattn conformance-soak`` prints it; None if it is no such id."""
    try:
        case = named(name)
    except ValueError:
        return None
    return None if case in every_case() else case


def run(pool: Pool, cases: list[Case], record: Record) -> Found:
    """Run cases under a progress line that counts failures, and write what was found, now and then and at the end."""
    watch = Watch(len(cases), record.keep)
    with bars() as bar:
        task = bar.add_task("conformance", total=len(cases))
        for result in pool.run(cases, watch.look):
            watch.add(result)
            told = f"conformance: {watch.failures} failed" if watch.failures else "conformance"
            bar.update(task, advance=1, description=told)
    found = record.found(watch.results, watch.seconds)
    record.write(found)
    return found


# -- telling ---------------------------------------------------------------------------------------------------------


def summary(
    console: Console, made: dict, results: Sequence[Result], judged: verdict.Verdict, setting: Setting, partial: bool
) -> None:
    """A table of statuses by family, what failed, how to run one of these again, and the verdict."""
    print_table(console, results)
    failing = [result for result in results if result.status == "failed"]
    for result in failing[:SHOWN]:
        console.print(f"failed  {result.id}\n        {result.message}", markup=False, soft_wrap=True)
    if len(failing) > SHOWN:
        console.print(f"… and {len(failing) - SHOWN} more: see --report")
    if failing:
        console.print(f"run one again:  {setting.command(failing[0].id)}", markup=False, soft_wrap=True)
    for complaint in made["complaints"]:
        console.print(f"error   {complaint}", markup=False, soft_wrap=True)
    worst = max((result for result in results if result.error is not None), key=lambda r: r.error or 0, default=None)
    if worst is not None:
        console.print(f"largest error: {worst.error:.3g} of its bound, {worst.id}", markup=False, soft_wrap=True)
    if partial:
        console.print(f"{len(results)} cases in {made['seconds']} s; a selection gives no verdict")
        return
    for problem in [text for text in verdict.told_by_no_case(made) if text not in made["complaints"]][:SHOWN]:
        console.print(f"against {problem}", markup=False, soft_wrap=True)
    claims = f"{len(judged.claimed)} operators claimed, " if judged.claimed else ""
    console.print(f"{claims}{len(results)} cases in {made['seconds']} s on {made['framework']} {made['device']}")
    if judged.badges:
        console.print(f"badges: {', '.join(f'{name} {passed}' for name, passed in judged.badges.items())}")
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
