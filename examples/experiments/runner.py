"""Runs studies on the protocol, cell by cell; what was cut off goes on where it stopped."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from . import pages, protocol, studies
from .batched import on_gpu, train
from .protocol import Setting, Study
from .record import Record

Run = dict[str, Any]
Key = tuple[str, str]
Pool = Callable[[dict[Key, tuple[Any, ...]]], Iterable[tuple[Key, Callable[[], list[Run]]]]]
"""Of arguments by key, keys in any order and what gives the runs."""


def run(of: list[Study], out: Path, device: str, small: bool = False, jobs: int = 1) -> None:
    """Run every cell of some studies, ``jobs`` at a time, and write each one's results, tables and plot into ``out``."""
    running = {study.name: Running(study, out, device, small) for study in of}
    for one in running.values():
        if not one.left:
            one.publish()
    with workers(jobs, device) as pool:
        for (name, key), found in pool(in_turn({name: one.left for name, one in running.items()})):
            running[name].record.once(key, found)
            running[name].publish()


def in_turn(left: dict[str, dict[str, tuple[Any, ...]]]) -> dict[Key, tuple[Any, ...]]:
    """A cell of each study, then a second of each: text is bound by memory, recall by launches, and either leaves the other."""
    turns = itertools.zip_longest(*([((name, key), cell) for key, cell in of.items()] for name, of in left.items()))
    return dict(one for turn in turns for one in turn if one is not None)


class Running:
    """A study while its cells are run: what is found, and what is ``left``."""

    def __init__(self, study: Study, out: Path, device: str, small: bool) -> None:
        given = argparse.Namespace(out=str(out), device=device, **protocol.options(study, small))
        self.study, self.record = study, Record(study.name, given, functools.partial(pages.shown, study))
        self.cells = {f"{model}; {name}": (study.name, model, name, device, small) for model, name in study.cells(small)}
        self.record.take_up(self.cells)

    @property
    def left(self) -> dict[str, tuple[Any, ...]]:
        return {key: cell for key, cell in self.cells.items() if key not in self.record.parts}

    def publish(self) -> None:
        """Write what was found: each cell is shown as it comes, so that what was cut off can be published, and taken up."""
        self.record.parts = {key: self.record.parts[key] for key in self.cells if key in self.record.parts}
        write = self.record.publish if self.left else self.record.finish
        write(results(self.study, self.record.parts), with_runs=True)


@contextmanager
def workers(jobs: int, device: str) -> Iterator[Pool]:
    """What goes through cells, several at a time in processes of their own, or on a GPU in threads with a stream each.

    Kernels of small models leave most of a GPU idle, and those of several processes take turns.
    """
    if jobs == 1:
        yield lambda cells: ((key, functools.partial(cell, *of)) for key, of in cells.items())
        return
    threads = on_gpu(device)
    with (
        ThreadPoolExecutor(jobs, initializer=own_stream) if threads else ProcessPoolExecutor(jobs, get_context("spawn")) as pool
    ):

        def submitted(cells: dict[Key, tuple[Any, ...]]) -> Iterator[tuple[Key, Callable[[], list[Run]]]]:
            keys = {pool.submit(cell, *of): key for key, of in cells.items()}
            return ((keys[future], future.result) for future in as_completed(keys))

        yield submitted


def own_stream() -> None:
    """Let what this thread launches wait for no other's."""
    torch.cuda.set_stream(torch.cuda.Stream())


def cell(name: str, model: str, column: str, device: str, small: bool) -> list[Run]:
    """Runs of one model in one setting of a study, by their names."""
    torch.set_float32_matmul_precision("high")
    study, key = studies.study(name), (model, column)
    setting = study.cells(small)[key]
    if study.scout:
        scout = replace(study.cells(small, scout=True)[key], doublings=0)
        setting = replace(setting, rates=(protocol.best_rate(study, schedules(study, model, scout, device)),))
    return [{"model": model, "setting": column, **one} for one in schedules(study, model, setting, device)]


def schedules(study: Study, model: str, setting: Setting, device: str) -> list[Run]:
    """Runs of one cell: its schedule, and others each twice as long, with half of the rates, unless the task is solved."""
    runs: list[Run] = []
    for doubled in range(setting.doublings + 1):
        found = grid(study, model, setting, setting.steps * 2**doubled, device)
        runs += found
        if protocol.solved(study, runs):
            break
        setting = replace(setting, rates=protocol.better_half(study, found))
    return runs


def grid(study: Study, model: str, setting: Setting, steps: int, device: str) -> list[Run]:
    """Every rate and seed of one cell for so many steps, as many at once as the setting says."""
    make, task = study.make(model, setting)
    few = max(1, math.floor(setting.together / setting.seeds))
    some = [setting.rates[i : i + few] for i in range(0, len(setting.rates), few)]
    seeds = list(range(setting.first_seed, setting.first_seed + setting.seeds))
    parts = [seeds] if setting.together >= setting.seeds else [[seed] for seed in seeds]
    return [one for rates in some for part in parts for one in train(make, task, rates, part, steps, device)]


def check(study: Study, whole: dict[str, Any], device: str, draw: random.Random) -> tuple[str, bool]:
    """Train one recorded cell, drawn at random, again with other seeds at its rate and schedule.

    Returns:
        What was recorded and what was found, and whether its mean lies within the recorded spread, taken as wide again to
        either side: three seeds do not span what more would.
    """
    small = bool(whole["options"].get("small"))
    cells = {(model, name): of for name, by in whole["results"]["summary"].items() for model, of in by.items()}
    on_it = [key for key in cells if key in study.cells(small) and (small or not cells[key]["lacks"])]
    if not on_it:
        raise SystemExit(
            f"no recorded cell of {study.name} is on the protocol: run it first, python -m experiments {study.name}"
        )
    model, name = draw.choice(on_it)
    recorded, setting = cells[model, name], study.cells(small)[model, name]
    again = replace(setting, rates=(recorded["rate"],), steps=recorded["steps"], doublings=0, first_seed=1000)
    found = protocol.summary(study, schedules(study, model, again, device)).figures.get(study.score)
    middle, least, most = recorded["figures"][study.score]
    margin = max(most - least, study.tolerance)
    inside = found is not None and least - margin <= found[0] <= most + margin
    told = "no finite score" if found is None else f"{found[0]:.3f}"
    return f"{model}, {name or study.name}: recorded {middle:.3f} ({least:.3f} to {most:.3f}), again {told}", inside


def results(study: Study, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What is written of a study's cells: the summary of their runs by setting and model."""
    found: dict[str, dict[str, list[Run]]] = {}
    for one in (run for part in parts.values() for run in part["found"]):
        found.setdefault(one["setting"], {}).setdefault(one["model"], []).append(one)
    cells = {setting: protocol.summaries(study, of) for setting, of in found.items()}
    return {"summary": {setting: {model: cell._asdict() for model, cell in of.items()} for setting, of in cells.items()}}
