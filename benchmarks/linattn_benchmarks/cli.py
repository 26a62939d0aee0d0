"""``linattn bench``: what it takes, and where its figures go. What runs is imported when it runs."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from linattn.cli import SHORT_DTYPES
from linattn.errors import LinattnError, OptionError
from linattn.frameworks import FLOAT_DTYPES, KNOWN
from linattn.ops._family import operator_named
from linattn.progress import bars
from rich.console import Console

from . import beside, commands, reports, rows, sections
from .cases import DECODE_SHAPES, DEFAULT_SHAPES, GATES, WHAT, cases, parse_shape, timed_operator
from .environment import document, keep, read, write
from .subjects import PEERS, Subject, subjects

Row = dict[str, Any]

SWEEPS = ("table", "grid")
BESIDE = tuple(beside.BENCHMARKS)
NAMED = ("overhead", "torch-cpu", "report", "scale", "parts", *SWEEPS, *BESIDE)


def bench(
    operators: Annotated[
        list[str],
        typer.Argument(
            help="Operators, e.g. chunk_gla recurrent_kda; or one of: table FILE (run a published table again), grid [FAMILY…] "
            "(families over heads and packings), parts [OPERATOR…] (what stands around the operators, and operators "
            "that take it in), layer [NAME…] (token mixers beside other libraries'), model NAME… (hybrid models of "
            "transformers), scale [FAMILY…] (families over ranks, and what many ranks would take), "
            "overhead (import and dispatch; with --device cuda [FAMILY…], eager calls), torch-cpu (the PyTorch backend against "
            "torch.bmm), report FILE… (show results files again)."
        ),
    ],
    backend: Annotated[list[str] | None, typer.Option(help="A backend to time; repeat for more. Default: auto.")] = None,
    framework: Annotated[
        str | None, typer.Option(help=f"Whose arrays: {', '.join(KNOWN)}. Default: the backend's first.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device: cpu, cuda, tpu or metal. Default: cpu; of table, grid, parts and scale, cuda."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of q, k and v: fp16, bf16, fp32, fp64 or the full name. Default: fp32; of table and grid, bf16."
        ),
    ] = None,
    gate_dtype: Annotated[str, typer.Option(help="Dtype of the other float arrays.")] = "fp32",
    gates: Annotated[
        str | None, typer.Option(help=f"How much the gates forget: {', '.join(GATES)}. Default: model; of table, mixed.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="SYMBOL=SIZE,…, e.g. B=1,T=1024/4096,H=4,K=64,V=64; '/' lists sizes. Repeat for more."),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(help="Comma-separated: fwd, fwdbwd, decode; operators named decode_* only decode. Default: fwd,fwdbwd."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Time installed peers on the same arrays.")] = True,
    peer: Annotated[list[str] | None, typer.Option(help="Only this peer; repeat for more. Default: every one.")] = None,
    fresh: Annotated[
        bool | None, typer.Option(help="Time first calls, and look at memory, in fresh processes. Default: do, of operators.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.01, help="Time to spend on the repeats of one row. Default: 1; of table, grid and parts, 0.2."),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Of table, grid and parts: only rows with such a name, as in a shell; repeat for more."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=10,
            help="Of table, grid, parts, scale and overhead on a device: seconds for everything, half of them for --warm; of "
            "layer and model: for one library's first calls. What is left then is not timed.",
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Of table, grid, scale and overhead on a device: a results file to go on with.")
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option(
            help="Of table, grid and parts: hold results against float64 first; of layer and model: others against ours. "
            "Default: do."
        ),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Of scale: a number of ranks; repeat for more. Default: 1, 2 and 4.")
    ] = None,
    warm: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of these, parts, overhead on a device, layer and model: processes that make first calls beforehand, at once; "
            "of scale: sets of ranks that do.",
        ),
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of table, grid, layer, model and parts: configurations that the autotuner of a peer's kernel chooses among. "
            "Default: all.",
        ),
    ] = None,
    small: Annotated[bool | None, typer.Option(help="Of layer, model and parts: at reduced sizes. Default: real ones.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of model: how many layers it has. Default: 4.")] = None,
    modes: Annotated[
        str | None, typer.Option(help="Of layer and model, comma-separated: eager, compiled. Default: both.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of PyTorch. Default: its own choice.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the arrays. Default: another one every time.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plots into this folder.")] = None,
) -> None:
    """Time operators against the device's own limits and against other libraries; check what is timed."""
    try:
        if html or png:
            check_plots()
        limit_threads(threads)
        name, *words = operators
        on_device = name in (*SWEEPS, *BESIDE, "scale", "parts") or (name == "overhead" and device not in (None, "cpu"))
        on_host = name == "overhead" and on_device
        refuse(name, (name,) if on_host else (*SWEEPS, "scale", "overhead --device cuda"), {"--resume": resume})
        refuse(name, (*SWEEPS, "parts"), {"--rows": rows})
        refuse(name, (*SWEEPS, *BESIDE, "parts"), {"--check": check, "--tune": tune})
        refuse(name, BESIDE, {"--modes": modes})
        refuse(name, (*BESIDE, "parts"), {"--small": small})
        refuse(name, ("model",), {"--layers": layers})
        refuse(name, ("scale",), {"--ranks": ranks})
        refuse(
            name,
            (name,) if on_device else (*SWEEPS, "parts", "scale", *BESIDE, "overhead --device cuda"),
            {"--warm": warm, "--budget": budget},
        )
        if name in NAMED and not on_device:
            named(operators, out, html, png)
            return
        usual = commands.DEFAULTS[name] if on_device else USUAL
        settings = {
            "device": device or usual["device"],
            "dtype": dtype_named("--dtype", dtype or usual["dtype"]),
            "gate_dtype": dtype_named("--gate-dtype", gate_dtype),
            "gates": one_of("--gates", gates or usual["gates"], list(GATES)),
            "seed": secrets.randbits(32) if seed is None else seed,
        }
        seconds = seconds or usual["seconds"]
        if name in BESIDE:
            refuse(name, (), {"--fresh": fresh, "--framework": framework, "--gates": gates})
            asked = commands.Asked(
                settings,
                (),
                seconds,
                out=out,
                shape=shape,
                what=what,
                modes=modes,
                peers=peer if peers else (),
                small=bool(small),
                layers=layers or 4,
                check=check is not False,
                budget=budget,
                warm=warm or 0,
                tune=tune,
            )
            found = commands.COMMANDS[name](words, asked, Console(stderr=True))
        elif name == "parts":
            refuse(name, (), {"--fresh": fresh, "--framework": framework, "--gates": gates, "--dtype": dtype, "--shape": shape})
            refuse(name, (), {"--what": what, "--backend": backend})
            asked = commands.Asked(
                settings, (), seconds, check is not False, rows=rows or (), out=out, small=bool(small), tune=tune
            )
            asked = replace(asked, peers=peer if peers else (), warm=warm or 0, budget=budget)
            found = commands.COMMANDS[name](words, asked, Console(stderr=True))
        elif on_device:
            refuse(name, ("scale",) if name == "scale" else (), {"--shape": shape})
            refuse(name, (), {"--what": what, "--fresh": fresh, "--framework": framework})
            timed = wanted_subjects(backend or ["auto"], "torch", (peer or commands.PEERS[name]) if peers else [])
            asked = commands.Asked(settings, timed, seconds, check is not False, budget, resume, rows or (), warm or 0, out)
            asked = replace(asked, shape=shape, ranks=ranks or (), tune=tune)
            found = commands.COMMANDS[name](words, asked, Console(stderr=True))
        else:
            chosen = wanted_cases(
                operators, what or "fwd,fwdbwd", shape or default_shapes(operators, settings["device"]), settings
            )
            timed = wanted_subjects(backend or ["auto"], framework, (peer or list(PEERS)) if peers else [])
            found = measure(chosen, timed, seconds, fresh is not False, out)
    except LinattnError as error:
        raise typer.BadParameter(str(error)) from error
    show(found, html, png)
    if not all_well(found):
        raise typer.Exit(1)


