"""Fills the tables of a Markdown page from results files: ``python -m figures.document docs/benchmarks.md``.

Between ``<!-- results: NAME.json -->`` and ``<!-- end -->`` stands what :func:`render` makes of that file in
``benchmarks/results/``; after ``<!-- side by side: NAME.json -->`` their times, one column a library; after
``<!-- speed-ups: NAME.json -->`` ours over the best other library's; after ``<!-- costs: NAME.json -->`` time and memory
of every family; after ``<!-- memory: NAME.json -->`` memory and first calls.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linattn.ops._family import operator_named
from linattn_benchmarks import reports, table
from linattn_benchmarks.beside import BENCHMARKS
from linattn_benchmarks.environment import read
from linattn_benchmarks.overhead import LOOKED_AT
from linattn_benchmarks.sections import grid, markdown

from . import RESULTS, speedups

BLOCK = re.compile(
    r"(<!-- (?P<view>results|side by side|speed-ups|costs|memory): (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL
)


def fill(text: str, results: Path = RESULTS) -> str:
    """The page with every table made again."""
    return BLOCK.sub(lambda block: block[1] + render(read(results / block["name"]), block["view"]) + block[4], text)


def render(document: dict[str, Any], view: str = "results") -> str:
    """The Markdown of one results file."""
    body = VIEWS.get(view, RENDERERS[document["benchmark"]])(document["results"])
    return f"\n{body}\n\n{measured_on(document['environment'], PACKAGES.get(document['benchmark'], ('numpy', 'torch')))}\n\n"


PACKAGES = {
    "mlx_memory": ("mlx",),
    "mlx_lm_training": ("mlx",),
    "jax_cpu": ("jax", "torch"),
    "jax_cuda": ("jax", "triton"),
    "tpu_static": ("jax", "libtpu"),
    "parts": ("torch", "triton", "flash-linear-attention", "mamba-ssm"),
    **dict.fromkeys(("grid", "host"), ("torch", "triton", "flash-linear-attention")),
    **dict.fromkeys(BENCHMARKS, ("torch", "triton", "transformers", "flash-linear-attention", "mamba-ssm", "causal-conv1d")),
}
"""Whose versions matter to a benchmark, where it is not NumPy's and PyTorch's."""


def measured_on(environment: dict[str, Any], names: tuple[str, ...]) -> str:
    """One line on versions and machine."""
    packages = ", ".join(f"{name} {environment['packages'][name]}" for name in names if name in environment["packages"])
    load = "" if environment["load"] is None else f", load {environment['load']:.1f}"
    accelerator = f"{environment['accelerator']}; " if environment.get("accelerator") else ""  # not in older files
    return (
        f"linattn {environment['linattn']}, Python {environment['python']}, {packages}; {accelerator}"
        f"{environment['processor']}, {environment['cores']} cores{load}."
    )


def overhead(results: dict[str, Any]) -> str:
    """Import and dispatch."""
    imported = results["import"]
    lines = [
        ("`import linattn` beyond NumPy's own import", f"{imported['beyond_numpy_ms']:.1f} ms"),
        ("frameworks that `import linattn` loads", ", ".join(imported["frameworks_loaded"]) or "none"),
        *((f"added to an eager call, {name} arrays", f"{us:.2f} µs") for name, us in results["dispatch_us"].items()),
        *((f"a look for mistakes in a call of `kda`, {name}", looked(found)) for name, found in results["guards"].items()),
    ]
    return grid(("what", "figure"), lines)


def looked(found: dict[str, float]) -> str:
    """What guards cost calls of one kind."""
    share = f"{found['share']:.3%} of the first {LOOKED_AT:,}"
    return f"{found['look_us']:.0f} µs beside {found['call_us']:,.0f} µs of the call; {share}"


def operators(results: dict[str, Any]) -> str:
    """Rows of the general benchmark that were checked; what serves for scale is in the plot. What all share is said once."""
    rows = [row for row in results["rows"] if row["error"]]
    columns = {"shape": [plain(row) for row in rows], "backend": [row["backend"] or row["library"] for row in rows]}
    shared = [values[0] for values in columns.values() if len(set(values)) == 1]
    varied = {name: values for name, values in columns.items() if len(set(values)) > 1}
    names, figures = table.filled(rows)
    wanted = [i for i, name in enumerate(names) if name in FIGURES]
    head = ("operator", "what", *varied, "T", *(names[i] for i in wanted))
    lines = [
        (f"`{row['operator']}`", row["what"], *values, row["case"]["sizes"]["T"], *(unbroken(line[i]) for i in wanted))
        for row, line, *values in zip(rows, figures, *varied.values(), strict=True)
    ]
    common = ", ".join([*shared, *dtypes(rows)])
    return f"{table.ceilings(results['ceilings'])}. {common}.\n\n{grid(head, lines)}"


def side_by_side(results: dict[str, Any]) -> str:
    """Of the general benchmark: milliseconds forward / forward and backward, one column a library, beside the floor."""
    rows = [row for row in table.called(results["rows"]) if row["what"] != "decode"]
    operands = " and ".join(sorted({row["case"]["dtype"] for row in rows}))
    what = f"Operands in {operands}, gates in {table.USUAL} unless said"
    how = "ms, forward / with backward, of graph replays where a call can be recorded"
    return f"{table.ceilings(results['ceilings'])}. {what}; {how}.\n\n{columns(rows, times, floors)}"


def memory(results: dict[str, Any]) -> str:
    """Of the general benchmark: peak memory of forward and backward pass beyond the inputs, and the first call's time."""
    rows = [row for row in table.called(results["rows"]) if row["what"] == "fwdbwd" and row["peak_bytes"] is not None]
    return columns(rows, peaks)


