"""``linattn bench scale``: measured rows of few ranks, a cost model fitted to them, and what it says of many ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from linattn.errors import OptionError

from . import costs
from .cases import ITEMSIZE, Case, complete
from .sections import Section

RANKS = (1, 2, 4)
FAR = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (1 << 20, 10_000_000, 100_000_000)
"""Of a whole sequence."""
SIZES = {"cpu": {"H": 2, "K": 32, "V": 32}, "cuda": {"H": 64, "K": 128, "V": 128}}
LENGTHS = {"cpu": (512, 2048), "cuda": (8192, 65536, 262144)}
"""Tokens of a rank."""
WHATS = ("fwd", "fwdbwd")

Row = dict[str, Any]


def cases(
    families: Sequence[str], shapes: Sequence[dict[str, int]], settings: dict[str, Any]
) -> tuple[list[Case], dict[str, int]]:
    """What every number of ranks runs, and the heads and widths of all; ``T`` of a shape is that of one rank."""
    device = settings["device"]
    shapes = shapes or [complete(SIZES[device] | {"T": T}) for T in LENGTHS[device]]
    kinds = {(shape["B"], shape["H"], shape["HV"], shape["K"], shape["V"]) for shape in shapes}
    B, H, HV, K, V = min(kinds)
    if len(kinds) > 1 or B != 1 or H != HV:
        raise OptionError("scale: expected shapes that differ in T alone, with B=1 and HV=H")
    if len(shapes) < 2:
        raise OptionError(f"scale: expected two numbers of tokens of a rank or more, such as T=1024/4096, got {shapes[0]['T']}")
    named = families or costs.FAMILIES
    found = [
        Case(f"chunk_{family}", what, tuple(shape.items()), **settings)
        for shape in shapes
        for family in named
        for what in WHATS
    ]
    return found, {"H": H, "K": K, "V": V}


def counts(asked: Sequence[int], device: str) -> list[int]:
    """Numbers of ranks: those that are asked for, and one; by default 1, 2 and 4 as far as there are devices."""
    from .on_ranks import devices

    there = devices(device)
    if device != "cpu" and (many := [ranks for ranks in asked if ranks > there]):
        raise OptionError(f"--ranks {many[0]}: expected no more than the {there} devices")
    found = sorted({1, *(asked or (ranks for ranks in RANKS if ranks <= there))})
    if found == [1]:
        raise OptionError("scale: expected two ranks or more to compare with one, got 1")
    return found


# -- what came of it -------------------------------------------------------------------------------------------------


def sections(results: dict[str, Any]) -> list[Section]:
    """Fitted factors, measured rows beside the fit, what it says of many ranks, and published figures beside counts."""
    fitted = costs.fit(results["rows"], results["sizes"])
    computed = (far(results, fitted, tokens) for tokens in TOKENS)
    around = (*shares(results), *replayed(results), *memory(results))
    return [factors(results, fitted), measured(results, fitted), *around, *computed, published()]


def machine(results: dict[str, Any]) -> str:
    """Where the figures come from."""
    settings, sizes = results["settings"], results["sizes"]
    which = settings.get("accelerator") or settings.get("processor") or settings["device"]
    shape = " ".join(f"{name}{size}" for name, size in sizes.items())
    shared = f", at most {max(row['ranks'] for row in results['rows'])} ranks on {settings['cores']} cores"
    return f"{which}{shared if settings['device'] == 'cpu' else ''}; {shape}, {settings['dtype']}."


def factors(results: dict[str, Any], fitted: costs.Costs) -> Section:
    """The factors of the families, forward with backward, and of the machine."""
    lines = []
    for family, what in dict.fromkeys(name[:2] for name in fitted.factors if isinstance(name, tuple)):
        of = [fitted.factors.get((family, what, name), math.nan) for name in costs.OF_FAMILY]
        call, token, join, summary = of
        lines.append((f"`{family}`, {what}", *(f"{x:.3g}" for x in (call, token * 1e6, join, summary * 1e6))))
    hop, byte, flop = (fitted.factors.get(name, math.nan) for name in costs.OF_MACHINE)
    shows = byte > 0 and told_apart(results["rows"])
    rates = [
        f"{1e-6 / x:.3g} {unit}" if seen else f"too many {unit} to show"
        for x, unit, seen in ((byte, "GB/s", shows), (flop, "GFLOP/s", flop > 0))
    ]
    note = (
        f"A hop takes {hop * 1e3:.3g} µs, bytes of other ranks come at {rates[0]}, their transitions are applied at {rates[1]}."
    )
    if not shows:
        note += " What is computed below takes bytes for next to nothing: of many ranks it is the least that they take."
    head = ("family", "call, ms", "token and head, ns", "join, ms", "summary of token and head, ns")
    return Section("Fitted costs", head, lines, note)


def told_apart(rows: Sequence[Row]) -> bool:
    """Whether an exchange of the most bytes takes longer than one of the fewest by more than that spreads."""
    most = max(row["ranks"] for row in rows)
    times = {row["bytes"]: row["ms"] for row in rows if row["family"] is None and row["ranks"] == most}
    few, many = times[min(times)], times[max(times)]
    return many["median"] - few["median"] > few["q90"] - few["q10"]


def measured(results: dict[str, Any], fitted: costs.Costs) -> Section:
    """Medians beside the fit, and of the most ranks beside a fit to the others."""
    rows, sizes = results["rows"], results["sizes"]
    most = max(row["ranks"] for row in rows)
    fewer = [row for row in rows if row["ranks"] < most]
    before = costs.fit(fewer, sizes) if most > 2 and any(row["ranks"] > 1 for row in fewer) else None
    lines = []
    for row in rows:
        if row["family"] is None:
            name, what = "exchange", f"{row['bytes']:,} bytes"
        else:
            name, what = f"`{row['family']}`, {row['what']}", f"{row['tokens']:,}"
        ms = row["ms"]["median"]
        said = f"{before.of(row):.3g}" if before and row["ranks"] == most else "–"
        lines.append((name, str(row["ranks"]), what, f"{ms:.3g}", f"{fitted.of(row):.3g}", said))
    note = f"{machine(results)} The fit is off by a factor of {costs.worst(fitted, rows):.2f} at most."
    head = ("", "ranks", "tokens of a rank", "measured, ms", "fitted, ms", "fitted to fewer ranks, ms")
    return Section("Measured, and the fit", head, lines, note)


def shares(results: dict[str, Any]) -> list[Section]:
    """Of the most ranks, what is left of ideal, and what they add beside the least that it could take; if that was measured."""
    ceilings = results.get("ceilings")
    if ceilings is None:
        return []
    settings, sizes = results["settings"], results["sizes"]
    operand, gate = (ITEMSIZE[settings[name]] for name in ("dtype", "gate_dtype"))
    rows = [row for row in results["rows"] if row["family"]]
    most = max(row["ranks"] for row in rows)
    alone = {(row["family"], row["what"], row["tokens"]): row for row in rows if row["ranks"] == 1}
    lines = []
    for row in rows:
        if row["ranks"] != most or (before := alone.get((row["family"], row["what"], row["tokens"]))) is None:
            continue
        one, ms = before["ms"]["median"], row["ms"]["median"]
        passes = costs.scans(row["family"], sizes, operand, gate)[: 2 if row["what"] == "fwdbwd" else 1]
        floor = sum(scan.ms(row["tokens"] * sizes["H"], ceilings) for scan in passes)
        figures = (
            f"{one:.3g}",
            f"{ms:.3g}",
            f"{one / ms:.0%}",
            f"{ms - one:.3g}",
            f"{floor:.3g}",
            f"{one / (one + floor):.0%}",
        )
        lines.append((f"`{row['family']}`, {row['what']}", f"{row['tokens']:,}", *figures, on_one_thread(before, row)))
    note = (
        f"Gates: {settings['gates']}. The floor is one scan forward and one backward, in which every token is read, at the "
        f"{ceilings['copy_bytes_per_s'] / 1e9:,.0f} GB/s of a copy or the {ceilings['matmul_flops_per_s'] / 1e12:,.0f} TFLOP/s "
        f"of a product, whichever takes longer. Tokens that gates leave nothing of are not read. On one thread: with "
        f"`torch.autograd.set_multithreading_enabled(False)`, ranks and the rank alone."
    )
    head = (
        "",
        "tokens of a rank",
        "alone, ms",
        f"{most} ranks, ms",
        "of ideal",
        "added, ms",
        "floor of that, ms",
        "of ideal at it",
        "of ideal, one thread",
    )
    return [Section("Share of ideal", head, lines, note)]


def on_one_thread(alone: Row, row: Row) -> str:
    """The share of ideal of a backward pass on the thread that asks for it; of a row without that time nothing."""
    times = [each["one_thread"]["ms"]["median"] for each in (alone, row) if "one_thread" in each]
    return f"{times[0] / times[1]:.0%}" if len(times) == 2 else "–"


def replayed(results: dict[str, Any]) -> list[Section]:
    """Calls beside replays of a CUDA graph that one was recorded as, which the host has no part in; if any were."""
    rows = [row for row in results["rows"] if "graph" in row]
    timed = {identity(row): row["graph"]["ms"]["median"] for row in rows if "ms" in row["graph"]}
    lines, failed = [], []
    for row in rows:
        (family, what, tokens, ranks), ms = identity(row), row["ms"]["median"]
        name, replay, alone = f"`{family}`, {what}", timed.get(identity(row)), timed.get((family, what, tokens, 1))
        if replay is None:
            failed.append(f"{name} of {ranks} ranks and {tokens:,} tokens could not be recorded: {row['graph']['failed']}.")
        figures = ("–", "–") if replay is None else (f"{replay:.3g}", f"{ms - replay:.3g}")
        share = f"{alone / replay:.0%}" if ranks > 1 and alone and replay else "–"
        lines.append((name, str(ranks), f"{tokens:,}", f"{ms:.3g}", *figures, share))
    note = " ".join(("What a call takes beyond a replay is what the device waits for the host.", *failed))
    head = ("", "ranks", "tokens of a rank", "call, ms", "replay, ms", "host, ms", "of ideal, replayed")
    return [Section("Replayed as CUDA graphs", head, lines, note)] if lines else []


def identity(row: Row) -> tuple[Any, ...]:
    """What tells an operator's row from others."""
    return row["family"], row["what"], row["tokens"], row["ranks"]


