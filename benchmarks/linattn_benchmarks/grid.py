"""Every family over heads and packings: how even its time per token and head is: ``linattn bench grid [FAMILY…]``.

Heads and packings are those of the published table of the Qwen3.5 family, and many short sequences; ``K = V = 128``, and of
the diagonal families, which models run at narrow widths too, also 64. Forward, and forward with backward. A cell is the time
per token and value head over that of the family's best row, so 1 is what the kernels can do and the rest is what the shape
costs. Equally long sequences are also run as a batch: packing should cost nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import packing
from .cases import Case, complete
from .published import kind, labels, ours, packed, troubles
from .sections import Heatmap, Section
from .sweep import Entry, Row
from .table import milliseconds

WIDTHS = {
    "gated_delta_rule": (128,),
    "kda": (128,),
    "delta_rule": (128,),
    "dplr": (128,),
    "gla": (128, 64),
    "simple_gla": (128, 64),
    "linear_attn": (128, 64),
    "rwkv6": (128, 64),
    "ssd": (128, 64),
}
"""``K = V``, by family."""
FEWEST = (4, 4)
HEADS = (FEWEST, (2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32))
"""``H`` and ``HV``."""
PACKINGS = (
    *((T,) for T in (32768, 16384, 8192, 4096, 2048)),
    *((28672, 4096), (24576, 8192), (16384, 16384), (8192, 24576), (4096, 28672)),
    *((12288, 4096), (6144, 2048), (4096, 4096), (2048, 6144), (1024, 7168)),
    *((8192,) * 4, (4096,) * 8, (2048,) * 4, (1024,) * 8, (256,) * 128, (64,) * 512, (33,) * 1000),
)
COVER = (
    ((16, 16), (4096,) * 8),
    (FEWEST, (32768,)),
    ((16, 16), (256,) * 128),
    (FEWEST, (8192,) * 4),
    ((16, 16), (33,) * 1000),
    (FEWEST, (1024,) * 8),
    ((32, 32), (1024,) * 8),
    ((16, 16), (8192,)),
    (FEWEST, (256,) * 128),
    ((16, 16), (64,) * 512),
    (FEWEST, (33,) * 1000),
    ((16, 16), (2048,) * 4),
    ((8, 32), (8192,) * 4),
    ((2, 8), (2048,)),
)
"""Heads and packings that come first: a run that is cut off has something of every family and regime."""
PASSES = {"forward": "fwd", "with backward": "fwdbwd"}
WORST = 10
"""Rows of a family that are listed because they are furthest from its best."""


def entries(families: Sequence[str], settings: dict[str, Any]) -> list[Entry]:
    """Every row of some families; of all in :data:`WIDTHS` where none is named."""
    return [
        entry_of(family, width, what, heads, lengths, batch, settings)
        for heads, lengths, batch in cells()
        for what in PASSES
        for family in families or WIDTHS
        for width in WIDTHS[family]
    ]


def cells() -> Iterator[tuple[tuple[int, int], tuple[int, ...], bool]]:
    """Heads, lengths, and whether as a batch: those of :data:`COVER`, then the others; equally long sequences both ways."""
    rest = [cell for cell in itertools.product(HEADS, PACKINGS) if cell not in COVER]
    for heads, lengths in (*COVER, *rest):
        yield heads, lengths, False
        if len(set(lengths)) == 1:
            yield heads, lengths, True


def entry_of(
    family: str,
    width: int,
    what: str,
    heads: tuple[int, int],
    lengths: tuple[int, ...],
    batch: bool,
    settings: dict[str, Any],
) -> Entry:
    """One row: sequences end to end, or as a batch."""
    H, HV = heads
    B, T = (len(lengths), lengths[0]) if batch else (1, sum(lengths))
    sizes = complete({"B": B, "T": T, "H": H, "HV": HV, "K": width, "V": width})
    packed_as = {"periodic": True} if batch else {"lengths": lengths}
    case = Case(f"chunk_{family}", PASSES[what], tuple(sizes.items()), **packed_as, **settings)
    fields = {"family": family, "pass": what, "K": width, "H": H, "HV": HV, "sequence_lengths": packing.spelled(lengths)}
    end = ", batch" if batch else ""
    return Entry(f"{family} {width} {what} {H}/{HV} {packing.name(lengths)}{end}", case, fields | {"batch": batch})


# -- what came of it -------------------------------------------------------------------------------------------------


def nanoseconds(row: Row, label: str) -> float | None:
    """Of a token and value head; None where a subject has no right time."""
    found = row["found"].get(label)
    tokens = sum(lengths_of(row))
    return found["ms"] * 1e6 / (tokens * row["HV"]) if found and found["status"] == "ok" else None


def series(rows: Iterable[Row], label: str) -> dict[tuple[str, int, str], list[Row]]:
    """Rows with times, by family, width and pass."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        if nanoseconds(row, label) is not None:
            found.setdefault((row["family"], row["K"], row["pass"]), []).append(row)
    return found