Pair = tuple[dict[str, Any] | None, dict[str, Any] | None]
"""The rows forward, and forward and backward."""


def columns(rows: list[dict[str, Any]], show: Callable[[Pair], str], beside: Callable[[Pair], str] | None = None) -> str:
    """A table for each shape, its libraries side by side."""
    shapes = dict.fromkeys(row["label"] for row in rows)
    return "\n\n".join(
        f"{shape}:\n\n{of_shape([row for row in rows if row['label'] == shape], show, beside)}" for shape in shapes
    )


def of_shape(rows: list[dict[str, Any]], show: Callable[[Pair], str], beside: Callable[[Pair], str] | None) -> str:
    """A line for each operator and kind of gates; a column for each library, and one beside them from the first."""
    libraries = list(dict.fromkeys(table.library(row) for row in rows))
    found = {(*call(row), table.library(row), row["what"]): row for row in rows}
    lines = []
    for key in dict.fromkeys(map(call, rows)):
        pairs: list[Pair] = [(found.get((*key, who, "fwd")), found.get((*key, who, "fwdbwd"))) for who in libraries]
        more = () if beside is None else (beside(next(pair for pair in pairs if any(pair))),)
        lines.append((f"`{key[0]}`", *key[1:], *map(unbroken, (*more, *map(show, pairs)))))
    return grid(("operator", "gates", *(() if beside is None else (beside.__name__,)), *libraries), lines)


def call(row: dict[str, Any]) -> tuple[str, str]:
    """What was called at a shape, to a reader."""
    return row["operator"], table.gates(row) if gated(row) else ""


def gated(row: dict[str, Any]) -> bool:
    """Whether the operator has a gate that says how much it forgets."""
    return any(arg.name == "g" for arg in operator_named(row["operator"]).spec.args)


def times(pair: Pair) -> str:
    """Medians; a dash where nothing was called."""
    return " / ".join(map(time, pair))


def time(row: dict[str, Any] | None) -> str:
    """The median of one row, or that it failed."""
    if row is not None and row["status"] == "failed":
        return "failed"
    if row is None or row["ms"] is None:
        return "–"
    return table.milliseconds(table.on_device(row)["median"]) + (" (wrong)" if row["status"] == "wrong" else "")


