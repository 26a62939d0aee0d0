"""The rows of a results file as text: on the console, and in Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

Row = dict[str, Any]

COLUMNS = ("operator", "shape", "what", "library", "ms", "10–90 %", "graph, ms", "× floor", "first call", "peak", "error")
RIGHT = COLUMNS[4:]


def cells(row: Row) -> tuple[str, ...]:
    """One line of a table; a row without figures says why."""
    head = (row["operator"], row["label"], row["what"], library(row))
    if row["ms"] is None:
        return (*head, row["status"], *[""] * 6)
    ms = row["ms"]
    return (
        *head,
        milliseconds(ms["median"]),
        f"{milliseconds(ms['q10'])}–{milliseconds(ms['q90'])}",
        "" if row["graph_ms"] is None else milliseconds(row["graph_ms"]["median"]),
        f"{ratio(row):.3g}",
        "" if row["first_call_s"] is None else f"{row['first_call_s']:.2f} s",
        "" if row["peak_bytes"] is None else memory(row["peak_bytes"]),
        error(row),
    )


def called(rows: Iterable[Row]) -> list[Row]:
    """Rows of what was called; those skipped are in the remarks."""
    return [row for row in rows if row["status"] != "skipped"]


USUAL = "float32"
"""The dtype of gates that nobody says."""


def gates(row: Row) -> str:
    """Their kind, and their dtype where it is not the usual one."""
    case = row["case"]
    return case["gates"] if case["gate_dtype"] == USUAL else f"{case['gates']}, {case['gate_dtype']}"


def library(row: Row) -> str:
    """Who ran; for linattn the backend, and what it chose by itself."""
    if row["backend"] is None:
        return row["library"]
    chosen = f" → {row['ran'].partition('.')[0]}" if row["backend"] == "auto" and row["ran"] else ""
    return f"{row['library']}:{row['backend']}{chosen}"


def on_device(row: Row) -> dict[str, float]:
    """Median and spread, without the host's share where the call could be recorded."""
    return row["graph_ms"] or row["ms"]


def ratio(row: Row) -> float:
    """To the least time that the device needs."""
    return on_device(row)["median"] / row["floor"]["ms"]


def milliseconds(ms: float) -> str:
    """Three digits."""
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def memory(nbytes: int) -> str:
    """In MiB."""
    mib = nbytes / 2**20
    return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def error(row: Row) -> str:
    """The largest relative error; loud where it is beyond the bound."""
    if row["error"] is None:
        return "not checked"
    worst = row["error"]["worst"]
    text = "not finite" if worst is None else f"{worst:.1e}"
    return text if row["status"] == "ok" else f"WRONG {text}"


def filled(rows: Iterable[Row]) -> tuple[list[str], list[tuple[str, ...]]]:
    """The names of the columns that hold anything, and the lines in them."""
    lines = [cells(row) for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in lines)]
    return [COLUMNS[i] for i in used], [tuple(line[i] for i in used) for line in lines]


def console(rows: Iterable[Row]) -> Table:
    """Every row that was called, for the terminal."""
    rows = called(rows)
    names, lines = filled(rows)
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in RIGHT else "left", no_wrap=name not in ("shape", "library"))
    for row, line in zip(rows, lines, strict=True):
        table.add_row(*line, style={"wrong": "bold red", "failed": "red"}.get(row["status"], ""))
    return table


def remarks(rows: Iterable[Row]) -> list[str]:
    """Why rows have no figures, and what to know of others: each said once, with the rows it is about."""
    said: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        for text in filter(None, (row["reason"], row["note"])):
            status = f" {row['status']}" if text == row["reason"] else ""
            said.setdefault((library(row), status, text), {})[f"{row['operator']} {row['what']}"] = None
    return [f"{who}{status}: {text} ({', '.join(about)})" for (who, status, text), about in said.items()]


def ceilings(measured: dict[str, Any]) -> str:
    """What the floors were computed with."""
    copy, rate = measured["copy_bytes_per_s"] / 1e9, measured["matmul_flops_per_s"] / 1e12
    plural = "" if measured["threads"] == 1 else "s"
    threads = f", {measured['threads']} thread{plural}" if measured["threads"] and measured["device"] == "cpu" else ""
    load = f", load {measured['load']:.1f}" if measured["load"] is not None and measured["device"] == "cpu" else ""
    return (
        f"{measured['name']} ({measured['device']}{threads}{load}): copy {copy:.4g} GB/s, "
        f"{measured['matmul_dtype']} matrix product {rate:.3g} TFLOP/s"
    )
