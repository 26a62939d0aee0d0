"""Figures and comparisons in the text of the experiments' pages, and in what the systems' pages say of them, are those of their
records.

A comment at the end of a paragraph says where each figure comes from: ``<!-- 1.67 =
{gates:summary/1 head/vector/figures/bits/0}; … -->``. ``{RECORD:PATH}`` is a number in the results of ``RECORD.json``, to be
added, subtracted and divided; ``given`` is said of a number that is no result of ours. Numbers with a decimal point,
percentages and ratios must all be accounted for.

What is compared stands there too: ``A < B`` of numbers, and of cells of studies, ``{gates:summary/1 head/vector}``,
``A before B`` if all seeds of the one are before all of the other, those among them that a check trained again, and
``A level with B`` if neither is. A cell is of the study's score, or of the figure that is named; ``{flash:runs//SETTING/…}``
is of the seeds of one schedule and one rate, which may not be the cell's. Bits after schedules of different lengths are
not compared. All three may be chained, and ``(a|b)`` in a path stands for each of those; ``*`` stands for the setting of
the first term. Where a claim has one of :data:`COMPARES`, there must be such a comparison.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import protocol, studies
from experiments.record import runs_of
from linattn_conformance import packed

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
FIGURE = re.compile(r"(?<![\w.,/])(?:\d[\d,]*\.\d+(?: %| times)?|\d+(?: %| times))(?![\w/])")
CLAIMS = re.compile(r"<!-- (.*?) -->")
RELATION = re.compile(r" (<|before|level with) ")
COMPARES = re.compile(r"\b(ahead|behind|level|overlap(ped|s)?|better|best|worse|worst|lowest|highest|first of|seeds? before)\b")
PAGES = sorted(path for path in DOCS.glob("*.md") if not path.name.endswith(".table.md"))
RECALL = ["mqar", "recall_by_map"]
SYSTEMS = [DOCS.parent / "systems" / f"{name}.md" for name in ("flash", "gla", "hedgehog", "survey")]


@functools.cache
def results(record: str) -> Any:
    path = DOCS / f"{record}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found | ({"runs": by_rate(record)} if record in studies.NAMES else {})


def runs(record: str) -> list[dict[str, Any]]:
    """Those behind a record."""
    parts = json.loads(packed.read(runs_of(DOCS / f"{record}.json"))).values()
    return [run for part in parts for run in part["found"]]


def by_rate(record: str) -> dict[str, Any]:
    """By setting, model, steps and rate: mean, least and greatest of the seeds, then each of them, the least first."""
    found: dict[str, Any] = {}
    score = studies.study(record).score
    for run in runs(record):
        at_rate = found.setdefault(run["setting"], {}).setdefault(run["model"], {}).setdefault(str(run["steps"]), {})
        at_rate.setdefault(f"{run['rate']:g}", []).append(run["test"][score])
    for of in (of for models in found.values() for lengths in models.values() for of in lengths.values()):
        of.update({rate: [mean(seeds), min(seeds), max(seeds), *sorted(seeds)] for rate, seeds in of.items()})
    return found


def at(record: str, path: str) -> Any:
    """What stands at a path of a record, whose keys may have strokes themselves."""
    found = results(record)
    while path:
        keys = map(str, range(len(found))) if isinstance(found, list) else found
        key = max((key for key in keys if f"{path}/".startswith(f"{key}/")), key=len, default=None)
        assert key is not None, f"{record} has no {path}"
        found, path = found[int(key)] if isinstance(found, list) else found[key], path[len(key) + 1 :]
    return found


def value(expression: str) -> float:
    """What an expression over records comes to."""
    arithmetic = re.sub(r"\{(.*?)\}", lambda match: repr(float(at(*match[1].split(":", 1)))), expression)
    assert re.fullmatch(r"[\d.e +\-/*()]+", arithmetic), arithmetic
    return eval(arithmetic)


def each(term: str) -> list[str]:
    """A term for each choice of what stands in it as ``(a|b)``."""
    parts = re.split(r"\(([^()]*\|[^()]*)\)", term)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(of) for of in itertools.product(*choices)]


def steps(term: str) -> int:
    """Of a cell's schedule."""
    name, path = re.fullmatch(r"\{(\w+):([^}]*)\}", term).groups()
    return at(name, f"{path.partition('/figures/')[0]}/steps") if path.startswith("summary/") else int(path.split("/")[-2])