USUAL = {"device": "cpu", "dtype": "fp32", "gates": "model", "seconds": 1.0}
"""What is not said of operators."""


def refuse(name: str, known: Sequence[str], flags: dict[str, Any]) -> None:
    """``OptionError`` for a flag that was given to a benchmark that does not take it."""
    given = [flag for flag, value in flags.items() if value is not None]
    if given and name not in known:
        *some, last = known or ("",)
        them = f"{', '.join(some)} and {last}" if some else last
        told = f"goes with {them}, not with {name}" if known else f"does not go with {name}"
        raise OptionError(f"{given[0]} {told}")


def named(operators: Sequence[str], out: Path | None, html: Path | None, png: Path | None) -> None:
    """A benchmark with a name of its own."""
    name, *rest = operators
    if name == "report":
        if not rest:
            raise OptionError("report: name at least one results file")
        found = merged({path: to_report(Path(path)) for path in rest})
        if out:
            keep(out, found)
        show(found, html, png)
        return
    if rest:
        raise OptionError(f"{name} takes no operators, got {', '.join(rest)}")
    with bars() as bar:
        bar.add_task("measuring", total=None)
        results = overhead() if name == "overhead" else torch_cpu()
    if out:
        write(out, name, results)
        typer.echo(f"wrote {out}")
    else:
        typer.echo(rows.text(results), nl=False)


