"""One self-contained HTML page of a results file: no script, and nothing fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from . import plots, reports, table

TEMPLATES = Environment(
    loader=PackageLoader("linattn_benchmarks", "."), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True
)


def html(document: dict[str, Any]) -> str:
    """The page."""
    name, results = document["benchmark"], document["results"]
    shared = {"environment": document["environment"], "figures": plots.svg(reports.figures(name, results))}
    if name in reports.SECTIONS:
        return TEMPLATES.get_template("sections.html").render(sections=reports.sections(name, results), **shared)
    rows = results["rows"]
    columns, lines = table.filled(table.called(rows))
    return TEMPLATES.get_template("page.html").render(
        ceilings=table.ceilings(results["ceilings"]),
        columns=columns,
        right=table.RIGHT,
        rows=[(row["status"], line) for row, line in zip(table.called(rows), lines, strict=True)],
        remarks=table.remarks(rows),
        **shared,
    )


def write(document: dict[str, Any], path: Path) -> None:
    """The page, in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html(document), encoding="utf-8")
