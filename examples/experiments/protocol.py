"""The protocol that every experiment with training follows, and the only place where it stands.

* At least :data:`SEEDS` seeds, and :data:`RATES` of learning. A model's rate is the one whose mean over seeds is best on
  validation data; what is reported is its score on test data, and the spread of its seeds. Where the best rate is at an end of
  those that were tried, one beyond it is tried too, up to :data:`WIDEST`.
* The schedule is doubled, with the better half of its rates. A task that can be solved is doubled until all seeds solve it,
  where training stops: a model may stand on a plateau for as long as it likes and leave it, and seeds that leave it at
  different times are no sign of an end. Another is doubled as often as the study says: bits of text go on falling for as long
  as anybody trains, and what must not change is which of two models is ahead. What is reported is the longest.
* No schedule is doubled more often than its study says, and no rate lies beyond :data:`WIDEST`: what a cell lacks there is
  said of it, and it is left.
* Models of one study have the same embeddings, positions, convolution and number of parameters, but for what it varies.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any, NamedTuple

SEEDS = 3
RATES = (1e-3, 2e-3, 5e-3, 1e-2)
WIDEST = (1.25e-4, 8e-2)
"""The least and the greatest rate that is tried where the best is at an end."""
MORE = ("device", "seeds", "first_seed", "rates", "doublings", "together")
"""Options that say how many runs there are, and on what, and not what one run is: with others of these a study goes on."""

LAYER_SECONDS, FLOPS = 5e-3, 7e12
"""What an estimate assumes of a GPU that runs eight stacks at a time, as ``mqar`` and ``gates`` had it on an H200 in float32:
what a layer of one takes at least, forward and backward, and operations a second."""
SCOUT = "in small, for the rates"
"""The setting of runs in which the rates of a large one are chosen."""


@dataclass(frozen=True)
class Setting:
    """How large and how long; a study says what else it varies.

    ``length`` counts tokens, ``pairs`` those of a recall task, ``together`` the models that are trained as one,
    ``scored`` the held-out tokens of each part; with ``packages`` the text is that of the installed packages, with ``half``
    products are of bfloat16 (``torch.autocast``).
    """

    width: int = 64
    depth: int = 2
    heads: int = 2
    length: int = 512
    pairs: int = 8
    chunk: int = 64
    convolution: bool = True
    batch: int = 32
    steps: int = 1000
    doublings: int = 2
    seeds: int = SEEDS
    first_seed: int = 0
    rates: tuple[float, ...] = RATES
    together: int = 12
    scored: int = 32768
    packages: bool = False
    half: bool = False


@dataclass(frozen=True)
class Study:
    """An experiment as a table: each of ``models`` in each of ``settings``.

    Attributes:
        name: Of its page and its files.
        question: What it answers, in a sentence.
        task: Makes the task of a setting.
        models: Makes the model of a row in a setting, for a task.
        full: The setting that the page is about.
        small: What differs in it for a try that takes seconds on a CPU.
        settings: What differs in each column; one column by default.
        score: The figure that decides, one of the task's.
        higher: Whether more of it is better.
        tolerance: Of the score, below which a difference is none.
        shown: The task's figures that the page shows. Default ``score`` alone.
        solved_by: A model whose score must reach ``solved``, or the setting says nothing of the others; of a task that can be
            solved.
        solved: That score.
        scout: What differs in a smaller setting where rates are chosen, for one that is too large for all of them.
        tasks: The tasks of models that have one of their own.
    """

    name: str
    question: str
    task: Callable[[Setting], Any]
    models: dict[str, Callable[[Setting, Any], Any]]
    full: Setting
    small: dict[str, Any]
    settings: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    score: str = "bits"
    higher: bool = False
    tolerance: float = 0.01
    shown: tuple[str, ...] = ()
    solved_by: str = ""
    solved: float = 0.99
    scout: dict[str, Any] | None = None
    tasks: dict[str, Callable[[Setting], Any]] = field(default_factory=dict)

    def cells(self, small: bool = False, scout: bool = False) -> dict[tuple[str, str], Setting]:
        """The setting of each model and column; of the first and the last column alone if it is to be small."""
        last = (self.scout or {} if scout else {}) | (self.small if small else {})
        settings = {name: replace(self.full, **(changed | last)) for name, changed in self.settings.items()}
        if small:
            settings = {name: settings[name] for name in (next(iter(settings)), next(reversed(settings)))}
        return {(model, name): setting for name, setting in settings.items() for model in self.models}

    def make(self, model: str, setting: Setting) -> tuple[Callable[[], Any], Any]:
        """What makes a model of a cell, and the task that it learns."""
        task = self.tasks.get(model, self.task)(setting)
        return lambda: self.models[model](setting, task), task

    def better(self, a: float | None, b: float | None) -> bool:
        """Whether score ``a`` beats ``b``; one that is not finite is ``None`` and beats nothing."""
        if a is None or b is None:
            return b is None and a is not None
        return a > b if self.higher else a < b


class Cell(NamedTuple):
    """What the runs of one model in one setting come to."""

    rate: float
    steps: int
    figures: dict[str, tuple[float, float, float]]
    """Mean, least and greatest over seeds, of test data."""
    parameters: int
    lacks: list[str]
    """What the protocol asks for and the runs do not have."""
    course: list[float | None]
    """The score's mean over seeds on validation data, at equal parts of the schedule."""