def seeds(term: str) -> tuple[str, tuple[float, ...]]:
    """The study of a cell, and mean, least and greatest of its seeds, those of a check among them."""
    name, path = re.fullmatch(r"\{(\w+):((?:summary|runs)/[^}]*)\}", term).groups()
    if path.startswith("runs/"):
        return name, tuple(at(name, path)[:3])
    score = studies.study(name).score
    cell, _, figure = path.partition("/figures/")
    found = at(name, f"{cell}/figures/{figure or score}")
    check = results("checks").get(name, {})
    if cell.split("/")[1:] == [check.get("setting"), check.get("model")] and (figure or score) == check["score"]:
        assert check["recorded"] == pytest.approx(found), (
            f"{name}: the check is of an earlier run, python -m experiments {name} --check"
        )
        found = [found[0], min(found[1], check["again"][1]), max(found[2], check["again"][2])]
    return name, tuple(found)


def holds(a: str, relation: str, b: str) -> bool:
    """Whether one term stands to another as is said."""
    if relation == "<":
        return value(a) < value(b)
    (name, one), (_, other) = seeds(a), seeds(b)
    study = studies.study(name)
    assert study.solved_by or steps(a) == steps(b), f"{a} and {b} had schedules of different lengths"
    before, after = protocol.ahead(study, one, other), protocol.ahead(study, other, one)
    return before if relation == "before" else not before and not after


def comparison_faults(claim: str) -> list[str]:
    """Neighbours in a chain of comparisons that do not stand so."""
    first, *rest = RELATION.split(claim)
    chains = [[one, *(beside(one, part) for part in rest)] for one in each(first)]
    links = [link for terms in chains for link in zip(terms[::2], terms[1::2], terms[2::2], strict=False)]
    found = [(a, relation, b) for one, relation, other in links for a in each(one) for b in each(other)]
    return [f"not so: {a} {relation} {b}" for a, relation, b in dict.fromkeys(found) if not holds(a, relation, b)]


def beside(first: str, term: str) -> str:
    """A term, in the setting of the first where it has ``*`` for one."""
    return term.replace("/*/", f"/{first.split('/')[1]}/") if "/*/" in term else term


def agrees(figure: str, found: float) -> bool:
    """Whether a number rounds to the figure as it is printed."""
    number, unit = re.fullmatch(r"([\d.,]+)( %| times)?", figure).groups()
    decimals = len(number.partition(".")[2])
    found = 100 * found if unit == " %" else found
    return abs(found - float(number.replace(",", ""))) <= 0.5 * 10**-decimals + 1e-9


def faults(paragraph: str) -> list[str]:
    """What is wrong with the figures of a paragraph."""
    said = [claim for text in CLAIMS.findall(paragraph) for claim in text.split("; ")]
    comparisons = [claim for claim in said if RELATION.search(claim)]
    claims = [claim.partition(" = ")[::2] for claim in said if claim not in comparisons]
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", CLAIMS.sub("", paragraph))
    sourced = {bare(figure) for figure, _ in claims}
    found = [fault for claim in comparisons for fault in comparison_faults(claim)]
    found += [f"{figure}: no source" for figure in FIGURE.findall(prose) if bare(figure) not in sourced]
    for figure, source in claims:
        if bare(figure) not in prose:
            found.append(f"{figure}: not in the paragraph")
        elif source != "given" and not agrees(figure, value(source)):
            found.append(f"{figure} is {value(source):.6g}")
    return found


def compares_unshown(paragraph: str) -> bool:
    """Whether it compares, and no comparison stands behind it."""
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", CLAIMS.sub("", paragraph))
    return bool(COMPARES.search(prose)) and not any(RELATION.search(text) for text in CLAIMS.findall(paragraph))


def bare(figure: str) -> str:
    """A figure without its unit."""
    return figure.removesuffix(" %").removesuffix(" times")