def overhead() -> dict[str, Any]:
    """Import and dispatch."""
    from .overhead import run

    return run()


def torch_cpu() -> dict[str, Any]:
    """The PyTorch backend against ``torch.bmm``."""
    try:
        from .torch_cpu import run
    except ImportError as error:
        raise OptionError(f"torch-cpu cannot run: {error}; pip install 'linattn[torch,bench]'") from error
    return run()


def one_of(flag: str, value: str, known: Sequence[str]) -> str:
    """A value of a flag that takes one of a few."""
    if value not in known:
        raise OptionError(f"{flag} {value}: expected {', '.join(known)}")
    return value


def dtype_named(flag: str, name: str) -> str:
    """The full name of a float dtype."""
    return one_of(flag, SHORT_DTYPES.get(name, name), FLOAT_DTYPES)


def wanted_cases(operators: Sequence[str], what: str, shapes: Sequence[str], settings: dict[str, Any]) -> Any:
    """Every combination of operators, shapes and what to do."""
    for name in operators:
        timed_operator(name)
    whats = [one_of("--what", part.strip(), WHAT) for part in what.split(",")]
    return cases(operators, whats, [sizes for text in shapes for sizes in parse_shape(text)], **settings)


def default_shapes(operators: Sequence[str], device: str) -> Sequence[str]:
    """For a kind of device; those of decoding if nothing else is timed."""
    known = DECODE_SHAPES if all(operator_named(name).form == "decode" for name in operators) else DEFAULT_SHAPES
    return known.get(device, known["cpu"])


def wanted_subjects(backends: Sequence[str], framework: str | None, peers: Sequence[str]) -> list[Subject]:
    """Backends and peers."""
    chosen = [one_of("--peer", name, list(PEERS)) for name in peers]
    return subjects(list(backends), framework and one_of("--framework", framework, KNOWN), chosen)


def limit_threads(threads: int | None) -> None:
    """Here and in the processes that time first calls."""
    if threads is None:
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(threads)


def measure(chosen: Any, subjects: Any, seconds: float, fresh: bool, out: Path | None) -> dict[str, Any]:
    """Run everything, say how far it is, and keep the figures: those of a run that is cut off too."""
    from .operators import run
    from .table import cells

    errors = Console(stderr=True)

    def report(results: dict[str, Any]) -> None:
        line = "  ".join(filter(None, cells(results["rows"][-1])))
        errors.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
        if out:
            write(out, "operators", results)
        bar.advance(task)

    with bars(errors) as bar:
        task = bar.add_task("timing", total=len(chosen) * len(subjects))
        return document("operators", run(chosen, subjects, seconds, fresh, report))


def to_report(path: Path) -> dict[str, Any]:
    """A results file that ``report`` can show."""
    content = read(path)
    found = content.get("benchmark")
    if found in reports.SECTIONS:
        return content
    if found != "operators":
        known = ", ".join(("operators", *reports.SECTIONS))
        raise OptionError(f"{path}: report shows results files of {known}, and this is one of {found}")
    if damaged(content):
        raise OptionError(f"{path}: expected what linattn bench --out writes: parts of its environment or rows are missing")
    return content


OF_ENVIRONMENT = {"packages", "cores", "load"}
OF_ROW = {"operator", "what", "library", "backend", "case", "label", "status", "ms", "graph_ms", "floor", "ratio", "error"}


def damaged(content: dict[str, Any]) -> bool:
    """Whether something is missing that every results file of operators has."""
    try:
        rows, environment = content["results"]["rows"], content["environment"]
        whole = "ceilings" in content["results"] and environment.keys() >= OF_ENVIRONMENT
        return not (whole and all(row.keys() >= OF_ROW for row in rows))
    except (KeyError, TypeError, AttributeError):
        return True