def memory(results: dict[str, Any]) -> list[Section]:
    """What ranks hold at most, and how much more of it than a rank alone; if that was counted."""
    rows, sizes = [row for row in results["rows"] if "peak_bytes" in row], results["sizes"]
    most = max((row["ranks"] for row in rows), default=1)
    alone = {(row["family"], row["what"], row["tokens"]): row["peak_bytes"] for row in rows if row["ranks"] == 1}
    lines = []
    for row in rows:
        one = alone.get((row["family"], row["what"], row["tokens"]))
        if row["ranks"] == most > 1 and one is not None:
            figures = (f"{n / 2**20:,.1f}" for n in (one, row["peak_bytes"], row["peak_bytes"] - one))
            lines.append((f"`{row['family']}`, {row['what']}", f"{row['tokens']:,}", *figures))
    note = (
        f"Beyond the inputs, of the rank with most. Two states a head and rank, float32, are "
        f"{costs.states(sizes, 2 * most) / 2**20:,.1f} MiB."
    )
    head = ("", "tokens of a rank", "alone, MiB", f"{most} ranks, MiB", "more, MiB")
    return [Section("Peak memory", head, lines, note)] if lines else []


def families(results: dict[str, Any]) -> list[str]:
    """Those that were measured."""
    return list(dict.fromkeys(row["family"] for row in results["rows"] if row["family"]))


