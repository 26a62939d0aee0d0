"""What a reader is shown of the results of a benchmark, by its name in a results file: tables and figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import beside, grid, host, parts, published, scale
from .sections import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECTIONS = {
    "table": published.sections,
    "grid": grid.sections,
    "host": host.sections,
    "parts": parts.sections,
    "scale": scale.sections,
    **dict.fromkeys(beside.BENCHMARKS, beside.sections),
}
"""Benchmarks whose report is a list of tables; that of ``operators`` is one table with a floor for every row."""
HEATMAPS = {
    "table": published.heatmaps,
    "grid": grid.heatmaps,
    **dict.fromkeys(beside.BENCHMARKS, beside.heatmaps),
}
"""Titles, lines, columns and ratios of the fields."""


def sections(name: str, results: dict[str, Any]) -> list[Section]:
    """The tables."""
    return SECTIONS[name](results)


def figures(name: str, results: dict[str, Any]) -> dict[str, Figure]:
    """The figures, by their names."""
    from . import plots

    if name == "operators":
        return plots.figures(results["rows"])
    if name == "scale":
        return plots.scaling(results)
    return {title: plots.heatmap(title, *parts) for title, *parts in HEATMAPS.get(name, lambda results: [])(results)}
