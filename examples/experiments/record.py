"""What an experiment finds, kept as it is found: a run that was cut off goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import linattn
import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
PLACES = ("weights", "tokens", "results")
"""Options that say where files lie. A run goes on only with the same, but what it publishes is the same wherever they lay."""
COLOURS = ("#1f5f8b", "#d1495b", "#3a7d44", "#8d6a9f", "#e09f3e", "#5c6b73")


class Record:
    """The figures of one experiment: ``NAME.json``, ``NAME.table.md`` and ``NAME.svg`` in a folder.

    While it runs, finished parts are in ``NAME.partial.json``.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.folder = name, Path(options.out)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options = {key: value for key, value in vars(options).items() if key != "out"}
        self.partial = self.folder / f"{name}.partial.json"
        self.parts: dict[str, Any] = {}
        self.versions = {"python": platform.python_version(), "linattn": linattn.__version__, "torch": torch.__version__}
        if self.partial.exists():
            saved = json.loads(self.partial.read_text(encoding="utf-8"))
            if saved["options"] != self.options:
                raise SystemExit(f"{self.partial} is of other options, {saved['options']}: remove it or use those")
            self.parts = saved["parts"]

    def once(self, key: str, work: Callable[[], Any]) -> Any:
        """The result of a part: worked out if it is not there yet, and saved at once with the seconds that it took."""
        if key not in self.parts:
            start = time.perf_counter()
            found = work()
            self.parts[key] = {"found": found, "seconds": round(time.perf_counter() - start, 1)}
            fresh = self.partial.with_suffix(".new")
            fresh.write_text(
                json.dumps({"options": self.options, "versions": self.versions, "parts": self.parts}), encoding="utf-8"
            )
            fresh.replace(self.partial)
            print(f"{key}: {self.parts[key]['seconds']} s, {found}", flush=True)
        return self.parts[key]["found"]

    def arrays(self, key: str, work: Callable[[], tuple[dict[str, torch.Tensor], Any]]) -> tuple[dict[str, torch.Tensor], Any]:
        """The same for a part that finds arrays too, which are kept in a file of their own."""
        path = self.folder / f"{self.name}.partial.{zlib.crc32(key.encode()):08x}.pt"
        if not path.exists():
            self.parts.pop(key, None)

        def save() -> Any:
            arrays, rest = work()
            torch.save(arrays, path)
            return rest

        rest = self.once(key, save)
        return torch.load(path), rest

    def also(self, name: str, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Write a second table, ``NAME.table.md``."""
        (self.folder / f"{name}.table.md").write_text(table(header, rows), encoding="utf-8")

    def finish(self, results: Any, header: Sequence[str], rows: Iterable[Sequence[Any]], figure: Figure) -> None:
        """Write the three files, and drop the partial ones."""
        whole = whole_run(self.name, {"options": self.options, "versions": self.versions, "parts": self.parts}, results)
        publish(self.folder, whole, header, rows, figure)
        for path in self.folder.glob(f"{self.name}.partial.*"):
            path.unlink()


def whole_run(name: str, saved: dict[str, Any], results: Any) -> dict[str, Any]:
    """What ``NAME.json`` says of a run, given its ``NAME.partial.json``."""
    return {
        "experiment": name,
        "command": f"PYTHONPATH=examples python -m experiments.{name}",
        "options": saved["options"],
        "seconds": round(sum(part["seconds"] for part in saved["parts"].values()), 1),
        "versions": saved["versions"],
        "results": results,
    }


def publish(folder: Path, whole: dict[str, Any], header: Sequence[str], rows: Iterable[Sequence[Any]], figure: Figure) -> None:
    """Write ``NAME.json``, ``NAME.table.md`` and ``NAME.svg``, and print the table."""
    name, text = whole["experiment"], table(header, rows)
    whole = whole | {"options": {key: value for key, value in whole["options"].items() if key not in PLACES}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.table.md").write_text(text, encoding="utf-8")
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
    print(text)


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers to three decimals."""
    lines = [header, ["---"] * len(header), *([f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Command line with ``--out`` and an option for each default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", default=str(DOCS), help="folder of the results")
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Of an option such as ``--seeds 0,1``."""
    return [int(n) for n in text.split(",")]


def axes(columns: int, width: float = 4.2, height: float = 3.6) -> tuple[Figure, Any]:
    """A figure in the style of the documentation."""
    figure, found = plt.subplots(1, columns, figsize=(width * columns, height), layout="constrained", squeeze=False)
    for ax in found[0]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="both", color="#e3e6e8", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, found[0]
