"""Our times over the best other library's: the table of the benchmarks page, and the front page's figure.

``python -m figures.speedups`` writes the figure, ``docs/_static/speedups.svg``, from ``operators_h200.json``. Compared is what
computes the same on the same arrays, was checked and was right; softmax attention is another function.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from linattn.ops._family import operator_named
from linattn_benchmarks import table
from linattn_benchmarks.environment import read
from linattn_benchmarks.sections import grid

from . import RESULTS

FIGURE = Path(__file__).parents[2] / "docs" / "_static" / "speedups.svg"
SHOWN = "B4 T4096 H16 K128 V128"
"""The shape of the figure."""
OTHER_FUNCTIONS = ("softmax (SDPA)",)
PASSES = {"fwd": "forward", "fwdbwd": "with backward"}


class Compared(NamedTuple):
    """One call, ours beside the fastest of the others; times in ms."""

    operator: str
    shape: str
    gates: str
    what: str
    ours: float
    theirs: float
    library: str

    @property
    def speedup(self) -> float:
        """How many times as long the other takes."""
        return self.theirs / self.ours

    @property
    def family(self) -> str:
        """Whose chunk form it is."""
        return operator_named(self.operator).spec.name


def compared(rows: list[dict[str, Any]]) -> list[Compared]:
    """Every call that another library was timed on, in the order of the rows."""
    calls: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok" and row["what"] in PASSES and row["library"] not in OTHER_FUNCTIONS:
            calls.setdefault((row["operator"], row["label"], table.gates(row), row["what"]), []).append(row)
    found: list[Compared] = []
    for call, made in calls.items():
        ours = [milliseconds(row) for row in made if row["library"] == "linattn"]
        others = [(milliseconds(row), row["library"]) for row in made if row["library"] != "linattn"]
        if ours and others:
            found.append(Compared(*call, min(ours), *min(others)))
    return found


def milliseconds(row: dict[str, Any]) -> float:
    """The median, without the host's share where the call could be recorded."""
    return table.on_device(row)["median"]


def markdown(results: dict[str, Any]) -> str:
    """A line for each call."""
    lines = [
        (
            f"`{call.family}`{'' if call.gates == 'model' else f', {call.gates} gates'}",
            f"{call.speedup:.2f} ×",
            PASSES[call.what],
            call.shape,
            table.milliseconds(call.ours),
            f"{table.milliseconds(call.theirs)} {call.library}",
        )
        for call in compared(results["rows"])
    ]
    return grid(("family", "speed-up", "pass", "shape", "ours, ms", "theirs, ms"), lines)


def costs(results: dict[str, Any]) -> str:
    """Of the figure's shape, at the usual gates: time and memory of every family, and of softmax attention for scale."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        softmax = row["library"] in OTHER_FUNCTIONS
        usual = table.gates(row) == "model" and row["label"].startswith(SHOWN)
        if row["status"] == "ok" and usual and (row["library"] == "linattn" or softmax):
            name = "softmax (SDPA), for scale" if softmax else f"`{operator_named(row['operator']).spec.name}`"
            best = found.setdefault(name, {}).setdefault(row["what"], row)
            found[name][row["what"]] = min(best, row, key=milliseconds)
    lines = [
        (
            name,
            *(table.milliseconds(milliseconds(made[what])) for what in PASSES),
            table.memory(made["fwdbwd"]["peak_bytes"]),
        )
        for name, made in sorted(found.items(), key=lambda item: milliseconds(item[1]["fwdbwd"]))
    ]
    head = ("family", "forward, ms", "with backward, ms", "memory with backward")
    return f"{SHOWN}, bfloat16, gates of a fresh model; memory beyond the inputs.\n\n{grid(head, lines)}"


# -- the figure ------------------------------------------------------------------------------------------------------

LINE, LEFT, RIGHT, WIDTH = 30, 160, 104, 540
STYLE = """\
.speedups { color: #1f2328; font: 15px system-ui, sans-serif; }
.speedups text { fill: currentColor; }
.speedups .family, .speedups .factor { font-weight: 600; }
.speedups .library { opacity: .75; font-size: 13px; font-weight: 400; }
.speedups .bar { fill: #3b82c4; }
.speedups .even { stroke: currentColor; stroke-dasharray: 4 4; opacity: .6; }
@media (prefers-color-scheme: dark) { .speedups { color: #d7dce2; } }
"""


def svg(results: dict[str, Any]) -> str:
    """A bar for each family, forward and backward, longest first; a dashed line where both are even."""
    calls = [call for call in compared(results["rows"]) if (call.shape, call.gates, call.what) == (SHOWN, "model", "fwdbwd")]
    calls.sort(key=lambda call: -call.speedup)
    unit = (WIDTH - LEFT - RIGHT) / calls[0].speedup
    height = LINE * len(calls) + 26
    said = "; ".join(f"{call.family} {call.speedup:.1f} times as fast as {call.library}" for call in calls)
    even = LEFT + unit
    parts = [
        f'<svg class="speedups" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{said}</title>",
        f"<style>\n{STYLE}</style>",
    ]
    for i, call in enumerate(calls):
        y, end = LINE * i, LEFT + unit * call.speedup
        parts += [
            f'<text class="family" x="{LEFT - 8}" y="{y + 19}" text-anchor="end">{call.family}</text>',
            f'<rect class="bar" x="{LEFT}" y="{y + 4}" width="{end - LEFT:.1f}" height="{LINE - 8}" rx="2"/>',
            f'<text class="factor" x="{end + 8:.1f}" y="{y + 19}">{call.speedup:.1f} × '
            f'<tspan class="library">{call.library}</tspan></text>',
        ]
    parts += [
        f'<line class="even" x1="{even:.1f}" y1="0" x2="{even:.1f}" y2="{LINE * len(calls) + 4}"/>',
        f'<text class="library" x="{even:.1f}" y="{height - 6}" text-anchor="middle">equal</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the figure."""
    FIGURE.write_text(svg(read(RESULTS / "operators_h200.json")["results"]), encoding="utf-8")


if __name__ == "__main__":
    main()
