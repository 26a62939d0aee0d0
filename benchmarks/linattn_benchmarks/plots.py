"""Figures of a results file: time against T, and the ratio to the floor."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from . import costs, scale
from .table import gates, library, on_device, ratio

Row = dict[str, Any]

COLOURS = ("#0b7285", "#c2571a", "#5f3dc4", "#2b8a3e", "#a61e4d", "#866118", "#495057")
MARKERS = "osD^vPX"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dee2e6",
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "linattn",
    "legend.frameon": False,
}


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Every figure that the rows are enough for, by name. What gave wrong results is in none."""
    timed = [row for row in rows if row["status"] == "ok"]
    colours = {name: i for i, name in enumerate(dict.fromkeys(library(row) for row in timed))}
    found = {}
    with plt.rc_context(STYLE):
        for key in dict.fromkeys((row["operator"], row["what"], other_sizes(row)) for row in timed):
            series = [row for row in timed if (row["operator"], row["what"], other_sizes(row)) == key]
            if len({row["case"]["sizes"]["T"] for row in series}) > 1:
                found[" ".join(("time", *key))] = time_against_length(key, series, colours)
        if timed:
            found["ratio to floor"] = ratio_to_floor(timed, colours)
    return found


def other_sizes(row: Row) -> str:
    """The shape without its length."""
    return " ".join(part for part in shape(row).split() if not part.startswith("T"))


def shape(row: Row) -> str:
    """The sizes, and the gates where they are not a model's own, of the usual dtype."""
    kind = gates(row)
    return row["label"] if kind == "model" else f"{row['label']}, gates {kind}"


def time_against_length(key: tuple[str, str, str], rows: Sequence[Row], colours: dict[str, int]) -> Figure:
    """Median and spread against T, of graphs where a call was recorded, both on logarithmic axes, with the floor below."""
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name in dict.fromkeys(library(row) for row in rows):
        mine = sorted((row for row in rows if library(row) == name), key=length)
        ms = [on_device(row) for row in mine]
        bars = [[m["median"] - m["q10"] for m in ms], [m["q90"] - m["median"] for m in ms]]
        i = colours[name]
        axes.errorbar(
            [length(row) for row in mine],
            [m["median"] for m in ms],
            yerr=bars,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            capsize=2,
            linewidth=1.4,
            label=name,
        )
    floor = {length(row): row["floor"]["ms"] for row in rows}
    lengths = sorted(floor)
    axes.plot(lengths, [floor[T] for T in lengths], color="#868e96", linestyle="--", linewidth=1.2, label="floor")
    axes.set(xscale="log", yscale="log", xlabel="T (tokens)", ylabel="ms", title=" · ".join(key))
    axes.set_xticks(lengths, [f"{T:,}" for T in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend()
    return figure


def length(row: Row) -> int:
    """T."""
    return row["case"]["sizes"]["T"]


def ratio_to_floor(rows: Sequence[Row], colours: dict[str, int]) -> Figure:
    """One line for each operator, shape and what is done; on it a point for each library."""
    lines = list(dict.fromkeys((row["operator"], shape(row), row["what"]) for row in rows))
    figure, axes = plt.subplots(figsize=(8.2, 1.0 + 0.21 * len(lines)), layout="constrained")
    for name, i in colours.items():
        mine = [row for row in rows if library(row) == name]
        axes.plot(
            [ratio(row) for row in mine],
            [lines.index((row["operator"], shape(row), row["what"])) for row in mine],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=6,
            linestyle="none",
            label=name,
        )
    ratios = [ratio(row) for row in rows]
    axes.set(xscale="log", xlabel="median time ÷ floor (logarithmic)", ylim=(len(lines) - 0.5, -0.5))
    axes.set_xlim(min([0.8, *(x / 1.2 for x in ratios)]), max([2, *ratios]) * 1.2)
    axes.set_yticks(range(len(lines)), [" · ".join(line) for line in lines], fontsize=8)
    axes.xaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color="#868e96", linestyle="--", linewidth=1.2)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=4)
    return figure