def evenness(rows: Sequence[Row], label: str) -> dict[str, float]:
    """By name of a packed row, its time per token and head over the least of any."""
    least = min(nanoseconds(row, label) for row in rows)
    return {row["name"]: nanoseconds(row, label) / least for row in rows if not row["batch"]}


def sections(results: dict[str, Any]) -> list[Section]:
    """In a line each family and pass; the regimes; of each pass its grid; the rows furthest from the best; packing; peers."""
    rows, found = results["rows"], []
    for label in labels(rows):
        groups = {key: mine for key, mine in series(rows, label).items() if evenness(mine, label)}
        if groups:
            found += [summary(groups, label), regimes(groups, label)]
            found += [by_cell(what, groups, label) for what in PASSES if any(key[2] == what for key in groups)]
            found += [worst(groups, label), *cost_of_packing(groups, label), *beside(rows, label)]
    return [*found, *troubles(results)]


def title(key: tuple[str, int, str]) -> str:
    """A family, its width and the pass."""
    family, width, what = key
    return f"`{family}`, K = V = {width}, {what}"


def summary(groups: dict[tuple[str, int, str], list[Row]], label: str) -> Section:
    """One line a family and pass."""
    lines = []
    for key, rows in groups.items():
        even, least = evenness(rows, label), min(nanoseconds(row, label) for row in rows)
        furthest = max(even, key=lambda name: even[name])
        mean = statistics.geometric_mean(even.values())
        lines.append((title(key), f"{least:.2f}", f"{mean:.2f}", f"{even[furthest]:.1f}", short(furthest, key)))
    head = ("family", "best, ns a token and head", "geometric mean", "worst", "there")
    return Section(f"{label}: time per token and head over the family's best row", head, lines)


def short(name: str, key: tuple[str, int, str]) -> str:
    """The name of a row where its family, width and pass are said."""
    return name.removeprefix(" ".join(map(str, key))).strip()


class Regime(NamedTuple):
    """Rows that one bound is for.

    Attributes:
        said: Which rows, to a reader.
        bound: The most that a row should take, over the family's best.
        holds: Whether a row of so many value heads and such lengths is one.
    """

    said: str
    bound: float
    holds: Callable[[int, tuple[int, ...]], bool]


REGIMES = (
    Regime(
        "64 sequences × heads of 256 tokens or more", 1.3, lambda HV, lengths: len(lengths) * HV >= 64 and min(lengths) >= 256
    ),
    Regime(
        "16 to 63 sequences × heads of 256 tokens or more",
        2.5,
        lambda HV, lengths: 16 <= len(lengths) * HV < 64 and min(lengths) >= 256,
    ),
    Regime("sequences of 33 tokens", 2.2, lambda HV, lengths: max(lengths) == 33),
)


def regimes(groups: dict[tuple[str, int, str], list[Row]], label: str) -> Section:
    """Of each family and pass the worst row of each regime, and how many are within its bound."""
    lines = []
    for key, rows in groups.items():
        even = evenness(rows, label)
        ratios = [
            [even[row["name"]] for row in rows if row["name"] in even and regime.holds(row["HV"], lengths_of(row))]
            for regime in REGIMES
        ]
        counted = [
            f"{max(mine):.2f}, {sum(x <= regime.bound for x in mine)} of {len(mine)}" if mine else "–"
            for regime, mine in zip(REGIMES, ratios, strict=True)
        ]
        lines.append((title(key), *counted, short_over_long(rows, label)))
    head = ("family", *(f"{regime.said}: ≤ {regime.bound}" for regime in REGIMES), f"{SHORT} over {LONG}: ≤ 1.1")
    return Section(f"{label}: the worst row of a regime over the family's best, and rows within the bound", head, lines)


SHORT, LONG = "128x256", "8x4096"