def floors(pair: Pair) -> str:
    """The least that the device needs."""
    return " / ".join("–" if row is None else table.milliseconds(row["floor"]["ms"]) for row in pair)


def peaks(pair: Pair) -> str:
    """Memory, and the first call where it was looked at."""
    row = pair[1]
    if row is None:
        return "–"
    first = "" if row["first_call_s"] is None else f", {row['first_call_s']:.1f} s"
    return table.memory(row["peak_bytes"]) + first


def unbroken(cell: str) -> str:
    """A figure that stays on one line."""
    return cell.replace(" ", "\u00a0").replace("-", "\u2011")


FIGURES = ("ms", "graph, ms", "× floor", "first call", "peak", "error")


def plain(row: dict[str, Any]) -> str:
    """The sizes that every family has, without T."""
    sizes = row["case"]["sizes"]
    return " ".join(f"{symbol}{sizes[symbol]}" for symbol in ("B", "H", "K", "V"))


def dtypes(rows: list[dict[str, Any]]) -> list[str]:
    """Dtypes and gates of the rows."""
    cases = {(row["case"]["dtype"], row["case"]["gate_dtype"], row["case"]["gates"]) for row in rows}
    return [f"operands {dtype}, gates {gate_dtype} ({gates})" for dtype, gate_dtype, gates in sorted(cases)]


def torch_cpu(results: dict[str, Any]) -> str:
    """The PyTorch backend against ``torch.bmm``."""
    names = {False: "fwd", True: "fwd+bwd"}
    times = [
        (
            f"`{row['family']}`",
            row["T"],
            names[row["backward"]],
            seconds(row["median_s"]),
            seconds(row["bmm_median_s"]),
            f"{row['ratio']:.2f}",
        )
        for row in (*results["times"], *results["growth"])
    ]
    memory = [
        (
            f"`{row['family']}`",
            row["T"],
            names[row["backward"]],
            table.memory(row["growth_bytes"]),
            f"{row['peak_over_inputs_outputs']:.2f}",
        )
        for row in results["memory"]
    ]
    shape = " ".join(f"{symbol}{size}" for symbol, size in results["shape"].items())
    decode = results["decode"]["median_s"] * 1e6
    head = f"{shape}, {results['dtype']}, {results['machine']['threads']} threads, load {results['load_before'][0]:.1f}."
    return "\n\n".join(
        (
            head,
            grid(("family", "T", "what", "linattn", "`torch.bmm`", "ratio"), times),
            grid(("family", "T", "what", "memory during the call", "peak over inputs and outputs"), memory),
            f"One token of `recurrent_gla` from a state takes {decode:.0f} µs.",
        )
    )


def jax_cpu(results: list[dict[str, Any]]) -> str:
    """The JAX backend beside the PyTorch backend."""
    lines = [(f"`{row['op']}`", row["gate"], row["T"], row["mode"], row["backend"], seconds(row["cpu"])) for row in results]
    return grid(("operator", "gates", "T", "what", "backend", "processor time"), lines)


