"""The command line: ``linattn backends``, ``explain``, ``doctor``, ``new-backend``, ``run-with``, and what other packages add.

A package adds a command with an entry point of the group ``linattn.commands`` whose object is a typer function.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Annotated, Any

import typer

from .apart import answer_apart
from .dispatch import plan_of
from .errors import LinattnError, OptionError
from .frameworks import FLOAT_DTYPES, KNOWN, Facts, check_device
from .installed import show_backends, show_extras
from .integrations.report import show_integrations
from .integrations.run_with import run_with
from .ops._family import operator_named
from .planning import Plan
from .plugin import API_VERSION
from .preference import ENVIRONMENT_VARIABLE, preference_of
from .scaffold.cli import new_backend
from .spec import SYMBOLS, Arg, OpSpec

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def _say_version(asked: bool) -> None:
    if asked:
        print(f"linattn {API_VERSION}")
        raise typer.Exit


@app.callback()
def linattn(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which version this is, and exit.")
    ] = False,
) -> None:
    """Linear attention, defined once: which backends there are, which one a call takes and why, and whether it is right."""


@app.command()
def backends() -> None:
    """List every backend, where it comes from, and what is wrong with those that cannot be used."""
    show_backends()


@app.command()
def explain(
    operator: Annotated[str, typer.Argument(help="An operator, e.g. chunk_gla, or a family, e.g. gla.")],
    framework: Annotated[str, typer.Option(help=f"One of {', '.join(KNOWN)}.")] = "torch",
    device: Annotated[str, typer.Option(help="Device, e.g. cpu, cuda, cuda:1, tpu, metal; it need not be here.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Dtype of q, k and v: fp16, bf16, fp32, fp64 or the full name.")] = "fp32",
    gate_dtype: Annotated[str | None, typer.Option(help="Dtype of the other float arrays. Default: --dtype.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="A backend to try; repeat for an order.")] = None,
    size: Annotated[list[str] | None, typer.Option("--size", "-s", help="SYMBOL=SIZE, e.g. -s T=4096 -s HV=16.")] = None,
    given: Annotated[list[str] | None, typer.Option("--with", help="An optional array that is given, e.g. gv.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Another shape of an array, e.g. --shape 'g=HV'.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A flag, e.g. --option normalize=true.")] = None,
    grad: Annotated[bool, typer.Option(help="A gradient will be asked for.")] = False,
) -> None:
    """Say which backend a call would run on and why, from its shapes alone: no array is made and nothing runs."""
    try:
        function = operator_named(operator)
        spec: OpSpec = function.spec
        if framework not in KNOWN:
            raise OptionError(f"unknown framework {framework!r}: known are {', '.join(KNOWN)}")
        check_device(framework, device)
        sizes = {"B": 1, "T": 1024, "H": 4, "K": 128, "V": 128} | _sizes(size or [])
        sizes.setdefault("HV", sizes["H"])
        sizes.setdefault("L", sizes["K"])
        options = _options(spec, option or [])
        chunk_size = options.get("chunk_size")
        sizes["C"] = chunk_size if isinstance(chunk_size, int) else 0  # refused below if it is none
        facts = _facts(spec, options, sizes, given or [], shape or [], device, _dtype(dtype), _dtype(gate_dtype or dtype))
        preference = preference_of(backend or None, None, os.environ.get(ENVIRONMENT_VARIABLE))
        plan: Plan = plan_of(spec, function.form, framework, facts, options, preference, grad or None, ask=answer_apart)
    except LinattnError as error:
        raise typer.BadParameter(str(error)) from error
    print(plan)
    if plan.backend is None:
        raise typer.Exit(1)


def _sizes(pairs: list[str]) -> dict[str, int]:
    sizes = dict(_pair(text, "--size", "SYMBOL=SIZE") for text in pairs)
    for symbol, value in sizes.items():
        if symbol not in SYMBOLS or symbol == "C":
            known = ", ".join(name for name in SYMBOLS if name != "C")
            raise OptionError(f"--size {symbol}={value}: the symbols are {known}; C is --option chunk_size")
        if not value.isdecimal():
            raise OptionError(f"--size {symbol}={value}: the size must be a whole number")
    return {symbol: int(value) for symbol, value in sizes.items()}


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"{flag} {text}: expected {form}")
    return name, value


def _options(spec: OpSpec, pairs: list[str]) -> dict[str, Any]:
    """Every static option of the family, defaults where none is given."""
    options: dict[str, Any] = {**spec.defaults, "initial_state": None}
    for text in pairs:
        name, value = _pair(text, "--option", "NAME=VALUE")
        if name not in spec.option_names:
            raise OptionError(f"--option {text}: {spec.name} has {', '.join(spec.option_names)}")
        options[name] = {"true": True, "false": False, "none": None}.get(value.lower(), _number(value))
    return options


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _dtype(name: str) -> str:
    full = SHORT_DTYPES.get(name, name)
    if full not in FLOAT_DTYPES:
        raise OptionError(f"unknown dtype {name!r}: known are {', '.join([*SHORT_DTYPES, *FLOAT_DTYPES])}")
    return full


def _facts(
    spec: OpSpec,
    options: dict[str, Any],
    sizes: dict[str, int],
    given: list[str],
    shapes: list[str],
    device: str,
    dtype: str,
    gate_dtype: str,
) -> list[tuple[str, Facts]]:
    """Static facts of every required array, and of the optional ones in ``given``."""
    args = {arg.name: arg for arg in spec.arrays(options)}
    chosen = dict(_pair(text, "--shape", "ARRAY='SYMBOLS'") for text in shapes)
    for name in (*given, *chosen):
        if name not in args and not any(arg.startswith(f"{name}.") for arg in args):
            raise OptionError(f"{spec.name} has no array {name!r}: it has {', '.join(args)}")
    sizes = {"N": sizes["B"], "P": sizes["B"]} | sizes
    facts: list[tuple[str, Facts]] = []
    for arg in args.values():
        if arg.optional and not {arg.name, arg.name.partition(".")[0]}.intersection(given):
            continue
        kind = {"operand": dtype, "float": gate_dtype, "index": "int32"}[arg.role]
        facts.append((arg.name, Facts(_shape(arg, chosen.get(arg.name), sizes), kind, device)))
    return facts


def _shape(arg: Arg, chosen: str | None, sizes: dict[str, int]) -> tuple[int, ...]:
    symbols = tuple(chosen.split()) if chosen else arg.shapes[0]
    if symbols not in arg.shapes:
        raise OptionError(f"--shape {arg.name}='{chosen}': expected one of {arg.shape}")
    dims: list[int] = []
    for symbol in symbols:
        base, _, extra = symbol.partition("+")
        dims.append(sizes[base] + int(extra or 0))
    return tuple(dims)


@app.command()
def doctor() -> None:
    """Say what is installed, what is missing and the command that installs it."""
    show_extras()
    print()
    show_backends()
    print()
    show_integrations()


app.command(name="new-backend")(new_backend)
app.command(name="run-with")(run_with)


def _add_commands() -> None:
    """The commands of installed packages. One that cannot be imported says so when it is used, not before."""
    for ep in importlib.metadata.entry_points(group="linattn.commands"):
        try:
            command = ep.load()
        except Exception as error:
            command = _unavailable(ep.name, error)
        app.command(name=ep.name)(command)


def _unavailable(name: str, error: Exception) -> Any:
    def command() -> None:
        typer.echo(f"linattn {name} is not available: {error}", err=True)
        raise typer.Exit(2)

    command.__doc__ = f"Not available: {error}."
    return command


def main() -> None:
    """Entry point of the ``linattn`` command."""
    _add_commands()
    app()


if __name__ == "__main__":
    main()
