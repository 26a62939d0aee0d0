"""Random features that estimate softmax's kernel (Choromanski et al. 2021; Peng et al. 2021): how far a single draw is off.

The root of the mean square error of ``exp(x·y)``, relative to it, by the angle between ``x`` and ``y``: sines and cosines
against positive features, independent against orthogonal directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from linattn.feature_maps import Performer, Rfa
from linattn.progress import bars
from matplotlib.figure import Figure

from .record import COLOURS, Record, Tables, axes, options

COSINES = (-1.0, -0.8, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
WAYS: dict[str, tuple[Callable[..., Any], bool]] = {
    "sin/cos, independent": (Rfa, False),
    "sin/cos, orthogonal": (Rfa, True),
    "positive, independent": (Performer, False),
    "positive, orthogonal": (Performer, True),
}


def error(name: str, cosine: float, chosen: Any) -> float:
    """Of maps with ``K`` directions each, the directions of one block; ``x`` and ``y`` are of length ``chosen.norm``."""
    cls, orthogonal = WAYS[name]
    K, rng = chosen.K, np.random.default_rng(chosen.seed)
    a, b = np.linalg.qr(rng.standard_normal((K, 2)))[0].T
    x, y = chosen.norm * a, chosen.norm * (cosine * a + math.sqrt(1 - cosine**2) * b)
    phi = cls(chosen.maps * K, chosen.seed, orthogonal)
    products = np.prod(phi(np.stack([x, y])), 0) * chosen.maps
    estimates = products.reshape(-1, chosen.maps, K).sum((0, 2))  # the sine and the cosine of a direction belong together
    if cls is Rfa:  # it estimates the Gaussian kernel
        estimates = estimates * math.exp((x @ x + y @ y) / 2)
    return math.sqrt(np.square(estimates / math.exp(x @ y) - 1).mean())


def main() -> None:
    chosen = options(__doc__, K=16, norm=0.6, maps=100000, seed=0)
    record = Record("estimators", chosen, shown)
    results: dict[str, dict[str, float]] = {name: {} for name in WAYS}
    with bars(count=False) as progress:
        for cosine in progress.track(COSINES, description="estimating"):
            for name in WAYS:
                work = lambda n=name, c=cosine: error(n, c, chosen)  # noqa: E731
                results[name][str(cosine)] = record.once(f"{name} at {cosine}", work)
    record.finish(results)


def shown(results: dict[str, dict[str, float]], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    rows = [(name, *(found[str(c)] for c in COSINES[::2])) for name, found in results.items()]
    return {"": (["features", *(f"cos={c:g}" for c in COSINES[::2])], rows)}, plot(results)


def plot(results: dict[str, dict[str, float]]) -> Figure:
    """Error by cosine."""
    figure, (ax,) = axes(1, width=5.6)
    for i, (name, found) in enumerate(results.items()):
        line, colour = "-" if "orthogonal" in name else ":", COLOURS[1] if "sin" in name else COLOURS[0]
        ax.plot(COSINES, list(found.values()), line, color=colour, marker=".", label=name, zorder=3 + i)
    ax.set_ylim(0)
    ax.set_xlabel("cosine of the angle between x and y")
    ax.set_ylabel("relative error of one map")
    ax.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