def jax_cuda(results: list[dict[str, Any]]) -> str:
    """JAX arrays on a GPU: a line for each family and size, a column for each backend."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in results:
        if "ms" in row:
            key = (f"`{row['op']}`", f"B{row['B']} T{row['T']} H{row['H']}", row["what"])
            found.setdefault(key, {})[row["backend"]] = table.milliseconds(row["ms"]["median"])
    backends = sorted({name for row in found.values() for name in row}, key=("jax_triton", "jla", "jax").index)
    lines = [(*key, *(row.get(name, "") for name in backends)) for key, row in found.items()]
    return grid(("operator", "shape", "what", *(f"{name}, ms" for name in backends)), lines)


def tpu_static(results: list[dict[str, Any]]) -> str:
    """Bundles of a grid step and VMEM of the TPU kernels on every generation; bundles a token by length of chunk and dtype."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    attempts = [row for row in results if "inverse" in row]
    results = [row for row in results if "inverse" not in row]
    for row in results:
        found.setdefault((row["family"], row["kernel"]), []).append(row)
    generations = list(dict.fromkeys(row["generation"] for row in results))
    longest = max(row["C"] for row in results)
    lines, choices = [], []
    for (family, kernel), rows in found.items():
        name = f"`{family}` {kernel}"
        default = [row for row in rows if kernel == "decode" or (row["C"], row["dtype"]) == (longest, "bfloat16")]
        bundles = {row["generation"]: row["bundles"] for row in default}
        lines.append((name, *(bundles[g] for g in generations), table.memory(max(row["vmem_bytes"] for row in default))))
        if kernel != "decode":
            a_token = {(r["C"], r["dtype"]): f"{r['bundles'] / r['C']:.1f}" for r in rows if r["generation"] == generations[0]}
            choices.append((name, *(a_token[key] for key in sorted(a_token, key=lambda key: (key[1], key[0])))))
    sizes = sorted({row["C"] for row in results if row["kernel"] != "decode"})
    head = (f"a token, {generations[0]}", *(f"C = {C}" for C in sizes), f"C = {longest}, float32")
    tried = [
        (f"`{row['family']}` {row['kernel']}", PASSES[row["inverse"]], f"{row['bundles'] / row['C']:.1f}") for row in attempts
    ]
    tables = (
        grid((f"C = {longest}", *generations, "VMEM"), lines),
        grid(head, choices),
        grid(("instead", "passes", "a token"), tried),
    )
    return "\n\n".join(tables)


def first_steps(results: list[dict[str, Any]]) -> str:
    """A new user's commands with the time each took, and what the programs among them said."""
    lines = [(f"`{row['command']}`", f"{row['seconds']:.0f} s", f"{row['processor_s']:.1f} s") for row in results]
    said = "\n".join(f"$ {row['command']}\n{row['said']}" for row in results if row["said"])
    return f"{grid(('command', 'time', 'processor time'), lines)}\n\n```text\n{said}\n```"


PASSES = {"EXACT": "six for the inverse (float32)", "ONE": "one for the inverse (bfloat16)"}


def mlx_memory(results: list[dict[str, Any]]) -> str:
    """Forward and backward pass of the MLX backend."""
    names = {"chunk": "chunk form", "loop": "loop over the tokens"}
    lines = [
        (
            f"`{row['op']}`",
            names[row["way"]],
            row["T"],
            table.memory(row["inputs"]),
            table.memory(row["peak"]),
            f"{row['peak'] / row['T'] / 1024:.0f} KiB",
            f"{row['cpu']:.1f} s",
        )
        for row in results
    ]
    return grid(("family", "way", "T", "inputs", "peak beyond them", "a token", "processor time"), lines)


def mlx_lm_training(results: list[dict[str, Any]]) -> str:
    """A training step of a layer of mlx-lm's, with its own recurrence and on linattn; forecasts where it would not fit."""
    lines = [
        (
            row["T"],
            row["way"],
            table.memory(row["peak"]) if row["peak"] else f"would be {table.memory(row['needs'])}",
            f"{row['cpu']:.1f} s" if row["peak"] else "not run",
        )
        for row in results
    ]
    return grid(("T", "way", "peak beyond parameters and inputs", "processor time"), lines)


def seconds(s: float) -> str:
    """In milliseconds."""
    return f"{table.milliseconds(s * 1e3)} ms"


RENDERERS = {
    "overhead": overhead,
    "operators": operators,
    "torch-cpu": torch_cpu,
    "jax_cpu": jax_cpu,
    "jax_cuda": jax_cuda,
    "mlx_memory": mlx_memory,
    "mlx_lm_training": mlx_lm_training,
    "tpu_static": tpu_static,
    "first_steps": first_steps,
    **{name: lambda results, name=name: markdown(reports.sections(name, results)) for name in reports.SECTIONS},
}


VIEWS = {"side by side": side_by_side, "speed-ups": speedups.markdown, "costs": speedups.costs, "memory": memory}
"""Of the general benchmark, beside the table of all its rows."""


def main() -> None:
    """Fill the pages named on the command line."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
