"""How a study is shown: its state, a table of means and spreads, and a plot of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from linattn_conformance import packed
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from .protocol import SCOUT, Study, minutes
from .record import COLOURS, DOCS, Tables, axes, runs_of, table

Summary = dict[str, dict[str, Any]]
ACROSS = 3
"""Panels in a row, at most."""
LETTER = 0.085
"""Inches that a letter of a model's name takes beside a panel."""


def shown(study: Study, results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    summary = results["summary"]
    text = f"{state(study, summary, bool(chosen.get('small')))}\n\n{table(*cells(study, summary))}"
    by_place = any(name.isdigit() for name in figures(summary))
    drawn = courses if study.scout else lines if by_place else dots
    return {"": text}, drawn(study, summary)


def state(study: Study, summary: Summary | None, small: bool = False) -> str:
    """Whether a study was run on the protocol, and what is missing if it was not."""
    asked = study.cells()
    if summary is None:
        return f"*Not run yet on this protocol*: {len(asked)} cells, {minutes(study)[1]:.0f} GPU minutes or fewer by estimate."
    cells = {(model, setting): cell for setting, of in summary.items() for model, cell in of.items()}
    done = sum(key in cells and not cells[key]["lacks"] for key in asked)
    lacks = lacking(cells)
    lacks += [f"{done} of {len(asked)} cells are on it"] * (done < len(asked)) + ["in small, to try the program"] * small
    lacks += unsolved(study, summary)
    if lacks:
        return f"*Not yet on the protocol*: {'; '.join(lacks)}."
    return f"*On the protocol*{', with one seed, and rates chosen in small' * (study.scout is not None)}."


def lacking(cells: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What recorded cells lack: the least that one has of what is counted, and of the rest in how many cells it is."""
    found = Counter(lack for cell in cells.values() for lack in cell["lacks"])
    least: dict[str, str] = {}
    for lack in sorted(lack for lack in found if lack[0].isdigit()):
        least.setdefault(lack.partition(" of ")[2], lack)
    return [*least.values(), *(f"{lack} ({told(count)})" for lack, count in found.items() if not lack[0].isdigit())]


def told(count: int) -> str:
    return f"{count} cell{'s' * (count > 1)}"


def unsolved(study: Study, summary: Summary) -> list[str]:
    """Settings that the model which must solve them does not."""
    found = []
    for setting, of in summary.items():
        score = of.get(study.solved_by, {}).get("figures", {}).get(study.score)
        if score is not None and study.better(study.solved, score[0]):
            found.append(f"{study.solved_by} does not solve {setting or 'it'}")
    return found


def saved(study: Study) -> Summary | None:
    """The summary in the documentation, if there is one."""
    path = DOCS / f"{study.name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"]["summary"] if path.exists() else None


def pace(study: Study) -> tuple[str, str]:
    """GPU minutes that the runs in the documentation took, and an estimate of what is left."""
    path = runs_of(DOCS / f"{study.name}.json")
    parts = json.loads(packed.read(path)).values() if path.exists() else ()
    spent, left = minutes(study, parts)
    return f"{spent:.0f}", f"{left:.0f}"


def figures(summary: Summary) -> list[str]:
    """Names of the figures of a study, in their order."""
    return list(dict.fromkeys(name for of in summary.values() for cell in of.values() for name in cell["figures"]))


def cells(study: Study, summary: Summary) -> tuple[list[str], list[list[Any]]]:
    """Header and rows: a mean, and the least and greatest of the seeds in brackets where there are several."""
    names = figures(summary)
    columns = [(setting, name) for setting in summary for name in names if setting != SCOUT or name == study.score]
    models = list(dict.fromkeys(model for of in summary.values() for model in of))
    header = ["model", *(titled(setting, name, len(names) > 1) for setting, name in columns), "parameters", "rate", "steps"]
    return header, [[model, *row(summary, model, columns)] for model in models]


def row(summary: Summary, model: str, columns: list[tuple[str, str]]) -> list[Any]:
    found = [spread(summary[setting].get(model, {}).get("figures", {}).get(name)) for setting, name in columns]
    of = [by[model] for by in summary.values() if model in by]
    return [*found, *(", ".join(dict.fromkeys(number(cell[what]) for cell in of)) for what in ("parameters", "rate", "steps"))]


def number(x: float) -> str:
    """Without a needless zero."""
    return f"{x:,}" if isinstance(x, int) else f"{x:g}"


def spread(found: list[float] | None) -> str:
    if found is None:
        return ""
    middle, least, most = (f"{x:,.0f}" if x >= 1000 else f"{x:.3f}" for x in found)
    return middle if least == most else f"{middle} ({least} to {most})"


def titled(setting: str, name: str, several: bool) -> str:
    place = f"to {name}" if name.isdigit() else name
    return ": ".join(part for part in (setting, place if several or not setting else "") if part)


def dots(study: Study, summary: Summary) -> Figure:
    """The score of each model, a dot for the mean and a line from the least to the greatest of its seeds; a panel a setting.

    Dots are hollow where another model of a panel had a longer schedule, unless the task is one that can be solved. Panels of a
    share, of which more is better, go from none to all of it: those of an easy setting would else show what is no difference.
    """
    models = list(dict.fromkeys(model for of in summary.values() for model in of))
    rows = -(-len(summary) // ACROSS)
    across = -(-len(summary) // rows)
    beside = LETTER * max(map(len, models)) / across
    figure, found = axes(len(summary), width=3 + beside, height=1.2 + 0.3 * len(models), across=across)
    for ax, (setting, of) in zip(found, summary.items(), strict=True):
        longest = max(cell["steps"] for cell in of.values())
        for place, model in enumerate(models):
            score = of.get(model, {}).get("figures", {}).get(study.score)
            if score is not None:
                ax.plot(score[1:], [place, place], "-", color=COLOURS[0], linewidth=2)
                inside = COLOURS[0] if study.solved_by or of[model]["steps"] == longest else "white"
                ax.plot(score[0], place, "o", color=COLOURS[0], markerfacecolor=inside, markersize=5)
        ax.set_yticks(range(len(models)), models if ax.get_subplotspec().is_first_col() else [""] * len(models))
        ax.set_ylim(len(models) - 0.5, -0.5)
        if study.higher:
            ax.set_xlim(-0.03, 1.03)
        ax.set_title(setting, loc="left", fontsize=9)
        ax.set_xlabel(study.score)
    return figure


def courses(study: Study, summary: Summary) -> Figure:
    """The score on validation data by the share of the schedule; a panel a setting."""
    figure, found = axes(len(summary), width=5.6)
    for ax, (setting, of) in zip(found, summary.items(), strict=True):
        for (model, cell), colour in zip(of.items(), COLOURS * 2, strict=False):
            marks = range(1, len(cell["course"]) + 1)
            ax.plot([at / max(len(marks), 1) for at in marks], cell["course"], marker=".", color=colour, label=model)
        ax.set_title(setting or "in full", loc="left", fontsize=9)
        ax.set_xlabel("share of the steps")
        ax.set_ylabel(f"{study.score}, validation data")
    found[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def lines(study: Study, summary: Summary) -> Figure:
    """Figures by place, the mean as a line and the spread of the seeds as a band; a panel a setting.

    Models that differ in what comes after a comma share a colour.
    """
    figure, found = axes(len(summary), width=5.6)
    places = [name for name in figures(summary) if name.isdigit()]
    names = dict.fromkeys(model.partition(", ")[0] for model in study.models)
    colours = dict(zip(names, COLOURS * 3, strict=False))
    for ax, (setting, of) in zip(found, summary.items(), strict=True):
        for model, cell in of.items():
            name, _, variant = model.partition(", ")
            colour, style = colours[name], "--" if variant else "-"
            middle, least, most = zip(*(cell["figures"][place] for place in places), strict=True)
            x = [int(place) for place in places]
            ax.plot(x, middle, style, color=colour, marker=".", label=model)
            ax.fill_between(x, least, most, color=colour, alpha=0.2, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(x, places)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(ScalarFormatter())
        ax.yaxis.set_minor_formatter(ScalarFormatter())
        ax.set_title(setting, loc="left", fontsize=9)
        ax.set_xlabel("place in the text (bytes)")
        ax.set_ylabel("bits")
    found[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
