"""``linattn bench``: what it takes, and where its figures go. What runs is imported when it runs."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from linattn.cli import SHORT_DTYPES
from linattn.errors import LinattnError, OptionError
from linattn.frameworks import FLOAT_DTYPES, KNOWN
from rich.console import Console

from . import commands, reports, sections
from .cases import GATES
from .catalogue import BENCHMARKS, Benchmark
from .commands import Asked, one_of
from .subjects import PEERS, Subject, subjects


def bench(
    context: typer.Context,
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
    graph: Annotated[
        bool | None,
        typer.Option("--graph", help="Of scale on GPUs: record each call as a CUDA graph too, and time its replays."),
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
        str | None, typer.Option(help="Of layer and model, comma-separated: eager, compiled, replayed. Default: the first two.")
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
        key = benchmark_named(name, device)
        benchmark = BENCHMARKS[key]
        refuse(name, benchmark, given(context))
        asked = Asked(
            settings={
                "device": device or benchmark.device,
                "dtype": dtype_named("--dtype", dtype or benchmark.dtype),
                "gate_dtype": dtype_named("--gate-dtype", gate_dtype),
                "gates": one_of("--gates", gates or benchmark.gates, list(GATES)),
                "seed": secrets.randbits(32) if seed is None else seed,
            },
            subjects=wanted_subjects(backend or ["auto"], framework or benchmark.framework, benchmark, peer if peers else ()),
            seconds=seconds or benchmark.seconds,
            check=check is not False,
            fresh=fresh is not False,
            budget=budget,
            resume=resume,
            rows=rows or (),
            warm=warm or 0,
            out=out,
            shape=shape,
            ranks=ranks or (),
            graph=bool(graph),
            what=what,
            modes=modes,
            peers=peer if peers else (),
            small=bool(small),
            layers=layers or 4,
            tune=tune,
        )
        found = benchmark.run(operators if key == "operators" else words, asked, Console(stderr=True))
    except LinattnError as error:
        raise typer.BadParameter(str(error)) from error
    if found is None:
        return
    show(found, html, png)
    if benchmark.judged and not all_well(found):
        raise typer.Exit(1)


def benchmark_named(name: str, device: str | None) -> str:
    """The key in :data:`BENCHMARKS` for the first word of a command line."""
    on_device = f"{name} --device cuda"
    if on_device in BENCHMARKS and device not in (None, "cpu"):
        return on_device
    return name if name in BENCHMARKS else "operators"


def given(context: typer.Context) -> list[str]:
    """The flags that the command line has."""
    sources = [(x, context.get_parameter_source(x.name or "")) for x in context.command.params]
    return [x.opts[0] for x, source in sources if x.param_type_name == "option" and source and source.name == "COMMANDLINE"]


def refuse(name: str, benchmark: Benchmark, flags: Sequence[str]) -> None:
    """``OptionError`` for a flag that the benchmark does not take."""
    for flag in flags:
        if flag not in benchmark.takes:
            *some, last = (key for key, other in BENCHMARKS.items() if flag in other.takes)
            known = f"{', '.join(some)} and {last}" if some else last
            raise OptionError(f"{flag} goes with {known}, not with {name}")


def wanted_subjects(
    backends: Sequence[str], framework: str | None, benchmark: Benchmark, peers: Sequence[str] | None
) -> list[Subject]:
    """Backends and peers; of a benchmark with libraries of its own none."""
    if benchmark.peers is None:
        return []
    chosen = [one_of("--peer", name, list(PEERS)) for name in (benchmark.peers if peers is None else peers)]
    return subjects(list(backends), framework and one_of("--framework", framework, KNOWN), chosen)


def dtype_named(flag: str, name: str) -> str:
    """The full name of a float dtype."""
    return one_of(flag, SHORT_DTYPES.get(name, name), FLOAT_DTYPES)


def limit_threads(threads: int | None) -> None:
    """Here and in the processes that time first calls."""
    if threads is None:
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(threads)


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