def short_over_long(rows: Sequence[Row], label: str) -> str:
    """Time of many short sequences over that of few long ones with as many tokens: the worst count of heads."""
    found = {(kind(row), packed(row)): nanoseconds(row, label) for row in rows if not row["batch"]}
    ratios = [found[heads, SHORT] / ns for (heads, name), ns in found.items() if name == LONG and (heads, SHORT) in found]
    return f"{max(ratios):.2f}" if ratios else "–"


def lengths_of(row: Row) -> tuple[int, ...]:
    """Of the sequences of a row."""
    return packing.parsed(row["sequence_lengths"])


def by_cell(what: str, groups: dict[tuple[str, int, str], list[Row]], label: str) -> Section:
    """Heads and packings down, families across."""
    names, families, cells = even_pivot(what, groups, label)
    lines = [
        (name, *(f"{cells[name, family]:.2f}" if (name, family) in cells else "–" for family in families)) for name in names
    ]
    return Section(f"{label}, {what}: time per token and head over the family's best row", ("heads, packing", *families), lines)


def even_pivot(
    what: str, groups: dict[tuple[str, int, str], list[Row]], label: str
) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """Heads with packings, families with widths, and the evenness of each pair, of one pass."""
    mine = {f"{family} {width}": rows for (family, width, of), rows in groups.items() if of == what}
    cells = {}
    for family, rows in mine.items():
        even = evenness(rows, label)
        cells |= {(f"{kind(row)} {packed(row)}", family): even[row["name"]] for row in rows if row["name"] in even}
    return list(dict.fromkeys(name for name, _ in cells)), list(mine), cells


def heatmaps(results: dict[str, Any]) -> Iterator[Heatmap]:
    """The evenness of each pass."""
    for label in labels(results["rows"]):
        groups = {key: mine for key, mine in series(results["rows"], label).items() if evenness(mine, label)}
        for what in PASSES:
            if any(key[2] == what for key in groups):
                yield f"{label}, {what}: time per token and head over the best row", *even_pivot(what, groups, label)


def worst(groups: dict[tuple[str, int, str], list[Row]], label: str) -> Section:
    """The rows furthest from their family's best."""
    all_rows = {row["name"]: (row, evenness(rows, label)) for rows in groups.values() for row in rows if not row["batch"]}
    furthest = sorted(all_rows, key=lambda name: all_rows[name][1][name], reverse=True)[:WORST]
    lines = [
        (name, milliseconds(all_rows[name][0]["found"][label]["ms"]), f"{all_rows[name][1][name]:.1f}") for name in furthest
    ]
    return Section(f"{label}: the rows furthest from the best", ("row", "ms", "× the best row"), lines)


def cost_of_packing(groups: dict[tuple[str, int, str], list[Row]], label: str) -> list[Section]:
    """Time of equally long sequences packed over that of the same as a batch: a family's mean and worst."""
    lines = []
    for key, rows in groups.items():
        found = {(kind(row), packed(row), row["batch"]): nanoseconds(row, label) for row in rows}
        ratios = {
            f"{heads} {name}": ns / found[heads, name, True]
            for (heads, name, batch), ns in found.items()
            if not batch and (heads, name, True) in found
        }
        if ratios:
            furthest = max(ratios, key=lambda name: ratios[name])
            mean = statistics.geometric_mean(ratios.values())
            lines.append((title(key), f"{mean:.2f}", f"{ratios[furthest]:.2f}", furthest))
    head = ("family", "geometric mean", "worst", "there")
    return [Section(f"{label}: packed over a batch of the same sequences", head, lines)] if lines else []


def beside(rows: Sequence[Row], label: str) -> list[Section]:
    """Time over each peer's that was timed in this run."""
    lines = []
    for key, mine in series(rows, label).items():
        peers = dict.fromkeys(name for row in mine for name in row["found"] if not ours(name))
        for peer in peers:
            both = [row for row in mine if nanoseconds(row, peer) is not None]
            ratios = {row["name"]: nanoseconds(row, label) / nanoseconds(row, peer) for row in both}
            if ratios:
                furthest = max(ratios, key=lambda name: ratios[name])
                mean, ahead = statistics.geometric_mean(ratios.values()), sum(x < 1 for x in ratios.values())
                behind = (f"{ratios[furthest]:.2f}", short(furthest, key))
                lines.append((title(key), peer, f"{mean:.2f}", f"{ahead} of {len(both)}", *behind))
    head = ("family", "peer", "geometric mean", "rows ahead", "worst", "there")
    return [Section(f"{label}: time over a peer's", head, lines)] if lines else []
