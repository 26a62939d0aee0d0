"""Writes the public API as text: names with signatures, families, the methods of the plug-in contract, commands.

``python tests/api/public_api.py`` rewrites ``public_api.txt``. Its diff is judged against docs/stability.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import linattn
import typer
from linattn import cli, errors, feature_maps, gates, plugin
from linattn.feature_maps import MAPS
from linattn.spec import COMPANIONS, DECODING, FAMILIES, SUMMARIES, OpSpec

FILE = Path(__file__).with_name("public_api.txt")
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def render() -> str:
    """The whole file."""
    lines: list[str] = []
    for module in (linattn, errors, feature_maps, gates, plugin):
        lines += ["", f"# {module.__name__}", "", *names(module)]
    lines += ["", "# feature maps by name", "", *MAPS]
    for spec in FAMILIES.values():
        lines += ["", f"# family {spec.name}", "", *family(spec)]
    for spec in COMPANIONS.values():
        lines += ["", f"# companion {spec.name}", "", *family(spec)]
    lines += ["", "# command line", "", *commands()]
    return "\n".join(lines[1:]) + "\n"


def names(module: ModuleType) -> Iterator[str]:
    """Each public name; classes with their public members; the forms of a family in one line, since they share a signature."""
    exported = getattr(module, "__all__", None) or [name for name in vars(module) if name != "annotations"]
    lines: dict[str, list[str]] = {}
    for name in sorted(exported):
        value = getattr(module, name)
        if inspect.ismodule(value) or name.startswith("__"):
            continue
        if inspect.isclass(value):
            lines["\n".join(class_lines(name, value))] = []
        elif inspect.isfunction(value):
            family = name if getattr(value, "form", "decode") in ("decode", "summary") else value.spec.name
            lines.setdefault(f"{family}{signature(value)}", []).append(name)
        else:
            lines[f"{name}: {type(value).__name__}"] = []
    for line, named in lines.items():
        yield line if len(named) < 2 else f"{', '.join(named)}:\n    {line}"


def class_lines(name: str, cls: type) -> Iterator[str]:
    """Bases, fields or constructor, and public members that linattn defines."""
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    yield f"class {name}({bases})"
    if issubclass(cls, Exception):
        return
    if dataclasses.is_dataclass(cls):
        yield f"    {signature(cls)}"
    elif hasattr(cls, "_fields"):
        yield f"    fields: {', '.join(cls._fields)}"
    for attribute, kind in inspect.get_annotations(cls).items():
        if not dataclasses.is_dataclass(cls) and not hasattr(cls, "_fields"):
            yield f"    {attribute}: {kind}"
    for member, value in sorted(vars(cls).items()):
        if isinstance(value, property):
            yield f"    {member}: {value.fget.__annotations__.get('return')}"
        elif inspect.isfunction(value) and (member == "__call__" or not member.startswith("_")):
            yield f"    {member}{signature(value)}"


def signature(function: Any) -> str:
    """The signature with annotations as they are written."""
    text = str(inspect.signature(function))
    return re.sub(r"'([^']*)'(?=[,)=]| =|$)", r"\1", text)


def family(spec: OpSpec) -> Iterator[str]:
    """Recurrence, arrays, what maps apply to, lowering, and the parameters of a backend's method."""
    yield spec.recurrence
    for arg in spec.arrays({**spec.defaults, "initial_state": None}):
        yield f"    {arg.name}: {arg.shape} ({arg.role}{', optional' if arg.optional else ''})"
    for option in spec.options:
        yield f"    {option.name}: {' | '.join(kind.__name__ for kind in option.types)} = {option.default!r}"
    yield f"    feature map applies to {', '.join(spec.mapped) or 'nothing'}"
    yield f"    lowers to {spec.lowering.to if spec.lowering else 'nothing'}"
    yield f"    method: {', '.join(spec.parameters)}"
    if spec.name in DECODING:
        yield f"    decode method: {', '.join(DECODING[spec.name].parameters)}"
    if spec.name in SUMMARIES:
        yield f"    summary method: {', '.join(SUMMARIES[spec.name].parameters)}"


def commands() -> Iterator[str]:
    """Each command of ``linattn``, those that pyproject.toml declares included, with its arguments and options."""
    app = typer.Typer()
    app.registered_commands = [known for known in cli.app.registered_commands if _is_ours(known.callback)]
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]["linattn.commands"]
    for name, value in declared.items():
        app.command(name=name)(EntryPoint(name, value, "linattn.commands").load())
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]
        parameters = (parameter.opts for parameter in command.params)
        yield f"{name} {' '.join('/'.join(opts) for opts in parameters)}".rstrip()


def _is_ours(callback: Any) -> bool:
    """Other tests add commands of their own."""
    return callback.__module__ == cli.__name__


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    print(f"wrote {FILE}")
