"""Runs studies on the protocol, schedule by schedule; what was cut off goes on where it stopped."""

from __future__ import annotations

import argparse
import functools
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import pages, protocol, studies
from .batched import OutOfTime, train
from .crew import Crew
from .protocol import SCOUT, Due, Setting, Study
from .record import Record

Run = dict[str, Any]


class Work(NamedTuple):
    """Members of a cell of a study, to be trained side by side."""

    study: str
    model: str
    column: str
    scout: bool
    some: Due

    def __str__(self) -> str:
        rates = ", ".join(f"{rate:g}" for rate in self.some.rates)
        column = SCOUT if self.scout else self.column
        return f"{self.model}; {column}; {self.some.steps} steps; {rates}; seeds {', '.join(map(str, self.some.seeds))}"


def run(of: list[Study], out: Path, device: str, small: bool = False, jobs: int = 1, seconds: float = math.inf) -> None:
    """Run some studies, ``jobs`` parts at a time on each device, and write each one's results, tables and plot into ``out``.

    Cells without any run go first, in the order of the studies, then rates beyond an end, then long schedules, last of cells
    whose schedule is long enough as it is; and before those whatever by its estimate ends within ``seconds``. What does not end
    by then is left and said.
    """
    deadline = time.time() + seconds
    running = {study.name: Running(study, out, device, small) for study in of}
    for one in running.values():
        one.publish()
    begun: set[Work] = set()
    late: list[Work] = []
    failed: list[Work] = []
    with Crew(jobs, device) as crew:
        while True:
            waiting = [(one, work) for one in running.values() for work in one.due() if work not in begun]
            left = deadline - time.time()
            waiting.sort(key=lambda of: (of[0].seconds(of[1]) * crew.threads > left, of[0].turn(of[1])))
            for _, work in crew.take(waiting):
                begun.add(work)
                crew.begin(work, part, (work, small, deadline))
            if not crew.busy:
                break
            work, found, spent, error = crew.wait()
            if found is None:
                (failed if error else late).append(work)
                print(error, end="", flush=True)
                continue
            one = running[work.study]
            one.add(work, found, spent)
            print(f"{work.study}: {work}: {spent:.1f} s, {told(one.study, found)}", flush=True)
            one.publish()
    for work in late:
        print(f"{work.study}: {work}: not within {seconds:g} s", flush=True)
    if failed:
        raise RuntimeError(f"failed: {'; '.join(f'{work.study}: {work}' for work in failed)}")


def told(study: Study, found: list[Run]) -> str:
    """The score of the seeds of the best rate."""
    of = protocol.at_best(study, found, found[0]["steps"])
    return f"{study.score} at {of[0]['rate']:g}: {', '.join(str(run['test'].get(study.score)) for run in of)}"


class Running:
    """A study while its cells are run: what is found, and what is due."""

    def __init__(self, study: Study, out: Path, device: str, small: bool) -> None:
        given = argparse.Namespace(out=str(out), device=device, **protocol.options(study, small))
        self.study, self.small = study, small
        self.record = Record(study.name, given, functools.partial(pages.shown, study), protocol.MORE)
        self.record.take_up()
        self.pace = protocol.pace(study, list(self.record.parts.values()))

    def due(self) -> list[Work]:
        """What can be trained next, short schedules first."""
        found = [work for key in self.study.cells(self.small) for work in self.of_cell(*key)]
        return sorted(found, key=lambda work: (not work.scout, work.some.steps))

    def add(self, work: Work, found: list[Run], spent: float) -> None:
        self.record.add(str(work), found, spent)
        self.pace = protocol.pace(self.study, list(self.record.parts.values()))

    def turn(self, work: Work) -> tuple[bool, int]:
        """When a work is taken, beside those of other studies: whether it prolongs a schedule that was shown to be long enough;
        0 for a cell that has no runs, then by the length."""
        setting = self.study.cells(self.small, work.scout)[work.model, work.column]
        there = self.runs(work.model).get(SCOUT if work.scout else work.column)
        if not there:
            return False, 0
        prolongs = work.some.steps > max(run["steps"] for run in there)
        return prolongs and protocol.long_enough(self.study, there), 1 + work.some.steps // setting.steps

    def seconds(self, work: Work) -> float:
        """An estimate of its share of a GPU's time, by the pace of what was run."""
        setting = self.study.cells(self.small, work.scout)[work.model, work.column]
        taken = [(work.some.steps, len(protocol.members(work.some)))]
        return protocol.cost(self.study, setting, taken) * self.pace

    def of_cell(self, model: str, column: str) -> list[Work]:
        setting, runs = self.study.cells(self.small)[model, column], self.runs(model)
        if self.study.scout:
            scout = replace(self.study.cells(self.small, scout=True)[model, column], doublings=0)
            small = runs.get(SCOUT, [])
            if due := protocol.due(self.study, scout, small):
                return [Work(self.study.name, model, column, True, some) for some in due]
            rate = protocol.best_rate(self.study, small) * scout.width / setting.width
            setting = replace(setting, rates=(rate,))
        due = protocol.due(self.study, setting, runs.get(column, []))
        return [Work(self.study.name, model, column, False, some) for some in due]

    def runs(self, model: str) -> dict[str, list[Run]]:
        """Runs of a model, by setting."""
        found: dict[str, list[Run]] = {}
        for one in (run for part in self.record.parts.values() for run in part["found"] if run["model"] == model):
            found.setdefault(one["setting"], []).append(one)
        return found

    def publish(self) -> None:
        """Write what was found: each part is shown as it comes, so that what was cut off can be published, and taken up."""
        if not self.record.parts:
            return
        write = self.record.publish if self.due() else self.record.finish
        write(results(self.study, self.record.parts), with_runs=True)


