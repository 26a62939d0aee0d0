"""Pages made of reports: one report as HTML or Markdown, several as a matrix of operators and backends."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from linattn.plugin import FORMS

from . import capabilities, grouping
from .manifest import Manifest
from .runner import STATUSES
from .verdict import NONE, cases_of, told_by_no_case

__all__ = ["counts", "html", "markdown", "matrix_html", "matrix_markdown", "summary"]

Report = Mapping[str, Any]
SHOWN = 30


def html(report: Report) -> str:
    """One report as a page that needs nothing but itself: filters, a plot of every error, every case."""
    data = json.dumps(report, separators=(",", ":")).replace("<", "\\u003c")
    return _template("report.html").replace("/*DATA*/", data)


def _template(name: str) -> str:
    return (files(__package__) / "pages" / name).read_text(encoding="utf-8")


# -- Markdown --------------------------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """One report as Markdown: what was tested, statuses by operator, what failed, what is declared, the largest errors."""
    results = report["results"]
    parts = [f"# {_name(report)}: {_headline(report)}", _about(report), *_badges(report), _by_operator(results)]
    failed = [result for result in results if result["status"] == "failed"]
    if failed:
        parts += [f"## Failed: {len(failed)}", _grouped(failed)]
    left = Counter(_line(result["message"]) for result in results if result["status"] == "not-run")
    if left:
        lines = [f"- {count} cases: {reason}" for reason, count in left.most_common(SHOWN)]
        parts += [f"## Not run: {left.total()}", "\n".join([*lines, *_rest(list(left))])]
    known = [result for result in results if result["status"] == "known-failure"]
    if known:
        lines = [f"- `{result['id']}`: {_line(result['message'])}" for result in known[:SHOWN]]
        parts += [f"## Known failures: {len(known)}", "\n".join([*lines, *_rest(known)])]
    declared = Counter(_line(result["message"]) for result in _declared(results))
    if declared:
        lines = [f"- {count} cases: {reason}" for reason, count in declared.most_common(SHOWN)]
        parts += ["## Declared unsupported", "\n".join([*lines, *_rest(list(declared))])]
    largest = sorted((result for result in results if result["error"]), key=lambda result: -result["error"])[:5]
    if largest:
        lines = [f"| `{result['id']}` | {result['error']:.2f} |" for result in largest]
        parts += ["## Largest errors", "\n".join(["| case | error ÷ bound |", "| --- | ---: |", *lines])]
    others = told_by_no_case(report)
    if others:
        parts += ["## Other reasons against it", "\n".join([*(f"- {_line(text)}" for text in others[:SHOWN]), *_rest(others)])]
    return "\n\n".join(parts) + "\n"


def summary(report: Report, selection: bool = False) -> str:
    """A part of that, for a page that says more: what was tested, how many cases ended how, and what failed.

    Args:
        report: The report.
        selection: It is of selected cases, and has no verdict.
    """
    counts = Counter(result["status"] for result in report["results"])
    told = ", ".join(f"{counts[status]:,} {status.replace('-', ' ')}" for status in STATUSES if counts[status])
    failed = [result for result in report["results"] if result["status"] == "failed"]
    about = f"{_about(report)} **{told}**{'' if selection else f'; verdict: {_verdict(report)}'}.\n"
    return f"{about}\n{_grouped(failed, examples=False)}\n" if failed else about


def counts(reports: Sequence[Report]) -> str:
    """A row a report: how many cases ended how, and the verdict."""
    heads = ["backend", "arrays", *(status.replace("-", " ") for status in STATUSES), "verdict"]
    rows: list[list[str]] = []
    for report in reports:
        found = Counter(result["status"] for result in report["results"])
        numbers = [f"{found[status]:,}" if found[status] else "–" for status in STATUSES]
        rows.append([*_heads(report), *numbers, _verdict(report)])
    lines = [heads, ["---", "---", *["---:"] * len(STATUSES), "---"], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _headline(report: Report) -> str:
    """The outcome, the profile and how many cases ran, as far as the report says."""
    told = report["verdict"]
    if told["outcome"] == NONE:
        return f"{NONE}: a selection of cases"
    covered = f"; {capabilities.short(*told['coverage'])}" if "coverage" in told else ""
    return f"{told['outcome']} ({report['profile']}{covered})"


def _badges(report: Report) -> list[str]:
    """Capabilities, and whether all, some or none of their cases passed."""
    badges = report["verdict"].get("badges", {})
    return ["; ".join(f"{name}: {passed}" for name, passed in badges.items()) + "."] if badges else []


def _grouped(results: Sequence[Mapping[str, Any]], examples: bool = True) -> str:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in grouping.rows(results)]
    table = [
        ["tried", "cases", "operators", "dtypes", "what came", "for example"],
        ["---", "---:", *["---"] * 4],
        *rows[:SHOWN],
    ]
    return "\n".join([*(f"| {' | '.join(row if examples else row[:-1])} |" for row in table), *_rest(rows)])


def _declared(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The cases declared unsupported of those operators that the backend has; of the others the table says enough."""
    had = {_operator(result["id"]) for result in results if result["status"] == "passed" and "/bad-input/" not in result["id"]}
    return [result for result in results if result["status"] == "declared-unsupported" and _operator(result["id"]) in had]