def merged(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Rows of several runs in one environment, but for how busy the machine was; of two of one call, as :func:`both` has it."""
    kinds = list(dict.fromkeys(file["benchmark"] for file in files.values()))
    first, *_ = files.values()
    if len(files) == 1 and kinds[0] in reports.SECTIONS:
        return first
    if len(kinds) > 1 or kinds[0] not in CALLS:
        raise OptionError(
            f"report: expected results files of one of {', '.join(CALLS)}, or one file of {', '.join(reports.SECTIONS)}; "
            f"got {', '.join(kinds)}"
        )
    environment = shared({name: file["environment"] for name, file in files.items()})
    rows = joined((row for file in files.values() for row in file["results"]["rows"]), CALLS[kinds[0]])
    return first | {"environment": environment, "results": first["results"] | {"rows": rows}}


OF_A_RUN = ("load", "cores", "packages")
"""What of its environment belongs to one run, and may be another's otherwise."""


def shared(environments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The environment of all, as busy as the busiest, with the fewest cores that one of them was held to.

    A package that only some had installed is one of it.
    """
    said: dict[str, tuple[Any, str]] = {}
    for path, environment in environments.items():
        one = {name: value for name, value in environment.items() if name not in OF_A_RUN} | environment["packages"]
        for name, value in one.items():
            before, where = said.setdefault(name, (value, path))
            if value != before:
                raise OptionError(
                    f"report: {path} comes from another environment than {where}: {name} is {value}, not {before}"
                )
    every = list(environments.values())
    packages = {name: version for environment in every for name, version in environment["packages"].items()}
    loads = [environment["load"] for environment in every if environment["load"] is not None]
    cores = min(environment["cores"] for environment in every)
    return every[0] | {"packages": packages, "cores": cores, "load": max(loads, default=None)}


ONCE = ("first_call_s", "peak_bytes", "peak_of")
"""What a run may have left to another one."""
COUNTS = ("wrong", "ok", "failed", "skipped")
"""Of two rows of one call, the one whose status comes first here is shown: nothing makes up for a wrong result."""


def joined(rows: Iterable[Row], call_of: Callable[[Row], tuple[Any, ...]]) -> list[Row]:
    """One row for each call."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        call = call_of(row)
        found[call] = both(found[call], row) if call in found else row
    return list(found.values())


CALLS: dict[str, Callable[[Row], tuple[Any, ...]]] = {
    "operators": lambda row: (row["library"], row["backend"], json.dumps(row["case"] | {"seed": None}, sort_keys=True)),
    "parts": lambda row: tuple(row[name] for name in ("part", "label", "dtype", "what", "library")),
    **dict.fromkeys(BESIDE, beside.call_of),
}
"""What is one call, of the benchmarks of which several files can be shown as one."""


def both(first: Row, second: Row) -> Row:
    """The one that counts of two rows of one call; a right one also has what the other knows of first call and memory."""
    if first["status"] == second["status"] == "ok":
        return first | {name: second[name] for name in ONCE if name in first and first[name] is None}
    return min(first, second, key=lambda row: COUNTS.index(row["status"]))


def show(found: dict[str, Any], html: Path | None, png: Path | None) -> None:
    """The table, and the plots where they were asked for."""
    from . import table

    rows = found["results"]["rows"]
    console = Console(width=None if Console().is_terminal else 160, highlight=False, markup=False)
    if found["benchmark"] in reports.SECTIONS:
        for section in reports.sections(found["benchmark"], found["results"]):
            console.print(*filter(None, (section.title, section.note)), sep="\n", style="bold", soft_wrap=True)
            console.print(sections.console(section), "")
        if html or png:
            draw(found, html, png)
        return
    console.print(table.ceilings(found["results"]["ceilings"]), soft_wrap=True)
    console.print(table.console(rows))
    for remark in table.remarks(rows):
        console.print(remark, soft_wrap=True)
    if html or png:
        draw(found, html, png)


def check_plots() -> None:
    """See that there is what draws plots: before anything is measured."""
    try:
        from . import page, plots  # noqa: F401
    except ImportError as error:
        raise OptionError(f"--html and --png need {error.name}: pip install 'linattn[bench]'") from error


def draw(found: dict[str, Any], html: Path | None, png: Path | None) -> None:
    """The page and the plots."""
    from . import page, plots

    if html:
        page.write(found, html)
        typer.echo(f"wrote {html}")
    figures = reports.figures(found["benchmark"], found["results"]) if png else {}
    for path in plots.write_png(figures, png) if png else ():
        typer.echo(f"wrote {path}")


def all_well(found: dict[str, Any]) -> bool:
    """No row of linattn's is wrong or failed."""
    if found["benchmark"] in reports.SECTIONS:
        return commands.succeeded(found)
    from .operators import succeeded

    return succeeded(found["results"]["rows"])
