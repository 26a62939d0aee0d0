"""The table of layers in the documentation is what the classes say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from linattn import nn
from linattn.nn import layers

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"


def row(name):
    cls = getattr(nn, name)
    layer = cls(device="meta")
    D, parameters = layer.hidden_size, sum(p.numel() for p in layer.parameters())
    return f"| `{name}` | `{cls.operator}` | {cls.paper} | {D} | {parameters / D**2:.2f} D² |"


def test_the_table_lists_every_layer():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `") and "D² |" in line]
    assert rows == [row(name) for name in sorted(layers.__all__, key=str.lower)]