def _rest(found: Sequence[Any]) -> list[str]:
    return [f"- … and {len(found) - SHOWN} more"] if len(found) > SHOWN else []


def _line(text: str) -> str:
    return " ".join(text.split())


def _name(report: Report) -> str:
    backend = report["backend"]
    return f"{backend['name']} {backend['version']}".strip()


def _device(report: Report) -> str:
    return report["versions"].get("device", report["device"])


def _about(report: Report) -> str:
    versions = [f"{name} {version}" for name, version in report["versions"].items() if name != "device"]
    system = f"Python {report['platform']['python']}, {report['platform']['system']} {report['platform']['machine']}"
    said = [f"{name}: {value}" for name, value in report.get("environment", {}).items()]
    return (
        f"{report['framework']} on {_device(report)}; {', '.join([*versions, system, *said])}. "
        f"Suite {report['suite']}, API {report['api']}, {len(report['results'])} cases in {report['seconds']} s."
    )


def _operator(name: str) -> str:
    """The operator that a case is of, as its id says."""
    family, form, *_ = name.split("/")
    return family if form == "auto" else f"{form}_{family}"


def _by_operator(results: Sequence[Mapping[str, Any]]) -> str:
    statuses = [status for status in STATUSES if any(result["status"] == status for result in results)]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        counts[_operator(result["id"])][result["status"]] += 1
    rows = [
        f"| `{operator}` | {' | '.join(str(found[status] or '') for status in statuses)} |"
        for operator, found in sorted(counts.items())
    ]
    return "\n".join([f"| operator | {' | '.join(statuses)} |", f"| --- |{' ---: |' * len(statuses)}", *rows])


# -- several ---------------------------------------------------------------------------------------------------------


def _cell(found: Counter[str]) -> tuple[str, list[str]]:
    """Class and counts of one operator of one backend."""
    failed, left, known = found["failed"], found["not-run"], found["known-failure"]
    passed, declared = found["passed"], found["declared-unsupported"]
    if not (failed or left or known or passed):
        return "none", ["–"]
    counts = {"failed": failed, "known": known, "passed": passed, "not run": left, "declared": declared}
    kind = "failed" if failed else "left" if left else "known" if known else "some" if declared else "all"
    return kind, [f"{count} {what}" for what, count in counts.items() if count]


def _columns(reports: Sequence[Report], held: Sequence[Manifest]) -> list[dict[str, Counter[str]]]:
    """Statuses of each operator in each report, over the cases of its profile in the manifest that it quotes, or else in the
    first; a case without a result is not run.
    """
    columns: list[dict[str, Counter[str]]] = []
    for report in reports:
        statuses = {result["id"]: result["status"] for result in report["results"]}
        quoted = next((one for one in held if one.hash == report["manifest"]), held[0])
        wanted = cases_of(report["profile"], quoted.applicable(report["framework"], report["device"], report["memory"]))
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for name, entry in wanted.items():
            if "/bad-input/" not in name:
                counts[entry.operator][statuses.get(name, "not-run")] += 1
        columns.append(counts)
    return columns


def _heads(report: Report) -> tuple[str, str]:
    return _name(report), f"{report['framework']} on {_device(report)}"


def _operators(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every operator, those of a family together."""
    return sorted({operator for column in columns for operator in column}, key=_family_first)


def _family_first(operator: str) -> tuple[str, str]:
    form = next((form for form in (*FORMS, "decode") if operator.startswith(f"{form}_")), "")
    return operator.removeprefix(f"{form}_"), form


def matrix_markdown(reports: Sequence[Report], *held: Manifest) -> str:
    """Operators against backends."""
    columns = _columns(reports, held)
    heads = [f"{name}<br>{where}" for name, where in map(_heads, reports)]
    lines = [f"| operator | {' | '.join(heads)} |", "| --- |" + " --- |" * len(reports)]
    for operator in _operators(columns):
        cells = ["<br>".join(_cell(column.get(operator, Counter()))[1]) for column in columns]
        lines.append(f"| `{operator}` | {' | '.join(cells)} |")
    lines.append(f"| verdict | {' | '.join(_verdict(report) for report in reports)} |")
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    return f"{report['verdict']['outcome']} ({report['profile']})"


def _unbroken(text: str) -> str:
    return f"<span>{escape(text)}</span>"


def matrix_html(reports: Sequence[Report], *held: Manifest) -> str:
    """The same as a page."""
    columns = _columns(reports, held)
    head = "".join(f"<th>{escape(name)}<small>{escape(where)}</small></th>" for name, where in map(_heads, reports))
    rows: list[str] = []
    for operator in _operators(columns):
        cells = [_cell(column.get(operator, Counter())) for column in columns]
        told = "".join(f'<td class="{kind}">{", ".join(map(_unbroken, counts))}</td>' for kind, counts in cells)
        rows.append(f'<tr><th scope="row">{escape(operator)}</th>{told}</tr>')
    verdicts = [(report["verdict"]["outcome"], report["profile"]) for report in reports]
    foot = "".join(f"<td>{escape(outcome)}<small>profile {escape(profile)}</small></td>" for outcome, profile in verdicts)
    table = (
        f"<table><thead><tr><th></th>{head}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n"
        f'<tfoot><tr><th scope="row">verdict</th>{foot}</tr></tfoot></table>'
    )
    return _template("matrix.html").replace("<!--TABLE-->", table)
