"""What is done with reports of conformance: ``linattn verify-report``, ``compare-reports``, ``join-reports`` and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from linattn.progress import bars

from . import comparing, joining, manifest, packed, reading, rendering, report, signing, submissions

__all__ = ["check_submission", "compare_reports", "join_reports", "render_report", "sign_report", "verify_report"]

SHOWN = 30


def read(path: Path) -> dict[str, Any]:
    """A report; a wrong file is a usage error."""
    try:
        return reading.read(path)
    except reading.ReportError as error:
        raise typer.BadParameter(str(error)) from None


def unedited(path: Path) -> dict[str, Any]:
    """A report that can be worked with; one that was edited is a usage error as well."""
    found = read(path)
    for edit in reading.edits(found):
        raise typer.BadParameter(f"{path}: {edit}")
    return found


def each(paths: Sequence[Path], load: Callable[[Path], dict[str, Any]]) -> list[dict[str, Any]]:
    """Several reports; a large one takes a while."""
    with bars() as progress:
        return [load(path) for path in progress.track(paths, description="reading")]


def write(path: Path, text: str) -> None:
    """Write a result, compressed if its name ends in ``.gz``; a path that cannot be written to is a usage error."""
    try:
        packed.write(path, text)
    except OSError as error:
        raise typer.BadParameter(f"--output {path}: {error.strerror}") from None


def verify_report(
    path: Annotated[Path, typer.Argument(metavar="REPORT", help="A report of linattn conformance.")],
    signature: Annotated[Path | None, typer.Option(help="Its signature, as sign-report wrote it.")] = None,
    key: Annotated[Path | None, typer.Option(help="With --signature: the public key in PEM.")] = None,
) -> None:
    """Derive the verdict of a report again, and say whether the report is intact.

    Exit status 0: intact and conformant. 1: intact, with another verdict. 2: no report. 3: edited, or of another suite.
    """
    told = read(path)
    if (signature is None) != (key is None):
        raise typer.BadParameter("--signature and --key: expected both or none")
    found = reading.verify(told)
    if signature and key:
        found = replace(found, faults=(*found.faults, *complaints_about(path, told, signature, key)))
    print(f"{told['backend']['name']}: {told['framework']} on {told['device']}, {len(told['results'])} results")
    for fault in found.faults:
        print(f"fault    {fault}")
    listed([f"against  {problem}" for problem in found.judged.problems])
    print(f"{'not intact' if found.faults else 'intact'}; the verdict of its results is: {found.judged}")
    raise typer.Exit(found.status)


def complaints_about(path: Path, told: dict[str, Any], signature: Path, key: Path) -> list[str]:
    """What is wrong with a signature; a key or a file that cannot be used is a usage error."""
    try:
        complaint = signing.complaint(path, told["verdict"], signature, key)
    except signing.SigningError as error:
        raise typer.BadParameter(str(error)) from None
    return [complaint] if complaint else []


def sign_report(
    path: Annotated[Path, typer.Argument(metavar="REPORT", help="A report of linattn conformance.")],
    key: Annotated[Path, typer.Option(help="The private key in PEM, without a password.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The signature, e.g. conformance.dsse.json.")],
) -> None:
    """Sign a report: an in-toto statement in a DSSE envelope. Needs the package securesystemslib[crypto]."""
    told = unedited(path)
    try:
        write(output, signing.sign(path, told["verdict"], key))
    except signing.SigningError as error:
        raise typer.BadParameter(str(error)) from None
    print(f"wrote {output}")


def compare_reports(
    before: Annotated[Path, typer.Argument(metavar="A", help="The earlier report.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The later report.")],
) -> None:
    """Say what changed from one report to another. Exit status 1 if any case stands worse than before, 2 for no report."""
    found = comparing.compare(unedited(before), unedited(after))
    print(*found.heads, sep="\n")
    for title, changes in (("worse", found.worse), ("better", found.better), ("larger error", found.grown)):
        if changes:
            print(f"\n{title}: {len(changes)}")
            listed([f"  {change}" for change in changes])
    if not (found.worse or found.better or found.grown):
        print("\nno case changed")
    raise typer.Exit(found.status)


def join_reports(
    parts: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="Reports of parts of one run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The report of all of it.")],
) -> None:
    """Make one report of those of its parts: run with --case, at the same time or on several machines.

    They must be of one backend, suite, device, profile and kind of run, and agree on the cases that several of them ran.
    """
    try:
        joined = joining.join([(str(path), part) for path, part in zip(parts, each(parts, read), strict=True)], manifest.load())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    write(output, report.text(joined))
    print(f"wrote {output}: {len(joined['results'])} results; {joined['verdict']['outcome']}: {joined['verdict']['profile']}")


def render_report(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="One report, or several for a matrix.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page: .html or .md.")],
) -> None:
    """Make a page of a report, or of several the matrix of operators and backends."""
    if output.suffix not in (".html", ".md"):
        raise typer.BadParameter(f"--output {output}: expected a name that ends in .html or .md")
    write(output, page(each(reports, unedited), output.suffix))
    print(f"wrote {output}")


def check_submission(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="A submission, or a folder of submissions.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page of those accepted here, as .md.")
    ] = None,
) -> None:
    """Say whether submissions are accepted, and make the page of them.

    Exit status 0: all are accepted. 1: one is not. 2: there is none.
    """
    found = submissions.folders(root)
    if not found:
        raise typer.BadParameter(f"{root}: no submission: none of its folders has a {submissions.ABOUT}")
    held = manifest.load()
    accepted: list[submissions.Submission] = []
    for folder in found:
        try:
            one = submissions.read(folder)
            against = submissions.check(one)
        except submissions.SubmissionError as error:
            print(f"refused   {error}")
            continue
        print(f"{'refused ' if against else 'accepted'}  {folder}: {one.about['product']}, {one.about['profile']}")
        listed([f"  against  {text}" for text in against])
        accepted += [] if against else [one]
    if output:
        write(output, submissions.page(accepted, held))
        print(f"wrote {output}")
    raise typer.Exit(int(len(accepted) < len(found)))


def page(found: Sequence[dict[str, Any]], suffix: str) -> str:
    """The text of a page."""
    if len(found) == 1:
        return rendering.html(found[0]) if suffix == ".html" else rendering.markdown(found[0])
    matrix = rendering.matrix_html if suffix == ".html" else rendering.matrix_markdown
    return matrix(found, manifest.load())


def listed(lines: list[str]) -> None:
    """The first few lines, and how many more there are."""
    print(*lines[:SHOWN], sep="\n", end="\n" if lines else "")
    if len(lines) > SHOWN:
        print(f"… and {len(lines) - SHOWN} more")
