"""Figures in the text of the experiments' pages, and in what the systems' pages say of them, are those of their records.

A comment at the end of a paragraph says where each figure comes from: ``<!-- 1.67 =
{gates:summary/1 head/vector/figures/bits/0}; … -->``. ``{RECORD:PATH}`` is a number in the results of ``RECORD.json``, to be
added, subtracted and divided; ``given`` is said of a number that is no result of ours. Numbers with a decimal point,
percentages and ratios must all be accounted for.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
FIGURE = re.compile(r"(?<![\w.,/])(?:\d[\d,]*\.\d+(?: %| times)?|\d+(?: %| times))(?![\w/])")
CLAIMS = re.compile(r"<!-- (.*?) -->")
PAGES = sorted(path for path in DOCS.glob("*.md") if not path.name.endswith(".table.md"))
SYSTEMS = [DOCS.parent / "systems" / f"{name}.md" for name in ("flash", "gla", "hedgehog", "survey")]


def value(expression: str) -> float:
    """What an expression over records comes to."""

    def found(match: re.Match[str]) -> str:
        record, path = match[1].split(":", 1)
        at = json.loads((DOCS / f"{record}.json").read_text(encoding="utf-8"))["results"]
        for key in path.split("/"):
            at = at[int(key)] if isinstance(at, list) else at[key]
        return repr(float(at))

    arithmetic = re.sub(r"\{(.*?)\}", found, expression)
    assert re.fullmatch(r"[\d.e +\-/*()]+", arithmetic), arithmetic
    return eval(arithmetic)


def agrees(figure: str, found: float) -> bool:
    """Whether a number rounds to the figure as it is printed."""
    number, unit = re.fullmatch(r"([\d.,]+)( %| times)?", figure).groups()
    decimals = len(number.partition(".")[2])
    found = 100 * found if unit == " %" else found
    return abs(found - float(number.replace(",", ""))) <= 0.5 * 10**-decimals + 1e-9


def faults(paragraph: str) -> list[str]:
    """What is wrong with the figures of a paragraph."""
    claims = [claim.partition(" = ")[::2] for text in CLAIMS.findall(paragraph) for claim in text.split("; ")]
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", CLAIMS.sub("", paragraph))
    sourced = {bare(figure) for figure, _ in claims}
    found = [f"{figure}: no source" for figure in FIGURE.findall(prose) if bare(figure) not in sourced]
    for figure, source in claims:
        if bare(figure) not in prose:
            found.append(f"{figure}: not in the paragraph")
        elif source != "given" and not agrees(figure, value(source)):
            found.append(f"{figure} is {value(source):.6g}")
    return found


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


@pytest.mark.parametrize(
    ("heads", "overlapping"), [("1 head", ["fixed, scalar"]), ("4 heads", ["scalar, vector"]), ("8 heads", [])]
)
def test_gates_whose_seeds_overlap_are_those_that_gla_s_page_names(heads, overlapping):
    summary = json.loads((DOCS / "gates.json").read_text(encoding="utf-8"))["results"]["summary"][heads]
    seeds = {gate: summary[gate]["figures"]["bits"][1:] for gate in ("none", "fixed", "scalar", "vector")}
    assert [f"{worse}, {better}" for worse, better in pairwise(seeds) if min(seeds[worse]) <= max(seeds[better])] == overlapping


def test_a_figure_that_is_not_the_record_s_is_found():
    gla = "{gates:summary/4 heads/vector/figures/bits/0}"
    assert faults(f"GLA takes 1.62 bits. <!-- 1.62 = {gla} -->") == []
    assert faults(f"GLA takes 1.63 bits. <!-- 1.63 = {gla} -->") == ["1.63 is 1.62261"]
    assert faults("GLA takes 1.62 bits, 12 % less.") == ["1.62: no source", "12 %: no source"]
    assert faults(f"GLA is good. <!-- 1.62 = {gla} -->") == ["1.62: not in the paragraph"]
