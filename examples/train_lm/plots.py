"""Loss and throughput of runs, in one picture.

python examples/train_lm/plots.py runs/one runs/four --out curves.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib
from checkpoint import latest, record_of

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def draw(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Bits per byte, of training and of what is held out, and tokens per second, against the step."""
    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    for i, (name, record) in enumerate(records.items()):
        rows, checks = record["steps"], record["held_out"]
        steps = [row["step"] for row in rows]
        above.plot(steps, [row["bits_per_byte"] for row in rows], color=f"C{i}", linewidth=1, label=name)
        marks = [check["step"] for check in checks], [check["bits_per_byte"] for check in checks]
        above.plot(*marks, color=f"C{i}", marker="o", linestyle="none", label=f"{name}, held out")
        below.plot(steps, [row["tokens_per_second"] for row in rows], color=f"C{i}", linewidth=1, label=name)
    above.set_ylabel("bits per byte")
    below.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    for axes in (above, below):
        axes.grid(color="#dee2e6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Draw the last checkpoints of the runs that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="the picture")
    options = parser.parse_args()
    found = {run.name: latest(run) for run in options.runs}
    if missing := [name for name, folder in found.items() if folder is None]:
        sys.exit(f"no checkpoint in {', '.join(missing)}")
    draw({name: record_of(folder) for name, folder in found.items()}, options.out)


if __name__ == "__main__":
    main()