SLANTED = 10
"""Letters of a column's name that lie side by side."""


def heatmap(title: str, lines: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], float]) -> Figure:
    """Ratios by line and column, written in their fields: white at one, red above, blue below, blank where there is none."""
    with plt.rc_context(STYLE | {"axes.grid": False}):
        size = (max(5.6, 2.0 + 0.62 * len(columns)), 0.9 + 0.26 * len(lines))
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        values = [[cells.get((line, column), math.nan) for column in columns] for line in lines]
        limit = max([1.5, *(max(x, 1 / x) for x in cells.values())])
        axes.pcolormesh(values, cmap="RdBu_r", norm=LogNorm(1 / limit, limit), edgecolors="white", linewidth=0.6)
        axes.invert_yaxis()
        for (line, column), x in cells.items():
            strong = abs(math.log(x)) > 0.6 * math.log(limit)
            place = (columns.index(column) + 0.5, lines.index(line) + 0.5)
            axes.text(
                *place,
                f"{x:.2f}" if x >= 0.01 else f"{x:.1g}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if strong else "#212529",
            )
        slanted = dict(rotation=35, ha="left", rotation_mode="anchor") if max(map(len, columns)) > SLANTED else {}
        axes.set_xticks([i + 0.5 for i in range(len(columns))], columns, fontsize=8, **slanted)
        axes.set_yticks([i + 0.5 for i in range(len(lines))], lines, fontsize=8)
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.set_title(title, fontsize=10)
    return figure


def scaling(results: dict[str, Any]) -> dict[str, Figure]:
    """Share of ideal by ranks, of every length of a rank that was measured, and of whole sequences."""
    fitted = costs.fit(results["rows"], results["sizes"])
    lengths = sorted({row["tokens"] for row in results["rows"] if row["family"]})
    found = {f"measured with {T:,} tokens a rank": (T, (1, 2, 4, 8), lambda T, _: T) for T in lengths}
    found |= {f"{T:,} tokens": (T, scale.FAR, lambda T, ranks: T / ranks) for T in scale.TOKENS}
    return {f"share of ideal, {name}": share_of_ideal(name, results, fitted, *given) for name, given in found.items()}


def share_of_ideal(
    name: str,
    results: dict[str, Any],
    fitted: costs.Costs,
    tokens: int,
    ranks: Sequence[int],
    of_a_rank: Callable[[int, int], float],
) -> Figure:
    """One line a family, forward with backward; points where it was measured."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        for i, family in enumerate(scale.families(results)):
            style = {"color": COLOURS[i % len(COLOURS)], "label": family}
            shares = [fitted.efficiency(family, "fwdbwd", R, of_a_rank(tokens, R)) for R in ranks]
            axes.plot(ranks, shares, linewidth=1.4, linestyle="-" if i < len(COLOURS) else "--", **style)
            mine = {
                row["ranks"]: row["ms"]["median"]
                for row in results["rows"]
                if (row["family"], row["what"]) == (family, "fwdbwd") and of_a_rank(tokens, row["ranks"]) == row["tokens"]
            }
            if 1 in mine:
                points = [mine[1] / ms for ms in mine.values()]
                axes.plot([*mine], points, color=style["color"], marker=MARKERS[i % len(MARKERS)], linestyle="none")
        axes.set(xscale="log", xlabel="ranks", ylabel="share of ideal, forward with backward", title=name, ylim=(0, 1.05))
        axes.set_xticks(ranks, [f"{R:,}" for R in ranks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(fontsize=7, ncols=2)
    return figure


def write_png(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Every figure as a PNG file in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{'-'.join(re.findall(r'[a-z0-9]+', name.lower()))}.png"
        figure.savefig(path, dpi=150, metadata={"Software": None})
        plt.close(figure)
        paths.append(path)
    return paths


def svg(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Every figure as an SVG element."""
    found = {}
    for name, figure in figures.items():
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
        text = buffer.getvalue()
        found[name] = text[text.index("<svg") :]
    return found
