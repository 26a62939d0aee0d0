"""The table of docs/operators.md that says which input maps the kernels make."""

from __future__ import annotations

import re
from pathlib import Path

import linattn
import pytest
import torch
from linattn import gates

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| maps in Triton's kernels |")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = [[re.findall("`([^`]+)`", cell) for cell in line.strip("|").split("|")] for line in TABLE]
DOCUMENTED = [
    (family, form, made) for families, both, decode in ROWS for family in families
    for form, made in (("chunk", both), ("recurrent", both), ("decode", decode))
]  # fmt: skip
MAPS = {"qk_norm": "l2", "gate": gates.Softplus(torch.zeros(2)), "beta_map": "sigmoid"}
SHAPES = {"u": (2, 16), "beta": (1, 1, 2)}


@pytest.mark.parametrize(("family", "form", "made"), DOCUMENTED, ids=[f"{form}_{family}" for family, form, _ in DOCUMENTED])
def test_linattn_applies_what_the_kernels_do_not_make(family, form, made):
    function = getattr(linattn, f"{form}_{family}")
    scalar = family in ("simple_gla", "gated_delta_rule")
    shapes = SHAPES | ({"g": (1, 1, 2)} if scalar else {})
    arrays = {arg.name: torch.randn(shapes.get(arg.name, (1, 1, 2, 16))) for arg in function.spec.args if not arg.optional}
    maps = {name: value for name, value in MAPS.items() if name in function.spec.option_names}
    state = {"state": torch.zeros(1, 2, 16, 16)} if form == "decode" else {}
    plan = linattn.explain(function, *arrays.values(), **maps, **state, backend="triton")
    assert set(plan.applied) == maps.keys() - set(made)


def test_every_family_with_maps_is_in_the_table():
    mapped = {name for name, spec in linattn.spec.FAMILIES.items() if {"qk_norm", "gate", "beta_map"} & {*spec.option_names}}
    assert {family for family, _, _ in DOCUMENTED} == mapped
