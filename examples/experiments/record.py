"""What an experiment finds, kept as it is found: a run that was cut off goes on where it stopped.

``PYTHONPATH=examples python -m experiments.record NAME.json ...`` writes tables and plots again.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import platform
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import linattn
import torch
from linattn_benchmarks import rows
from linattn_conformance import packed
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
PLACES = ("weights", "tokens")
"""Options that say where files lie. A run goes on only with the same, but what it publishes is the same wherever they lay."""
CONTENTS = ("documents",)
"""Options that name a folder on a command line, and what was in it in a record."""
Tables = dict[str, tuple[Sequence[str], Iterable[Sequence[Any]]] | str]
"""Header and rows of each table, or its text, by what its file has between the experiment's name and ``.table.md``."""
Shown = Callable[[Any, dict[str, Any]], tuple[Tables, Figure]]
"""What an experiment makes of its results and options for its page."""
LABELS = {"t2r": "t2r, distilled"}
"""What a map is called where it was distilled and its paper does not."""
COLOURS = ("#1f5f8b", "#d1495b", "#3a7d44", "#8d6a9f", "#e09f3e", "#5c6b73")


class Record:
    """The figures of one experiment: ``NAME.json``, its tables and ``NAME.png`` in a folder.

    Where many runs are behind them, ``NAME.runs.json.gz`` holds those, by part.

    While it runs, finished parts are in ``NAME.partial.json``.
    """

    def __init__(self, name: str, options: argparse.Namespace, shown: Shown, more: Sequence[str] = ()) -> None:
        """``more`` are options that may change on the way: they say how many parts there are, and not what one is."""
        self.name, self.folder, self.shown, self.more = name, Path(options.out), shown, more
        self.folder.mkdir(parents=True, exist_ok=True)
        self.options = {key: value for key, value in vars(options).items() if key != "out"}
        self.partial = self.folder / f"{name}.partial.json"
        self.parts: dict[str, Any] = {}
        self.versions, self.since = environment(), time.perf_counter()
        if self.partial.exists():
            saved = json.loads(self.partial.read_text(encoding="utf-8"))
            if self.binding(saved["options"]) != self.binding(self.options):
                raise SystemExit(f"{self.partial} is of other options, {saved['options']}: remove it or use those")
            self.parts = saved["parts"]

    def binding(self, options: Any) -> Any:
        """Options, however deep, without those that may change on the way."""
        if not isinstance(options, dict):
            return options
        return {key: self.binding(x) for key, x in options.items() if key not in self.more}

    def once(self, key: str, work: Callable[[], Any]) -> Any:
        """The result of a part: worked out if it is not there yet, and saved at once with the seconds since the one before."""
        if key not in self.parts:
            found, before, self.since = work(), self.since, time.perf_counter()
            self.add(key, found, self.since - before)
            print(f"{key}: {self.parts[key]['seconds']} s, {found}", flush=True)
        return self.parts[key]["found"]

    def add(self, key: str, found: Any, seconds: float) -> None:
        """Keep the result of a part, and save it at once."""
        made = {name: self.versions[name] for name in ("code", "device")}
        self.parts[key] = {"found": finite(found), "seconds": round(seconds, 1), **made}
        fresh = self.partial.with_suffix(".new")
        fresh.write_text(
            json.dumps({"options": self.options, "versions": self.versions, "parts": self.parts}, allow_nan=False),
            encoding="utf-8",
        )
        fresh.replace(self.partial)

    def arrays(self, key: str, work: Callable[[], tuple[dict[str, torch.Tensor], Any]]) -> tuple[dict[str, torch.Tensor], Any]:
        """The same for a part that finds arrays too, which are kept in a file of their own."""
        path = self.kept(key)
        if not path.exists():
            self.parts.pop(key, None)

        def save() -> Any:
            arrays, rest = work()
            torch.save(arrays, path)
            return rest

        rest = self.once(key, save)
        return torch.load(path), rest

    def kept(self, key: str) -> Path:
        """The file of the arrays of a part, which is there until the record is whole."""
        return self.folder / f"{self.name}.partial.{zlib.crc32(key.encode()):08x}.pt"

    def take_up(self) -> None:
        """Go on from what was published, in the folder or else in the documentation; of other options nothing is mixed in, nor
        overwritten."""
        there = [path for folder in (self.folder, DOCS) if runs_of(path := folder / f"{self.name}.json").exists()]
        if self.parts or not there:
            return
        path = there[0]
        whole = json.loads(path.read_text(encoding="utf-8"))
        if self.binding(whole["options"]) == self.binding(published(self.options)):
            self.parts = json.loads(packed.read(runs_of(path)))
            name_devices(self.parts, whole["versions"])
        elif path.parent == self.folder:
            raise SystemExit(f"{path} is of other options, {whole['options']}: give another --out, or remove it and its runs")

    def publish(self, results: Any, with_runs: bool = False) -> str:
        """Write what was found so far, its tables and its plot, and the runs behind it if asked; return the tables."""
        saved = {"options": self.options, "versions": self.versions, "parts": self.parts}
        if with_runs:
            packed.write(runs_of(self.folder / f"{self.name}.json"), json.dumps(self.parts, allow_nan=False))
        return publish(self.folder, whole_run(self.name, saved, results), self.shown)

    def finish(self, results: Any, with_runs: bool = False) -> None:
        """The same when all of it was found: the tables are printed, and the partial files are of no use any more."""
        print(self.publish(results, with_runs))
        for path in self.folder.glob(f"{self.name}.partial.*"):
            path.unlink()