def part(work: Work, small: bool, deadline: float, device: str) -> list[Run] | None:
    """Runs of a part, by their names; ``None`` where it does not end in time."""
    torch.set_float32_matmul_precision("high")
    study = studies.study(work.study)
    setting = study.cells(small, work.scout)[work.model, work.column]
    try:
        found = trained(study, work.model, setting, work.some, device, deadline)
    except OutOfTime:
        return None
    return [{"model": work.model, "setting": SCOUT if work.scout else work.column, **one} for one in found]


def trained(study: Study, model: str, setting: Setting, some: Due, device: str, deadline: float = math.inf) -> list[Run]:
    make, task = study.make(model, setting)
    enough = functools.partial(protocol.learned, study)
    return train(make, task, some.rates, some.seeds, some.steps, device, enough, deadline)


def check(study: Study, whole: dict[str, Any], device: str, draw: random.Random, deadline: float = math.inf) -> dict[str, Any]:
    """Train one recorded cell, drawn at random, again with other seeds at its rate and schedule.

    Returns:
        Which cell it was, what was recorded and what was found, as mean, least and most, and whether the mean that was found
        lies within the recorded spread, taken as wide again to either side: three seeds do not span what more would. A
        difference below the study's tolerance is none.
    """
    small = bool(whole["options"].get("small"))
    cells = {(model, name): of for name, by in whole["results"]["summary"].items() for model, of in by.items()}
    whole_cells = [key for key in cells if key in study.cells(small) and not lacks_seeds(study, cells[key])]
    if not whole_cells:
        raise SystemExit(
            f"no recorded cell of {study.name} has all its seeds: run it first, python -m experiments {study.name}"
        )
    model, name = draw.choice(whole_cells)
    recorded, setting = cells[model, name], study.cells(small)[model, name]
    seeds = tuple(range(1000, 1000 + setting.seeds))
    again = protocol.stacks(setting, recorded["steps"], (recorded["rate"],), seeds)
    runs = [one for some in again for one in trained(study, model, setting, some, device, deadline)]
    found = protocol.summary(study, runs).figures.get(study.score)
    _, least, most = recorded["figures"][study.score]
    margin = max(most - least, study.tolerance)
    agrees = found is not None and least - margin <= found[0] <= most + margin
    cell = {"model": model, "setting": name, "score": study.score, "recorded": list(recorded["figures"][study.score])}
    return {**cell, "again": None if found is None else list(found), "agrees": agrees}


def lacks_seeds(study: Study, cell: dict[str, Any]) -> bool:
    """Whether a recorded cell has no spread that another run could be held against."""
    return study.score not in cell["figures"] or any(lack.endswith(("seeds", "rates")) for lack in cell["lacks"])


def results(study: Study, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is written of a study's runs: their summary by setting and model, in the order of the study."""
    found: dict[str, dict[str, list[Run]]] = {
        setting: {model: [] for model in study.models} for setting in (*study.settings, SCOUT)
    }
    for one in (run for part in parts.values() for run in part["found"]):
        found[one["setting"]][one["model"]].append(one)
    cells = {
        setting: protocol.summaries(study, {model: runs for model, runs in of.items() if runs}) for setting, of in found.items()
    }
    return {"summary": {setting: {model: cell._asdict() for model, cell in of.items()} for setting, of in cells.items() if of}}
