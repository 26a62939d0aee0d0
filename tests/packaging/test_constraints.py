"""``constraints.txt`` pins what README.md's block of tests installs and what ``.ci/run`` adds, no more and no less.

Compared with what is installed, so an environment that the block made is needed: continuous integration has one, and says so by
``CI=1``. Elsewhere what is not installed, or in another version, is a reason to skip.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- \.ci/run executes this block: tests -->\n```shell\n(.*?)```", re.DOTALL)
PINS = ROOT / "constraints.txt"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    """The versions pinned, by name."""
    lines = [Requirement(line) for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in lines}


def asked(script: str) -> Iterator[Requirement]:
    """What the lines of a script that install under the constraints ask for."""
    for line in script.splitlines():
        if "pip install " not in line or " -c constraints.txt" not in line or "$" in line.partition("pip install")[2]:
            continue
        words = shlex.split(line.partition("pip install ")[2].partition(";")[0], comments=True)
        while words:
            word = words.pop(0)
            if word in ("-c", "-e", "--group"):
                argument = words.pop(0)
                if word == "-e":
                    yield Requirement(f"linattn{argument.removeprefix('.')}")
                elif word == "--group":
                    yield from group(argument)
            elif not word.startswith("-"):
                yield Requirement(word)


def group(name: str) -> Iterator[Requirement]:
    """A dependency group of pyproject.toml."""
    lines: list[Any] = tomllib.loads(text("pyproject.toml"))["dependency-groups"][name]
    for line in lines:
        yield from group(line["include-group"]) if isinstance(line, dict) else [Requirement(line)]


def installed(asked: list[Requirement]) -> dict[str, str]:
    """Versions of what is asked for and of all that it requires, as they are installed here."""
    found: dict[str, str] = {}
    done, left = set(), list(asked)
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in done:
            continue
        done.add((name, *sorted(one.extras)))
        try:
            found[name] = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            elsewhere(f"{name} is not installed")
            continue
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                left.append(needed)
    return {name: version for name, version in found.items() if name != "linattn"}


def elsewhere(reason: str) -> None:
    """This is no environment that the block made: in continuous integration that is a fault."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def test_constraints_are_what_the_block_installs():
    block = BLOCK.search(text("README.md"))
    assert block
    found = installed(list(asked(block[1])))
    extra = {canonicalize_name(one.name) for one in asked(text(".ci/run"))}
    assert found.keys() - pins().keys() == set(), "installed and not pinned"
    assert pins().keys() - found.keys() - extra == set(), "pinned and not installed"
    other = {name: (version, pins()[name]) for name, version in found.items() if version != pins()[name]}
    if other:
        elsewhere(f"installed in other versions than pinned: {other}")


def test_what_is_asked_for_is_read_off_the_block():
    script = """\
.venv/bin/pip install -c constraints.txt "pip>=25.1"
.venv/bin/pip install -c constraints.txt -e ".[torch,bench]"
    if ! .venv/bin/pip install --no-deps -c constraints.txt other; then
"$python" -m pip install -q -c constraints.txt "$archive"
.venv/bin/python -m pytest
"""
    assert [str(one) for one in asked(script)] == ["pip>=25.1", "linattn[bench,torch]", "other"]