def far(results: dict[str, Any], fitted: costs.Costs, tokens: int) -> Section:
    """Milliseconds forward with backward of a whole sequence, and the share of ideal."""
    lines = []
    for family in families(results):
        cells = [cell(fitted, family, ranks, tokens / ranks) for ranks in FAR]
        lines.append((f"`{family}`", *cells))
    note = "Computed, not measured: ms forward with backward, and the share of ideal, which is a rank alone with its tokens."
    return Section(f"{tokens:,} tokens by ranks", ("family", *map(str, FAR)), lines, note)


def cell(fitted: costs.Costs, family: str, ranks: int, tokens: float) -> str:
    """Time and share of ideal."""
    ms, share = fitted.ms(family, "fwdbwd", ranks, tokens), fitted.efficiency(family, "fwdbwd", ranks, tokens)
    return f"{ms:.3g} ({share:.0%})"


FLA = {"tokens": 32768, "ranks": 4, "alone_ms": 15.56, "ms": 5.73, "bytes_per_s": 200e9}
"""fla's ``gated_delta_rule`` with 64 heads, forward and backward, on H800s, as its authors report it; an H800's NVLink moves
200 GB/s each way."""


def published() -> Section:
    """What counts of operations and bytes alone say of figures that others have published."""
    sizes = {"H": 64, "K": 128, "V": 128}
    own = FLA["alone_ms"] / FLA["ranks"]
    counted = costs.efficiency_of_counts("gated_delta_rule", sizes, FLA["ranks"], own, FLA["bytes_per_s"])
    lines = [("fla, `gated_delta_rule`, 4 H800s, 32,768 tokens", "share of ideal", f"{own / FLA['ms']:.0%}", f"{counted:.0%}")]
    for name, ranks, tokens, said in (
        ("LASP-2 beside ring attention, 64 GPUs, 2,048K tokens", 64, 2048 * 1024, "+36.6 % tokens/s"),
        ("ZeCO beside the best before, 256 GPUs, 8M tokens", 256, 8 << 20, "+60 % tokens/s"),
    ):
        ring = costs.ring_attention_bytes(ranks, tokens // ranks, 16, 128, 128)
        ours = (ranks - 1) * costs.exchanged("simple_gla", "fwd", ranks, {"H": 16, "K": 128, "V": 128})
        lines.append((name, "bytes of 16 heads, of ring attention's", said, f"1/{ring / ours:.0f}"))
    note = (
        "The first row is a check: operations at the speed of the shard's own, bytes at the link's. The others are ratios of "
        "whole models, of which counts give the exchange alone."
    )
    return Section("Published figures", ("", "figure", "published", "counted"), lines, note)


def succeeded(results: dict[str, Any]) -> bool:
    """Every operator was timed."""
    return bool(families(results))