def average(scores: Sequence[float | None]) -> float | None:
    """``None`` where one of them is not finite."""
    return None if any(one is None for one in scores) else mean(scores)  # type: ignore[type-var]


def best_rate(study: Study, runs: list[dict[str, Any]]) -> float:
    """The rate whose mean over seeds is best on validation data."""
    chosen, score = runs[0]["rate"], None
    for rate in sorted({run["rate"] for run in runs}):
        found = average([run["validation"].get(study.score) for run in runs if run["rate"] == rate])
        if study.better(found, score):
            chosen, score = rate, found
    return chosen


def best_rates(study: Study, runs: list[dict[str, Any]], count: int) -> tuple[float, ...]:
    """So many of the rates of some runs: those that do best on validation data."""
    found: list[float] = []
    while len(found) < min(count, len({run["rate"] for run in runs})):
        found.append(best_rate(study, [run for run in runs if run["rate"] not in found]))
    return tuple(sorted(found))


def half(count: int) -> int:
    """Of so many, rounded up."""
    return -(-count // 2)


def at_an_end(study: Study, of: list[dict[str, Any]], runs: list[dict[str, Any]]) -> bool:
    """Whether the best rate of a schedule is the least or the greatest of three and more that were tried in any of ``runs``,
    and does not solve the task."""
    rates = {run["rate"] for run in runs}
    return len(rates) > 2 and best_rate(study, of) in (min(rates), max(rates)) and not solved(study, of)


def beyond(study: Study, of: list[dict[str, Any]], runs: list[dict[str, Any]]) -> tuple[float, ...]:
    """The rate to try in a schedule beyond those of all ``runs``, if there is one."""
    if not at_an_end(study, of, runs):
        return ()
    best = best_rate(study, of)
    rate = 2 * best if best == max(run["rate"] for run in runs) else best / 2
    return (rate,) if WIDEST[0] <= rate <= WIDEST[1] else ()


def at_best(study: Study, runs: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The seeds of the best rate of a schedule."""
    of = [run for run in runs if run["steps"] == steps]
    rate = best_rate(study, of)
    return [run for run in of if run["rate"] == rate]


def spread(study: Study, runs: list[dict[str, Any]], steps: int) -> tuple[float, float, float] | None:
    """Mean, least and greatest of the seeds of the best rate of a schedule; ``None`` if one is not finite."""
    found = [run["test"].get(study.score) for run in at_best(study, runs, steps)]
    return None if None in found else (mean(found), min(found), max(found))


class Due(NamedTuple):
    """Members of a cell that are yet to be trained, side by side."""

    steps: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


def due(study: Study, setting: Setting, runs: list[dict[str, Any]]) -> list[Due]:
    """What a cell has to do next, given its runs: what is left of its schedule, a rate beyond its rates, or a schedule twice as
    long as the last, with the better half of the rates, unless the task is solved."""
    rates, seeds = setting.rates, tuple(range(setting.first_seed, setting.first_seed + setting.seeds))
    for doubled in range(setting.doublings + 1):
        steps = setting.steps * 2**doubled
        of = [run for run in runs if run["steps"] == steps]
        if left := missing(setting, steps, rates, seeds, of):
            return left
        if further := beyond(study, of, runs):
            return stacks(setting, steps, further, seeds)
        if solved(study, of):
            break
        rates = best_rates(study, of, half(len(rates)))
    return []


def missing(
    setting: Setting, steps: int, rates: tuple[float, ...], seeds: tuple[int, ...], runs: list[dict[str, Any]]
) -> list[Due]:
    """What of these rates and seeds has no run yet."""
    there = {(run["rate"], run["seed"]) for run in runs}
    rates = tuple(rate for rate in rates if not there >= set(itertools.product((rate,), seeds)))
    return [some for some in stacks(setting, steps, rates, seeds) if not there >= members(some)]


def stacks(setting: Setting, steps: int, rates: tuple[float, ...], seeds: tuple[int, ...]) -> list[Due]:
    """Every rate with every seed, as many at once as the setting says."""
    few = max(1, setting.together // setting.seeds)
    parts = [seeds] if setting.together >= setting.seeds else [(seed,) for seed in seeds]
    return [Due(steps, rates[i : i + few], part) for i in range(0, len(rates), few) for part in parts]


def members(some: Due) -> set[tuple[float, int]]:
    return set(itertools.product(some.rates, some.seeds))


def learned(study: Study, of: list[tuple[float, int]], scores: list[dict[str, float | None]]) -> bool:
    """Whether all seeds of one rate have solved the task beyond doubt, scored on validation data on the way."""
    if not study.solved_by:
        return False
    best = 1.0 if study.higher else 0.0
    beyond = study.solved + (best - study.solved) / 2
    by_rate: dict[float, list[float | None]] = {}
    for (rate, _), found in zip(of, scores, strict=True):
        by_rate.setdefault(rate, []).append(found.get(study.score))
    return any(not any(study.better(beyond, score) for score in found) for found in by_rate.values())


def solved(study: Study, runs: list[dict[str, Any]]) -> bool:
    """Whether all seeds of the longest schedule solved the task."""
    found = spread(study, runs, max(run["steps"] for run in runs))
    if not study.solved_by or found is None:
        return False
    return not study.better(study.solved, min(found) if study.higher else max(found))


def settled(study: Study, runs: list[dict[str, Any]]) -> bool:
    """Whether the longest schedule, twice as long as the one before, left the mean where it was."""
    lengths = sorted({run["steps"] for run in runs})
    if len(lengths) < 2 or lengths[-1] != 2 * lengths[-2]:
        return False
    before, after = (spread(study, runs, steps) for steps in lengths[-2:])
    return before is not None and after is not None and abs(after[0] - before[0]) <= study.tolerance


def overtaken(study: Study, runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Models of one setting with those that a schedule twice as long put before them, all seeds before all seeds."""
    found: dict[str, list[str]] = {model: [] for model in runs}
    for model, other in itertools.permutations(runs, 2):
        lengths = sorted({run["steps"] for run in runs[model]} & {run["steps"] for run in runs[other]})[-2:]
        at = [(spread(study, runs[model], steps), spread(study, runs[other], steps)) for steps in lengths]
        if len(at) == 2 and ahead(study, *at[0]) and ahead(study, *reversed(at[1])):
            found[model].append(other)
    return found


def ahead(study: Study, a: tuple[float, ...] | None, b: tuple[float, ...] | None) -> bool:
    """Whether all seeds of ``a`` are before all of ``b``."""
    if a is None or b is None:
        return a is not None
    return min(a) > max(b) if study.higher else max(a) < min(b)


def summaries(study: Study, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Cell]:
    """What runs of the models of one setting come to."""
    found = {model: summary(study, of) for model, of in runs.items()}
    if len({run["text"] for of in runs.values() for run in of if run.get("text")}) > 1:
        for cell in found.values():
            cell.lacks.append("runs of the setting read different texts")
    for model, others in overtaken(study, runs).items():
        found[model].lacks.extend(f"{model} is overtaken by {other} in a schedule twice as long" for other in others)
    return found


def summary(study: Study, runs: list[dict[str, Any]]) -> Cell:
    """What runs of one model in one setting come to."""
    steps = max(run["steps"] for run in runs)
    of = at_best(study, runs, steps)
    figures = {}
    for name in study.shown or (study.score,):
        found = [x for run in of if (x := run["test"].get(name, run.get(name))) is not None]
        if found:
            figures[name] = (mean(found), min(found), max(found))
    course = [
        average([at.get(study.score) for at in marks]) for marks in zip(*(run.get("course", []) for run in of), strict=False)
    ]
    return Cell(of[0]["rate"], steps, figures, of[0]["parameters"], lacks(study, runs), course)


def lacks(study: Study, runs: list[dict[str, Any]]) -> list[str]:
    """What the protocol asks for and runs of one model in one setting do not have."""
    lengths = sorted({run["steps"] for run in runs})
    by_length = [[run for run in runs if run["steps"] == steps] for steps in lengths]
    seeds, rates = len(at_best(study, runs, lengths[-1])), len({run["rate"] for run in by_length[0]})
    few_seeds, few_rates = (1, 1) if study.scout else (SEEDS, len(RATES))
    found = [f"{seeds} of {few_seeds} seeds"] * (seeds < few_seeds) + [f"{rates} of {few_rates} rates"] * (rates < few_rates)
    found += ["the best rate is at an end of those tried"] * at_an_end(study, by_length[-1], runs)
    for shorter, longer in itertools.pairwise(by_length):
        if best_rate(study, shorter) not in {run["rate"] for run in longer}:
            found.append("the best rate has no longer schedule")
    return found + ["schedule not shown to be long enough"] * (not study.scout and not long_enough(study, runs))


def long_enough(study: Study, runs: list[dict[str, Any]]) -> bool:
    """Whether the schedule of one model was doubled to the end of what the study asks for, or solved the task."""
    if study.solved_by:
        return solved(study, runs) or settled(study, runs)
    return max(run["steps"] for run in runs) >= study.full.steps * 2**study.full.doublings


def pace(study: Study, parts: Sequence[dict[str, Any]]) -> float:
    """What runs took, by what the assumptions say of them; 1 where there are none."""
    runs = [run for part in parts for run in part["found"]]
    done = sum(cost(study, setting, [(run["steps"], 1) for run in of]) for _, setting, of in by_cell(study, runs))
    return sum(part["seconds"] for part in parts) / done if done else 1.0


def by_cell(study: Study, runs: list[dict[str, Any]]) -> Iterable[tuple[bool, Setting, list[dict[str, Any]]]]:
    """Of each cell, those in small among them: whether it is one of those, its setting, and its runs."""
    for scout in (True, False) if study.scout else (False,):
        for (model, column), setting in study.cells(scout=scout).items():
            at = SCOUT if scout else column
            yield scout, setting, [run for run in runs if (run["model"], run["setting"]) == (model, at)]


def minutes(study: Study, parts: Iterable[dict[str, Any]] = ()) -> tuple[float, float]:
    """GPU minutes that were spent, and what is left with every doubling taken, by the pace of those or by the assumptions."""
    parts = list(parts)
    left = 0.0
    for scout, setting, of in by_cell(study, [run for part in parts for run in part["found"]]):
        left += cost(study, setting, to_come(study, replace(setting, doublings=0) if scout else setting, of))
    return sum(part["seconds"] for part in parts) / 60, left * pace(study, parts) / 60


def to_come(study: Study, setting: Setting, runs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Steps, and how many members of a cell take them, in schedules that it has not ended."""
    found, rates = [], len(setting.rates) or 1
    for doubled in range(setting.doublings + 1):
        steps = setting.steps * 2**doubled
        of = [run for run in runs if run["steps"] == steps]
        more = len(beyond(study, of, runs)) if of else 0
        found.append((steps, max(0, rates * setting.seeds - len(of)) + more * setting.seeds))
        if of and solved(study, of):
            break
        rates = half(rates)
    return found


def cost(study: Study, setting: Setting, taken: Iterable[tuple[int, int]]) -> float:
    """Seconds of a GPU by the assumptions above, for members of a cell that take so many steps each."""
    tokens = setting.batch * study.task(setting).tokens
    operations = 6 * 12 * setting.width**2 * setting.depth * tokens
    beside = min(setting.together, setting.seeds * max(1, len(setting.rates)))
    step = max(LAYER_SECONDS * setting.depth / beside, operations / FLOPS)
    return step * sum(steps * members for steps, members in taken)


def options(study: Study, small: bool) -> dict[str, Any]:
    """What a run goes on only with the same of, as JSON has it."""
    found = {"small": small, "full": asdict(study.full), "changed": study.small if small else {}, "settings": study.settings}
    return json.loads(json.dumps(found | ({"scout": study.scout} if study.scout else {})))
