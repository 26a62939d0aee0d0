"""``linattn demo``: the command."""

from __future__ import annotations

import codecs
import contextlib
import heapq
import io
import stat
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import UnknownBackend
from ..progress import bars
from .run import BLOCK, DECODED, NotRun, Result, parts, record, run

__all__ = ["DEFAULT_LIMIT", "LARGEST_LIMIT", "demo"]

DEFAULT_LIMIT = 8 * 1024
LARGEST_LIMIT = 1024 * 1024


def demo(
    file: Annotated[Path | None, typer.Argument(help="A text file. Default: a text that ships with Python.")] = None,
    limit: Annotated[int, typer.Option(help="Score at most this many bytes from the start of the file.")] = DEFAULT_LIMIT,
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend to run; repeat for several. Default: every installed one.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Score a file that is not UTF-8 text, byte by byte.")] = False,
) -> None:
    """Score a text with a small GLA language model on every installed backend, and compare them with the oracle."""
    try:
        if not 1 <= limit <= LARGEST_LIMIT:
            raise ValueError(f"--limit must be from 1 to {LARGEST_LIMIT:,}, got {limit:,}")
        name, data, size = _text_of_python(limit) if file is None else _read(file, limit, force)
        steps = parts(backend)
    except (ValueError, UnknownBackend) as error:
        typer.echo(f"linattn demo: {error}", err=True)
        raise typer.Exit(2) from None
    if len(data) < size:
        typer.echo(f"Scoring the first {len(data):,} of {size:,} bytes of {name}; {_more(limit)}.")
    else:
        typer.echo(f"Scoring the {size:,} bytes of {name}.")
    results = _run(data, backend, len(steps) + 1)
    _report(results)
    if any(isinstance(r, NotRun) and r.failed for r in results) or not any(isinstance(r, Result) for r in results):
        raise typer.Exit(1)


def _more(limit: int) -> str:
    return f"--limit scores up to {LARGEST_LIMIT:,}" if limit < LARGEST_LIMIT else "that is the most it scores"


def _read(path: Path, limit: int, force: bool) -> tuple[str, bytes, int]:
    """Name, first bytes and size of a file; a ``ValueError`` whose text tells a user what is wrong."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path} is a directory: name a text file")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file: name a text file")
        with path.open("rb") as file:
            data = file.read(limit)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if not data:
        raise ValueError(f"{path} is empty: there is nothing to score")
    if not force:
        _check_text(path, data)
    return str(path), data, max(status.st_size, len(data))


def _check_text(path: Path, data: bytes) -> None:
    advice = "--force scores its bytes as they are"
    if b"\0" in data:
        raise ValueError(f"{path} is a binary file (a NUL byte at offset {data.index(0)}): {advice}")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)  # the last character may be cut by the limit
    except UnicodeDecodeError as error:
        wrong = data[error.start]
        raise ValueError(f"{path} is not UTF-8 text (byte 0x{wrong:02x} at offset {error.start}): {advice}") from None


def _text_of_python(limit: int) -> tuple[str, bytes, int]:
    """An English text that every Python has: the essay in ``heapq``, else the Zen of Python."""
    text, name = getattr(heapq, "__about__", None), "heapq.__about__, a text that ships with Python"
    if not text:
        with contextlib.redirect_stdout(io.StringIO()):  # importing it prints it
            import this
        text, name = codecs.decode(this.s, "rot13"), "this, the Zen of Python"
    data = text.encode()
    return name, data[:limit], len(data)


def _run(data: bytes, backends: list[str] | None, count: int) -> list[Result | NotRun]:
    """Run with a progress bar on standard error, where a person sees it."""
    results: list[Result | NotRun] = []
    with bars(count=False) as progress:
        task = progress.add_task("starting", total=count * len(data))
        for done, result in enumerate(
            run(data, backends, lambda name, n: progress.update(task, description=name, advance=n)), start=2
        ):
            results.append(result)
            progress.update(task, completed=done * len(data))
    return results


def _report(results: list[Result | NotRun]) -> None:
    """The table, what did not run, and what the figures mean."""
    table = Table("backend", "arrays", box=None, pad_edge=False)
    for column in ("bits per byte", "prefill tokens/s", "decode tokens/s", "largest difference"):
        table.add_column(column, justify="right")
    for result in results:
        if isinstance(result, Result):
            score = result.score
            rates = f"{score.prefill:,.0f}", "" if score.decode is None else f"{score.decode:,.0f}"
            table.add_row(result.backend, result.arrays, f"{score.bits_per_byte:.4f}", *rates, f"{result.difference:.1e}")
    typer.echo()
    if table.row_count:
        width = None if Console().is_terminal else 10_000
        Console(highlight=False, markup=False, width=width).print(table)
    if table.row_count and any(isinstance(result, NotRun) for result in results):
        typer.echo()
    for result in results:
        if isinstance(result, NotRun):
            typer.echo(f"{result.backend} {'failed' if result.failed else 'did not run'}: {result.reason}")
    bits = record()["bits_per_byte"]
    typer.echo(
        f"""
One token is one byte. Prefill: chunk_gla in blocks of {BLOCK:,}. Decode: recurrent_gla from the state that prefill
returned, one byte at a time, for the last {DECODED} bytes or, in a short text, the last half.
Largest difference: of a byte's log probability, in nats, from the oracle in float64.
On held-out help texts of Python the model scores {bits["test"]:.2f} bits per byte; an order-2 byte model fitted
to the same texts scores {bits["order_2_test"]:.2f}."""
    )