def name_devices(parts: dict[str, Any], versions: dict[str, str]) -> None:
    """Say of parts that do not say it where they were found: where the last one was, if by the same code.

    Otherwise the next part, on another device, would seem to speak for them.
    """
    for part in parts.values():
        if "device" not in part and part.get("code") == versions["code"]:
            part["device"] = versions["device"]


def finite(found: Any) -> Any:
    """What was found, with None for what is no number, as where a run diverged: JSON has no word for it."""
    if isinstance(found, dict):
        return {key: finite(x) for key, x in found.items()}
    if isinstance(found, (list, tuple)):
        return [finite(x) for x in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def runs_of(path: Path) -> Path:
    """Where the runs behind a ``NAME.json`` are."""
    return path.with_suffix(".runs.json.gz")


def published(options: dict[str, Any]) -> dict[str, Any]:
    """Options without those that say where files lay."""
    return {key: value for key, value in options.items() if key not in PLACES}


def environment() -> dict[str, str]:
    """Versions, device, and a hash of the code that results come from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {"python": platform.python_version(), "linattn": linattn.__version__, "torch": torch.__version__}
    return {**versions, "device": device, "code": code()}


@functools.cache
def code() -> str:
    """SHA-256 of the sources of the experiments, of the API and of the backends."""
    packages = (importlib.util.find_spec(name) for name in ("linattn", "linattn_backends"))
    folders = [Path(__file__).parent, *(Path(found.origin).parent for found in packages if found and found.origin)]
    hashed = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            hashed.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return hashed.hexdigest()


def program(name: str) -> str:
    """What to run: a module, or the runner with the name of a study."""
    return f"experiments.{name}" if importlib.util.find_spec(f"experiments.{name}") else f"experiments {name}"


def given(name: str, options: dict[str, Any]) -> list[str]:
    """The options of a program's command line that are not its defaults; a device is that of the host."""
    if importlib.util.find_spec(f"experiments.{name}") is None:
        return []  # a study, whose options are those of its table
    module, small = importlib.import_module(f"experiments.{name}"), options.get("small")
    defaults = getattr(module, "DEFAULTS", {}) | (module.SMALL if small else {})
    asked = {"small": small} if small else {}
    asked |= {key: x for key, x in published(options).items() if key in defaults and x != defaults[key] and key != "device"}
    asked |= dict.fromkeys(asked.keys() & set(CONTENTS), "FOLDER")
    return [word for key, x in asked.items() for word in (f"--{key.replace('_', '-')}", shlex.quote(str(x)))]


def whole_run(name: str, saved: dict[str, Any], results: Any) -> dict[str, Any]:
    """What ``NAME.json`` says of a run, given its ``NAME.partial.json``.

    ``codes`` and ``devices`` are those that its parts were found with; ``versions`` is the environment of the last of them.
    """
    return {
        "experiment": name,
        "command": " ".join(["PYTHONPATH=examples python -m", program(name), *given(name, saved["options"])]),
        "options": saved["options"],
        "seconds": round(sum(part["seconds"] for part in saved["parts"].values()), 1),
        "versions": saved["versions"],
        "codes": those(saved["parts"], "code"),
        "devices": those(saved["parts"], "device"),
        "results": results,
    }


def those(parts: dict[str, Any], name: str) -> list[str]:
    """What parts say of themselves, each once; those of before they did say nothing."""
    return list(dict.fromkeys(part[name] for part in parts.values() if name in part))


def publish(folder: Path, whole: dict[str, Any], shown: Shown) -> str:
    """Write ``NAME.json``, the tables and ``NAME.png``; return the tables."""
    name, (tables, figure) = whole["experiment"], shown(whole["results"], whole["options"])
    whole = whole | {"options": published(whole["options"])}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(rows.text(whole), encoding="utf-8")
    texts = {title: of if isinstance(of, str) else table(*of) for title, of in tables.items()}
    for title, text in texts.items():
        (folder / f"{name}{title and f'.{title}'}.table.md").write_text(text, encoding="utf-8")
    figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    return "\n".join(texts.values())


def again(path: Path, folder: Path) -> None:
    """Publish what was found once more, from the ``NAME.json`` that a run wrote, and from its runs where they were kept."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    if runs_of(path).exists():
        parts = json.loads(packed.read(runs_of(path)))
        whole["results"] = maker(whole["experiment"])(parts)
        made = {"codes": those(parts, "code"), "devices": those(parts, "device")}
        whole |= {name: found for name, found in made.items() if found}
    print(publish(folder, whole, shower(whole["experiment"])))


def maker(name: str) -> Callable[[dict[str, Any]], Any]:
    """What makes the results of an experiment of its parts."""
    from . import runner, studies

    if name in studies.NAMES:
        return functools.partial(runner.results, studies.study(name))
    return importlib.import_module(f"experiments.{name}").collected


def shower(name: str) -> Shown:
    """What shows the results of an experiment: all studies are shown alike."""
    from . import pages, studies

    if name in studies.NAMES:
        return functools.partial(pages.shown, studies.study(name))
    return importlib.import_module(f"experiments.{name}").shown


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


def axes(count: int, width: float = 4.2, height: float = 3.6, across: int = 0) -> tuple[Figure, Any]:
    """A figure in the style of the documentation, of so many panels, ``across`` of them in a row; all by default."""
    columns = min(across or count, count)
    rows = -(-count // columns)
    size = (width * columns, height * rows)
    figure, found = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for ax in found.flat[count:]:
        ax.remove()
    for ax in found.flat[:count]:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="both", color="#e3e6e8", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, found.flat[:count]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        again(Path(name), Path(name).parent)