def paragraphs(page: Path) -> list[str]:
    """Lines of prose and of lists; code, tables and included files left out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if line and not line.startswith(("|", "#"))]


def matched(page: Path) -> list[str]:
    """Rows of a system's page that say what came out of the paper's claims."""
    rows = page.read_text(encoding="utf-8").partition("## What matched\n")[2].partition("\n## ")[0]
    return [line for line in rows.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("page", SYSTEMS, ids=lambda path: path.stem)
def test_every_figure_of_what_matched_is_that_of_a_record(page):
    rows = matched(page)
    assert len(rows) > 5
    assert {row[:60]: found for row in rows if (found := faults(row.partition(" | ")[2]))} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_figure_on_a_page_is_that_of_its_record(page):
    assert {line[:60]: found for line in paragraphs(page) if (found := faults(line))} == {}


COMPARING = [path for path in PAGES if path.stem != "index"]  # which says how it is done, not what came out


@pytest.mark.parametrize("page", COMPARING, ids=lambda path: path.stem)
def test_every_comparison_on_a_page_is_shown(page):
    lines = [line for line in paragraphs(page) if line.startswith("- ") or CLAIMS.search(line)]
    assert [line[:60] for line in lines if compares_unshown(line)] == []


@pytest.mark.parametrize("page", SYSTEMS, ids=lambda path: path.stem)
def test_every_comparison_of_what_matched_is_shown(page):
    assert [row[:60] for row in matched(page) if compares_unshown(row.partition(" | ")[2])] == []


def by_cell(name: str) -> dict[tuple[str, str], dict[int, list[dict[str, Any]]]]:
    """Runs of each cell, as ``(setting, model)``, by the steps of their schedule."""
    cells: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for run in sorted(runs(name), key=lambda run: run["steps"]):
        cells.setdefault((run["setting"], run["model"]), {}).setdefault(run["steps"], []).append(run)
    return cells


def means(name: str) -> list[list[float]]:
    """Of each cell, the mean after each of its schedules."""
    study = studies.study(name)
    return [[protocol.spread(study, of, steps)[0] for steps, of in cell.items()] for cell in by_cell(name).values()]


@pytest.mark.parametrize("name", RECALL)
def test_what_a_page_of_recall_says_of_doublings_that_change_nothing(name):
    """Of cells that one did not solve and left where they were, and that were doubled again, how many did not stay there."""
    study, stood, moved = studies.study(name), 0, 0
    for cell, of in zip(by_cell(name).values(), means(name), strict=True):
        parts = list(cell.values())
        until = [list(itertools.chain(*parts[: i + 1])) for i in range(len(parts) - 1)]
        at = [of[i] for i, found in enumerate(until) if protocol.settled(study, found) and not protocol.solved(study, found)]
        stood += bool(at)
        moved += bool(at) and abs(of[-1] - at[0]) > study.tolerance
    said = f"of the {stood} cells that were doubled again after one that changed them by no more than a hundredth, "
    said += f"{moved} then moved by more."
    assert said in (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECALL)
def test_what_a_page_of_recall_says_of_the_rates_of_long_schedules(name):
    study, others = studies.study(name), []
    for key, cell in by_cell(name).items():
        for steps in (steps for steps in cell if steps >= 16000):
            if {run["rate"] for run in cell[steps]} != {protocol.best_rate(study, cell[steps // 2])}:
                others.append((*key, steps))
    assert others == []
    said = "schedules of 16,000 and more had one rate a cell, the best of the schedule before."
    assert said in (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECALL)
def test_what_a_page_of_recall_says_of_how_long_what_is_not_solved_was_trained(name):
    cells = [cell for of in results(name)["summary"].values() for cell in of.values()]
    unsolved = [cell for cell in cells if cell["figures"]["recalled"][1] < 0.99]
    most, *fewer = sorted(Counter(cell["steps"] for cell in unsolved).items(), reverse=True)
    short = Counter(cell["steps"] for cell in unsolved if "schedule not shown to be long enough" in cell["lacks"])
    assert most[0] == most_steps(name)
    had = [f"{most[1]} had the {most[0]:,} steps that the study allows", *(f"{count} had {steps:,}" for steps, count in fewer)]
    those = f"{len(unsolved)} cells that are not solved"
    enough = f"{short.total()} are not shown to have had enough"
    if fewer:
        longest = "all" if short.total() == short[most[0]] else short[most[0]]
        said = f"Of the {those} {', '.join(had[:-1])} and {had[-1]}; {enough}, {longest} of them with {most[0]:,}."
    else:
        said = f"The {those} all had the {most[0]:,} steps that the study allows; {enough}."
    assert said in (DOCS / f"{name}.md").read_text(encoding="utf-8")


def most_steps(name: str) -> int:
    """Of the longest schedule that a study allows."""
    return studies.study(name).full.steps * 2 ** studies.study(name).full.doublings


def test_the_protocol_s_page_says_its_limits():
    page, (least, greatest) = (DOCS / "index.md").read_text(encoding="utf-8"), protocol.WIDEST
    assert f"one beyond is tried, down to {least:f} and up to {greatest:g}." in page
    assert {most_steps(name) for name in studies.NAMES if studies.study(name).solved_by} == {64000}
    assert "the schedule is doubled until they do, or up to 64,000 steps." in page


AT_AN_END = {
    "gates": (set(), ""),
    "flash": (set(), "No model's best rate in 2,000 steps is at an end of those that were tried;"),
    "extrapolation": (set(), "no model's best rate is the highest that was tried"),
    "masked": (set(), ""),
    "size": (set(), "Of the four rates that were tried none that was chosen is at an end."),
    "mqar": (set(), "None of their best rates is at an end of those that were tried,"),
    "recall_by_map": (set(), "None of their best rates is at an end of those that were tried,"),
}


@pytest.mark.parametrize("name", AT_AN_END)
def test_where_the_best_rate_is_the_highest_the_page_says_so(name):
    models, said = AT_AN_END[name]
    cells = [(model, cell) for of in results(name)["summary"].values() for model, cell in of.items()]
    lacking = {model for model, cell in cells if any("at an end" in lack for lack in cell["lacks"])}
    assert lacking == models
    assert said in (DOCS / f"{name}.md").read_text(encoding="utf-8")


TURNED = {
    "gates": set(),
    "flash": set(),
    "extrapolation": set(),
    "masked": set(),
    "mqar": {("GLA", "linear attention")},
    "recall_by_map": {("hedgehog, eq. 3", "exp, t=1"), ("hedgehog, eq. 3", "hedgehog")},
}
"""Models with those that a longer schedule put before them: no page may have them the other way round."""


@pytest.mark.parametrize("name", TURNED)
def test_which_orders_a_longer_schedule_turns(name):
    cells = [cell for of in results(name)["summary"].values() for cell in of.values()]
    found = [
        re.fullmatch(r"(.*) is overtaken by (.*) in a schedule twice as long", lack) for cell in cells for lack in cell["lacks"]
    ]
    assert {of.groups() for of in found if of} == TURNED[name]


RECORDED = sorted(name for name in studies.NAMES if runs_of(DOCS / f"{name}.json").exists())


@pytest.mark.parametrize("name", RECORDED)
def test_no_run_was_lost(name):
    """No page says that the figures of one are not finite."""
    assert [run for run in runs(name) if None in run["test"].values()] == []


def test_a_figure_that_is_not_the_record_s_is_found():
    gla = "{gates:summary/4 heads/vector/figures/bits/0}"
    assert faults(f"GLA takes 1.62 bits. <!-- 1.62 = {gla} -->") == []
    assert faults(f"GLA takes 1.63 bits. <!-- 1.63 = {gla} -->") == ["1.63 is 1.62261"]
    assert faults("GLA takes 1.62 bits, 12 % less.") == ["1.62: no source", "12 %: no source"]
    assert faults(f"GLA is good. <!-- 1.62 = {gla} -->") == ["1.62: not in the paragraph"]


def test_a_comparison_that_is_not_the_record_s_is_found():
    heads = "{gates:summary/1 head/%s}"
    vector, scalar, fixed = (heads % gate for gate in ("vector", "scalar", "fixed"))
    assert faults(f"- As in the paper. <!-- {vector} before {scalar} level with {fixed} -->") == []
    assert faults(f"- Not so. <!-- {fixed} before {vector} -->") == [f"not so: {fixed} before {vector}"]
    assert faults(f"- Not so. <!-- {heads % '(vector|fixed)'} before {scalar} -->") == [f"not so: {fixed} before {scalar}"]
    assert faults(f"- Not so. <!-- 2 < {scalar[:-1]}/figures/bits/0}} -->") == [f"not so: 2 < {scalar[:-1]}/figures/bits/0}}"]
    settings = "{gates:summary/(1 head|8 heads)/%s}"
    assert faults(f"- In both. <!-- {settings % 'vector'} before {heads.replace('1 head', '*') % 'none'} -->") == []
    assert faults(f"- Not in both. <!-- {settings % 'none'} level with {heads.replace('1 head', '*') % 'vector'} -->") == [
        f"not so: {of % 'none'} level with {of % 'vector'}" for of in (heads, heads.replace("1 head", "8 heads"))
    ]
    assert compares_unshown("GLA is ahead.")
    with pytest.raises(AssertionError, match="had schedules of different lengths"):
        faults("- No. <!-- {gates:runs/1 head/none/2000/0.005} level with {gates:summary/1 head/vector} -->")
    assert compares_unshown("GLA is ahead of 1.72. <!-- 1.72 = {gates:summary/1 head/scalar/figures/bits/0} -->")
    assert not compares_unshown(f"GLA is ahead. <!-- {vector} before {scalar} -->")


def test_seeds_of_a_check_are_seeds_too():
    """Three more of the vector gate with eight heads reach those of the scalar one."""
    recorded = at("gates", "summary/8 heads/vector/figures/bits")
    _, (_, least, greatest) = seeds("{gates:summary/8 heads/vector}")
    assert (least, greatest) == (recorded[1], results("checks")["gates"]["again"][2])
    assert holds("{gates:summary/8 heads/vector}", "level with", "{gates:summary/8 heads/scalar}")
