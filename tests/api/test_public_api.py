"""The public API is what public_api.txt says, and public names say that they are linattn's."""

from __future__ import annotations

import inspect
import re
import typing

import linattn
import public_api


def test_the_api_is_as_written_down():
    assert public_api.render() == public_api.FILE.read_text(encoding="utf-8"), (
        "the public API changed: if that is meant (docs/stability.md), run python tests/api/public_api.py"
    )


def test_public_names_belong_to_the_package():
    defined_elsewhere = {
        name: value.__module__
        for name, value in vars(linattn).items()
        if name in linattn.__all__ and (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ != "linattn"
    }
    assert not defined_elsewhere


def test_all_is_sorted_and_complete():
    assert linattn.__all__ == sorted(linattn.__all__)
    assert all(hasattr(linattn, name) for name in linattn.__all__)


def test_annotations_can_be_evaluated():
    for name in linattn.ops.__all__:
        hints = typing.get_type_hints(getattr(linattn, name))
        assert hints.get("output_final_state", bool) is bool


def test_docstrings_describe_the_parameters_there_are():
    for name in linattn.ops.__all__:
        operator = getattr(linattn, name)
        if not hasattr(operator, "spec"):
            continue
        arguments = operator.__doc__.partition("\nArgs:\n")[2].partition("\n\n")[0]
        described = re.findall(r"^    (\w+):", arguments, re.MULTILINE)
        assert sorted(described) == sorted(inspect.signature(operator).parameters), name
